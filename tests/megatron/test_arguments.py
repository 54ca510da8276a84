"""The command line: flags come from AROConfig, reach it, and bad ones stop with one sentence."""

import argparse
import dataclasses
import warnings
from types import SimpleNamespace

import pytest

from megatron_aro.config import AROConfig, flag, settings
from megatron_aro.megatron import arguments, hooks, support

MODEL = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16
    --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 --train-iters 2
    --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --transformer-impl local""".split()


@pytest.fixture
def parse(monkeypatch):
    """Megatron's real parser and validation on the flags of a small model."""
    hooks.register()
    from megatron.training.arguments import parse_args, validate_args

    def run(*flags: str, optimizer: str = "aro", lr: str = "1e-3") -> argparse.Namespace:
        monkeypatch.setattr("sys.argv", ["x", *MODEL, "--optimizer", optimizer, "--lr", lr, *flags])
        monkeypatch.setenv("WORLD_SIZE", "4")
        args = parse_args()
        validate_args(args)
        return args

    return run


def test_defaults_are_those_of_the_config(parse):
    """There is no second list of defaults."""
    assert arguments.aro_config(parse()) == AROConfig()


def test_every_setting_has_a_flag_that_reaches_it(parse):
    """Each flag, set to something else, changes its own field and nothing else."""
    other = {
        "momentum": 0.5,
        "beta2": 0.5,
        "update_rms": 0.3,
        "sinkhorn_iters": 3,
        "scqr_eps": 1e-6,
        "workspace_mib": 64,
        "monitor_interval": 100,
        "override": "*.router.weight=adamw,*.linear_qkv.weight#v=left",
        "split": "qkv",
    }
    for f in settings():
        choices = f.metadata["choices"]
        value = next(c for c in choices if c != f.default) if choices else other[f.name]
        args = parse("--use-distributed-optimizer", flag(f.name), str(value))
        got = arguments.aro_config(args)
        assert got == dataclasses.replace(AROConfig(), **{f.name: value})


def test_help_lists_the_flags_in_their_group(capsys):
    """--help works (Megatron 0.19.2's own fails on a bare %) and has one group for ARO."""
    hooks.register()
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    group = parser.format_help().partition("\naro:")[2]
    assert all(flag(f.name) in group for f in settings())


def test_the_distributed_optimizer_survives_validation(parse):
    """Megatron turns it into the layer-wise one for every name but adam and sgd."""
    args = parse("--use-distributed-optimizer")
    assert args.use_distributed_optimizer and args.optimizer == "aro"
    assert not args.use_layer_wise_distributed_optimizer


def test_the_log_names_the_optimizer(parse, capsys):
    """Megatron prints its arguments while it validates ARO as adam."""
    parse()
    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("  optimizer ."))
    assert line.endswith(" aro")


def test_other_optimizers_are_untouched(parse):
    """muon still becomes layer-wise, adam stays as it is, neither is asked about ARO."""
    muon = parse("--use-distributed-optimizer", optimizer="muon")
    assert muon.use_layer_wise_distributed_optimizer and not muon.use_distributed_optimizer
    assert parse("--log-num-zeros-in-grad", optimizer="adam").optimizer == "adam"


def test_registering_twice_wraps_once():
    """register() is idempotent."""
    import megatron.training.arguments as module

    hooks.register()
    once = module.validate_args
    hooks.register()
    assert module.validate_args is once
    try:
        module.validate_args = theirs = lambda *args: once(*args)  # somebody else's wrapper
        hooks.register()
        assert module.validate_args is theirs
    finally:
        module.validate_args = once


def test_programs_without_megatrons_command_line_are_left_alone():
    """A DDP wrap where no global arguments exist, by position or by keyword, passes through."""
    assert hooks._wrap_with_ddp(lambda model: model, ["chunk"]) == ["chunk"]
    assert hooks._wrap_with_ddp(lambda model: model, model=["chunk"]) == ["chunk"]


def test_settings_without_effect_are_named(parse):
    """An ARO flag beside another optimizer warns: it configures nothing."""
    with pytest.warns(UserWarning, match="--aro-qr has no effect"):
        parse("--aro-qr", "qr", optimizer="adam")


