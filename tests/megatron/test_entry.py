"""The entries: data flags, validation, refusals in one sentence, and other people's scripts."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pool import Pool
from runs import TINY, TrainResult

from megatron_aro.megatron import preflight

REPOSITORY = Path(__file__).resolve().parents[2]
REAL = [flag for flag in TINY if flag != "--mock-data"]
EVALUATED = [*REAL, "--train-iters", "30", "--eval-iters", "1", "--log-interval", "30"]


# Data


def write_corpus(prefix: str, token: int, documents: int = 40) -> None:
    """Documents of 100 times one token."""
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=numpy.uint16)
    for _ in range(documents):
        builder.add_document(torch.full((100,), token), [100])
    builder.finalize(prefix + ".idx")


def write_corpora(folder: str) -> None:
    for name, token in (("ones", 1), ("twos", 2), ("large", 300)):
        write_corpus(f"{folder}/{name}", token)


@pytest.fixture(scope="module")
def corpora(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefixes ones, twos and large (token 300)."""
    folder = tmp_path_factory.mktemp("corpora")
    pool.run(1, write_corpora, str(folder))
    return folder


def validation_loss(result: TrainResult, split: str = "validation") -> float:
    found = re.search(rf"on {split} set \| lm loss value: (\S+)", result.stdout)
    assert found, result.stdout[-2000:] + result.stderr[-2000:]
    return float(found[1])


def test_splits_are_read_from_their_own_files(pool: Pool, corpora: Path) -> None:
    """What was learnt from ones predicts ones in the test split, not twos in validation."""
    argv = [*EVALUATED, "--train-data-path", "ones", "--valid-data-path", "twos"]
    argv += ["--test-data-path", "ones", "--data-cache-path", str(corpora / "cache")]
    result = pool.train(1, [str(corpora / a) if a in ("ones", "twos") else a for a in argv])[0]
    assert validation_loss(result, "test") < 0.5 < 3 < validation_loss(result)


def test_a_blend_draws_from_all_its_parts(pool: Pool, corpora: Path) -> None:
    """Ones and twos in equal parts: both are learnt, in every split of one --data-path."""
    blend = ["--data-path", "0.5", str(corpora / "ones"), "0.5", str(corpora / "twos")]
    cache = ["--data-cache-path", str(corpora / "cache"), "--split", "8,1,1"]
    result = pool.train(1, [*EVALUATED, *blend, *cache])[0]
    # Half of the first iteration's tokens are each: a start near log(256) and an end near 0.
    assert result.losses[0] > 4
    assert validation_loss(result) < 0.5 and validation_loss(result, "test") < 0.5


def test_data_flags_in_files_mean_the_same(pool: Pool, corpora: Path, tmp_path: Path) -> None:
    """--data-args-path and --per-split-data-args-path give the runs of the flags they stand for."""
    ones, twos = corpora / "ones", corpora / "twos"
    (tmp_path / "blend").write_text(f"0.3 {ones} 0.7 {twos}")
    splits = f'{{"train": "{ones}", "valid": ["{twos}"], "test": "{ones}"}}'
    (tmp_path / "splits.json").write_text(splits)
    cache = ["--data-cache-path", str(corpora / "cache")]
    split = ["--split", "1,0,0"]
    for file_flag, flags in (
        (
            ["--data-args-path", "blend", *split],
            ["--data-path", "0.3", ones, "0.7", twos, *split],
        ),
        (
            ["--per-split-data-args-path", "splits.json"],
            ["--train-data-path", ones, "--valid-data-path", twos, "--test-data-path", ones],
        ),
    ):
        stored = [file_flag[0], str(tmp_path / file_flag[1]), *file_flag[2:]]
        by_file = pool.train(1, [*REAL, *cache, *stored])[0]
        by_flags = pool.train(1, [*REAL, *cache, *map(str, flags)])[0]
        assert by_file.losses == by_flags.losses and len(by_file.losses) == 5


def test_ranks_read_their_shares(pool: Pool, corpora: Path) -> None:
    """Two data parallel ranks together see the batches of one process; stages and tensor ranks run.

    The blend makes batches differ; losses differ by float32 summation (1e-6 of 5) only.
    """
    argv = [*REAL, "--data-path", "1", str(corpora / "ones"), "1", str(corpora / "twos")]
    argv += ["--split", "1,0,0", "--data-cache-path", str(corpora / "cache")]
    one, two = pool.train(1, argv)[0], pool.train(2, argv)[0]
    assert two.losses == pytest.approx(one.losses, abs=1e-5)
    staged = ["--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size", "2"]
    losses = pool.train(4, [*argv, *staged, "--sequence-parallel"])[0].losses
    assert len(losses) == 5 and losses[-1] < losses[0] - 0.5