def test_starts_without_effect_are_named(parse):
    """Each start of a change of optimizer is for the optimizer that the change goes to."""
    starts = ["--aro-init-momentum", "zero", "--aro-init-exp-avg", "zero"]
    for optimizer, without in (("adam", "momentum"), ("aro", "exp-avg"), ("sgd", "")):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            parse("--optimizer", optimizer, *starts)
        said = [str(w.message) for w in caught if "has no effect" in str(w.message)]
        assert len(said) == (1 if without else 2)
        assert without in said[0]
    assert said[0].startswith("--aro-init-momentum has no effect without --optimizer aro")
    assert said[1].startswith("--aro-init-exp-avg has no effect without --optimizer adam")


def test_compared_runs_may_share_the_monitors_flag(parse, recwarn):
    """configs/logging.yaml has it for every optimizer, and there is nothing to warn of."""
    parse("--aro-monitor-interval", "100", optimizer="adam")
    assert not [w for w in recwarn if "has no effect" in str(w.message)]


@pytest.mark.parametrize(
    "flags",
    [
        ("--aro-momentum", "1"),
        ("--aro-momentum", "nan"),
        ("--aro-monitor-interval", "-1"),
        ("--aro-update-rms", "-0.2"),
        ("--aro-sinkhorn-iters", "0"),
        ("--aro-scqr-eps", "0"),
        ("--aro-beta2", "-1"),
        ("--aro-override", "*.linear_proj.weight=up"),
        ("--aro-override", "=left"),
        ("--aro-override", "*.linear_proj.weight=left,"),
        ("--aro-override", "*.linear_qkv.weight#q=adamw"),
        ("--aro-split", "heads"),
        ("--weight-decay", "-0.1"),
        ("--lr", "-1"),
        ("--lr", "inf"),
        ("--clip-grad", "-1"),
        ("--decoupled-lr", "nan"),
        ("--adam-beta1", "2"),
        ("--adam-eps", "-1"),
        ("--hidden-dropout", "2"),
        ("--init-method-std", "nan"),
        ("--num-layers", "0"),
        ("--seq-length", "0"),
        ("--vocab-size", "-7"),
        ("--log-interval", "0"),
    ],
)
@pytest.mark.parametrize("optimizer", ["aro", "adam"])
def test_values_out_of_range_name_flag_value_and_rule(parse, flags, optimizer):
    """One sentence before anything is built, whatever the optimizer."""
    with pytest.raises(support.RefusedError, match=flags[0]):
        parse(*flags, optimizer=optimizer)


@pytest.mark.parametrize(
    "flags", [("--aro-projection", "muon"), ("--aro-iters", "3"), ("--aro-qr",)]
)
def test_unknown_choices_and_flags_exit(parse, flags, capsys):
    """argparse names the flag and the choices."""
    with pytest.raises(SystemExit) as exit_:
        parse(*flags)
    assert exit_.value.code == 2
    assert flags[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ("--fp16",),
        ("--aro-param-layout", "whole"),
        ("--non-persistent-ckpt-type", "local"),
    ],
)
def test_unsupported_layouts_name_flag_reason_and_way_out(parse, flags):
    """What cannot be right yet stops at start-up."""
    with pytest.raises(
        support.RefusedError, match=r"^--optimizer aro does not work with --[^;]+: .+; .+\.$"
    ):
        parse(*flags)


@pytest.mark.parametrize("refusal", support._REFUSALS, ids=lambda r: r.flag)
def test_each_refusal_applies_to_some_arguments_and_not_to_plain_ones(parse, refusal):
    """No refusal is dead: its attribute exists in Megatron's arguments and turns it on."""
    args = parse()
    assert not refusal.applies(args)
    name = refusal.flag.split()[0].strip("-").replace("-", "_")
    for value in (2, True, "full_iteration", "somewhere.yaml", "torch", "whole", "local"):
        # What some refusals need.
        beside = {"save": "there", "aro_sharing": "chain", "aro_mode": "full-model"}
        if refusal.applies(SimpleNamespace(**{**vars(args), **beside, name: value})):
            break
    else:
        pytest.fail(f"nothing turns {refusal.flag} on")
    assert hasattr(args, name), f"Megatron has no argument {name}"


def test_untested_megatron_is_refused_unless_overridden(monkeypatch):
    """The sentence names the tested versions; an environment variable overrides."""
    monkeypatch.setattr(support, "megatron_version", "0.99.0+commit")
    monkeypatch.delenv(support.OVERRIDE, raising=False)
    with pytest.raises(RuntimeError, match=r"0\.19\.2 and found 0\.99\.0"):
        support.check_megatron_version()
    monkeypatch.setenv(support.OVERRIDE, "1")
    support.check_megatron_version()