def test_multi_token_prediction(pool: Pool) -> None:
    """MTP layers get their data on the last stage; their loss is reported beside the main one."""
    argv = [*TINY, "--mtp-num-layers", "1", "--position-embedding-type", "rope"]
    one = pool.train(1, argv)[0]
    two = pool.train(2, [*argv, "--pipeline-model-parallel-size", "2"])[0]
    assert one.losses[0] == pytest.approx(two.losses[0], abs=0.05)
    assert "mtp_1 loss" in one.stdout


# Refusals

REFUSALS = {
    "no data": ([], "There is no data: give --data-path .*, or --mock-data."),
    "missing": (["--data-path", "nowhere"], "Data file nowhere.idx does not exist: .*"),
    "cut off": (
        ["--data-path", "{cut}"],
        "{cut}.bin has 7999 bytes, but its .idx speaks of 8000.*",
    ),
    "vocabulary": (
        ["--train-data-path", "1", "{ones}", "1", "{large}"],
        "{large}.bin holds token id 300, but the vocabulary of NullTokenizer ends at 255 .*",
    ),
    "empty split": (
        ["--data-path", "{ones}"],
        "{ones} has 40 documents, of which --split 969, 30, 1 leaves none for test: .*",
    ),
    "no file of flags": (["--data-args-path", "nowhere"], ".*No such file.*nowhere.*"),
    "unknown flag": (
        ["--mock-data", "--leraning-rate", "1"],
        "unrecognized .*--leraning-rate 1 .*",
    ),
    "wrong choice": (["--mock-data", "--optimizer", "adman"], ".*--optimizer: invalid choice: .*"),
    "no world": (
        ["--mock-data", "--tensor-model-parallel-size", "2"],
        "world size .1. is not divisible by total_model_size .*",
    ),
    "needs a GPU": (["--mock-data", "--distributed-backend", "nccl"], ".*nccl needs a GPU, .*"),
    "other script": (["--mock-data", "--sft"], "--sft is not part of this entry: .*"),
    "not with aro": (
        ["--mock-data", "--optimizer", "aro", "--fp16"],
        "--optimizer aro does not work with --fp16: .*; use --bf16, .*",
    ),
    "bare assertion": (
        ["--mock-data", "--save", "{save}"],
        "`args.save_interval .*` does not hold.*",
    ),
    "while building": (
        ["--mock-data", "--lr-warmup-iters", "9"],
        "`self.lr_warmup_steps < self.lr_decay_steps` does not hold .*",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_are_one_sentence(
    pool: Pool, corpora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Exit code 2, one line `error: ...` on stderr, no traceback, and nothing left behind."""
    cut = tmp_path / "cut"
    if case == "cut off":
        cut.with_suffix(".idx").write_bytes((corpora / "ones.idx").read_bytes())
        cut.with_suffix(".bin").write_bytes((corpora / "ones.bin").read_bytes()[:-1])
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    names = {name: str(corpora / name) for name in ("ones", "large")}
    names |= {"cut": str(cut), "save": str(tmp_path / "save")}
    flags, message = REFUSALS[case]
    save = [] if "--save" in flags else ["--save", names["save"], "--save-interval", "5"]
    (result,) = pool.train(1, [*REAL, *save, *(flag.format(**names) for flag in flags)])
    assert result.exit_status == 2 and result.losses == []
    errors = [line for line in result.stderr.splitlines() if line.startswith("error")]
    assert len(errors) == 1 and re.fullmatch("error: " + message.format(**names), errors[0])
    assert "Traceback" not in result.stderr
    assert sorted(tmp_path.iterdir()) == before


def raise_in(phase: str) -> str:
    """What `launch.reported` does with a check that fails in the loss function, or a dataset."""
    from megatron_aro import pretrain_gpt

    megatron = {"__name__": "megatron.somewhere"}
    exec("def check(*args, **kwargs): raise ValueError('on purpose')", megatron)
    setattr(pretrain_gpt, phase, megatron["check"])
    try:
        return str(pretrain_gpt.main(TINY))
    except ValueError as error:
        return f"raised {error}"


def test_only_errors_before_training_are_sentences(pool: Pool) -> None:
    """A data set that cannot be built is a refusal; the same error in a step is a traceback."""
    assert pool.run(1, raise_in, "GPTDatasetConfig") == ["2"]
    assert pool.run(1, raise_in, "loss") == ["raised on purpose"]


def test_a_traceback_on_request(pool: Pool) -> None:
    """MEGATRON_ARO_TRACEBACK=1 lets a refusal through as it is."""
    rank = pool.run_ranks(1, with_traceback)[0]
    assert "nowhere.idx does not exist" in rank.error and "Traceback" in rank.error


def with_traceback() -> int:
    from megatron_aro import pretrain_gpt

    os.environ["MEGATRON_ARO_TRACEBACK"] = "1"
    return pretrain_gpt.main([*REAL, "--data-path", "nowhere"])


def without_transformer_engine() -> str:
    from argparse import Namespace

    from megatron_aro.megatron import preflight

    sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # as if not installed
    try:
        preflight.check_settings(Namespace(transformer_impl="transformer_engine"))
    except ValueError as error:
        return str(error)
    return ""


def test_transformer_engine_is_not_replaced_silently(pool: Pool) -> None:
    """Where it cannot be imported, with a GPU too, the sentence says what to pass."""
    said = "transformer-engine is not installed: pass --transformer-impl local."
    assert pool.run(1, without_transformer_engine) == [said]


def fail_on_rank_1() -> None:
    from megatron_aro import pretrain_gpt

    flags = ["--nonsense"] if os.environ["RANK"] == "1" else []
    sys.exit(pretrain_gpt.main([*TINY, *flags]))


def test_an_error_of_one_rank_is_heard(pool: Pool) -> None:
    """Rank 0 waits for a rank that refused: that rank speaks, with its number."""
    _, second = pool.run_ranks(2, fail_on_rank_1, grace=0.5)
    assert (
        second.stderr == "error on rank 1: unrecognized arguments: --nonsense "
        "(--help lists all flags)\n"
    )


# The real command lines


def launch(*words: str, processes: int = 0) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", *words]
    if processes:
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [sys.executable, "-m", *torchrun, "-m", *words]
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_torchrun_trains() -> None:
    """Two processes of torchrun train without a GPU, and say so in one line."""
    done = launch("megatron_aro.pretrain_gpt", *TINY, processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("No GPU") == 1 and done.stdout.count("elapsed time per iteration") == 5


def test_torchrun_says_what_is_wrong_once() -> None:
    """A world size that does not divide: one sentence for two ranks, and a failed command."""
    done = launch(
        "megatron_aro.pretrain_gpt", *TINY, "--pipeline-model-parallel-size", "4", processes=2
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert done.returncode != 0
    assert len(errors) == 1 and "world size (2) is not divisible by" in errors[0]


def test_one_process_needs_no_torchrun(tmp_path: Path) -> None:
    """Plain `python -m` trains; here somebody's script does, by megatron_aro.run."""
    script = tmp_path / "theirs.py"
    (tmp_path / "beside.py").write_text("NAME = 'their optimizer is'")
    script.write_text(THEIRS)
    done = launch("megatron_aro.run", str(script), *TINY, "--their-flag", "7")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "their optimizer is adam 7" in done.stdout
    assert "No GPU" in done.stdout
    assert done.stdout.count("elapsed time per iteration") == 5


THEIRS = """
import sys
import torch
from beside import NAME
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron_aro.pretrain_gpt import datasets, forward_step

def more(parser):
    assert "aro" in next(a for a in parser._actions if a.dest == "optimizer").choices
    parser.add_argument("--their-flag", type=int)
    return parser

if __name__ == "__main__":
    args = parse_and_validate_args(extra_args_provider=more)
    print(NAME, args.optimizer, args.their_flag)
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    store = torch.distributed.HashStore()
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step, store=store)
"""


@pytest.mark.parametrize("argv", [[], ["--optimizer", "aro"], ["nowhere.py"]])
def test_a_missing_script_is_one_sentence(pool: Pool, argv: list[str]) -> None:
    """run.py without a script, or with one that is not there."""
    (result,) = pool.train(1, argv, entry="run")
    assert result.exit_status == 2
    assert re.fullmatch(
        r"error: (Which script\? .*|Script nowhere.py does not exist.)\n", result.stderr
    )


def test_a_save_that_would_fail_later_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron needs psutil at the first torch_dist save, not before."""
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    args = argparse.Namespace(transformer_impl="local", save="out", ckpt_format="torch_dist")
    with pytest.raises(ValueError, match="psutil"):
        preflight.check_settings(args)
    args.ckpt_format = "torch"
    preflight.check_settings(args)


def test_a_script_is_told_what_aro_refuses(pool: Pool, tmp_path: Path) -> None:
    """In somebody's own script too ARO's refusals are one sentence; its errors stay its own."""
    script = tmp_path / "script.py"
    script.write_text(
        "from megatron.training.arguments import parse_and_validate_args\n"
        "parse_and_validate_args()\n"
        "raise ValueError('mine')\n"
    )
    argv = [str(script), *TINY, "--optimizer", "aro"]
    (refused,) = pool.train(1, [*argv, "--fp16"], entry="run")
    assert refused.exit_status == 2
    assert "error: --optimizer aro does not work with --fp16" in refused.stderr
    assert "Traceback" not in refused.stderr
    (rank,) = pool.run_ranks(1, "runs:train", argv, entry="run")
    assert "ValueError: mine" in rank.error


def test_a_megatron_without_its_model_builder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.18 works with other scripts; this entry's flags would have no model there."""
    monkeypatch.setattr(preflight.support, "megatron_version", "0.18.2")
    with pytest.raises(ValueError, match="needs megatron-core 0.19: with 0.18, run "):
        preflight.check_megatron()
