"""CPU mode: real Megatron trains right without a GPU, and a GPU is left alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from pool import Pool
from runs import TINY, TrainResult, full_weights

from megatron_aro.megatron import cpu_mode
from megatron_aro.megatron.cpu_mode import flags

SP = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
CP = ["--context-parallel-size", "2"]
EP = ["--expert-model-parallel-size", "2"]
DEEP = [*TINY, "--num-layers", "4"]
MOE = [*TINY, "--num-experts", "4", "--moe-router-topk", "2", "--swiglu", "--disable-bias-linear"]
MOE += ["--normalization", "RMSNorm", "--untie-embeddings-and-output-weights"]
ROTARY = [*TINY, "--position-embedding-type", "rope"]
ROTARY += ["--group-query-attention", "--num-query-groups", "2"]
MODELS = {"dense": DEEP, "moe": MOE, "rotary": ROTARY}
ONE_ITERATION = ["--train-iters", "1", "--lr-warmup-iters", "0"]
FROM_CHECKPOINT = ["--finetune", "--no-load-optim", "--no-load-rng"]


# With a GPU, and flags alone


def test_a_gpu_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU, enable() changes no name of torch.cuda or torch.distributed and no variable."""
    monkeypatch.setattr(cpu_mode, "_gpu_is_available", lambda: True)
    modules = torch.cuda, torch.cuda.random, torch.cuda.nvtx, torch.distributed
    before = [dict(vars(module)) for module in modules], dict(os.environ)
    assert not cpu_mode.enable()
    assert not cpu_mode.is_active()
    assert ([dict(vars(module)) for module in modules], dict(os.environ)) == before
    assert cpu_mode.prepare(["--bf16", "--transformer-impl", "x"]) == [
        "--bf16",
        "--transformer-impl",
        "x",
    ]


def test_default_flags_complete_what_the_user_gave() -> None:
    """What is there, in either spelling, is not given twice."""
    added = cpu_mode.default_flags(["--transformer-impl", "local", "--num-workers=2"])
    assert "--transformer-impl" not in added and "--num-workers" not in added
    assert added[:2] == ["--distributed-backend", "gloo"]
    assert "--no-persist-layer-norm" in added
    assert cpu_mode.default_flags(added + ["--transformer-impl=local", "--num-workers", "0"]) == []


@pytest.mark.parametrize(
    "argv",
    [
        "--transformer-impl transformer_engine",
        "--transformer-impl=transformer_engine",
        "--distributed-backend nccl",
        "--attention-backend flash",
        "--use-flash-attn",
        "--moe-grouped-gemm --bf16",
    ],
)
def test_flags_that_need_a_gpu_are_refused(argv: str) -> None:
    """One sentence names the flag, its value and the way out."""
    asked = argv.replace("=", " ").removesuffix(" --bf16")
    with pytest.raises(ValueError, match=rf"^{asked} needs a GPU, .*: (use|drop) [^.]*\.$"):
        cpu_mode.default_flags(argv.split())


def known_flags() -> set[str]:
    import argparse

    from megatron.training import arguments

    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return set(parser._option_string_actions)


def test_every_flag_exists_in_megatron(pool: Pool) -> None:
    """No row of the two tables is about a flag that Megatron does not have."""
    mine = {words[0] for words in flags._REQUIRED} | {need.flag for need in flags._NEED_GPU}
    assert mine - pool.run(1, known_flags)[0] == set()


# Torch and our own code beside Megatron


def truths() -> dict[str, object]:
    from torch.utils.data import DataLoader

    weight = torch.nn.Parameter(torch.ones(3))
    adam = torch.optim.AdamW([weight], fused=True)
    weight.grad = torch.ones(3)
    adam.step()
    torch.manual_seed(5)
    with torch.random.fork_rng():
        inside = torch.rand(1)
    loader = DataLoader(list(range(4)), pin_memory=True, batch_size=2)
    as_megatron = {"__name__": "megatron.core.somewhere", "torch": torch}
    return {
        "active": cpu_mode.is_active(),
        "available": torch.cuda.is_available(),
        "devices": torch.cuda.device_count(),
        "to megatron": eval("torch.cuda.is_available()", as_megatron),
        "its devices": eval("torch.cuda.device_count()", as_megatron),
        "stepped": bool((weight < 1).all()),
        "forked": bool(inside == torch.rand(1)),
        "loaded": [batch.tolist() for batch in loader],
        "moved": str(torch.ones(1, device="cuda:0").cuda().to("cuda").device),
        "module": str(torch.nn.Linear(2, 2, device="cuda").cuda().weight.device),
    }


def test_torch_hears_the_truth(pool: Pool) -> None:
    """Only Megatron is told that there is a GPU; loaders, optimizers and forked RNG work."""
    assert pool.run(2, truths)[1] == {
        "active": True,
        "available": False,
        "devices": 0,
        "to megatron": True,
        "its devices": 2,
        "stepped": True,
        "forked": True,
        "loaded": [[0, 1], [2, 3]],
        "moved": "cpu",
        "module": "cpu",
    }


# Layouts


@pytest.fixture(scope="module")
def checkpoints(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A torch_dist checkpoint of initial weights of each model, which depend on the layout."""
    folders = {}
    for name, model in MODELS.items():
        folders[name] = tmp_path_factory.mktemp(name)
        save = ["--save", str(folders[name]), "--save-interval", "1", *ONE_ITERATION]
        assert pool.train(1, [*model, *save])[0].exit_status == 0
    return folders


@pytest.fixture(scope="module")
def one_process(pool: Pool, checkpoints: dict[str, Path]) -> dict[str, list[TrainResult]]:
    """What one process makes of these weights in five iterations."""
    return {
        name: pool.train(1, [*model, "--load", str(checkpoints[name]), *FROM_CHECKPOINT])
        for name, model in MODELS.items()
    }


LAYOUTS = {
    "dp2": (2, "dense", []),
    "dp2-distributed": (2, "dense", ["--use-distributed-optimizer"]),
    "dp2-overlap": (
        2,
        "dense",
        ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
        + ["--ddp-bucket-size", "4000"],
    ),
    "tp2": (2, "dense", ["--tensor-model-parallel-size", "2"]),
    "tp2-sequence": (2, "dense", SP),
    "pp2": (2, "dense", ["--pipeline-model-parallel-size", "2"]),
    "pp2-virtual": (
        2,
        "dense",
        ["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"],
    ),
    "cp2": (2, "dense", CP),
    "cp2-no-mask": (2, "dense", [*CP, "--no-create-attention-mask-in-dataloader"]),
    "cp2-dp2-distributed": (4, "dense", [*CP, "--use-distributed-optimizer"]),
    "cp2-tp2": (4, "dense", [*CP, *SP]),
    "cp4": (4, "dense", ["--context-parallel-size", "4"]),
    "cp2-rotary": (2, "rotary", CP),
    "tp2-dp2-distributed": (4, "dense", [*SP, "--use-distributed-optimizer"]),
    "ep2": (2, "moe", [*EP, "--moe-token-dispatcher-type", "alltoall"]),
    "tp2-ep2-etp1": (2, "moe", [*SP, *EP, "--expert-tensor-parallel-size", "1"]),
    # Experts split over tensor ranks get unequal numbers of tokens: gloo's gap in `collectives`.
    "tp2-ep2-uneven": (4, "moe", [*SP, *EP, "--moe-token-dispatcher-type", "alltoall"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_train_like_one_process(
    pool: Pool,
    checkpoints: dict[str, Path],
    one_process: dict[str, list[TrainResult]],
    layout: str,
) -> None:
    """AdamW's losses and final weights from one checkpoint are those of one process.

    Float32 sums in another order: losses near 5 agree to a few float32 roundings (1e-6 each).
    Weights move by up to lr = 1e-2 a step, in a direction that Adam makes of each gradient's sign
    where it is tiny: 1e-4 is a hundredth of one step.
    """
    world_size, name, extra = LAYOUTS[layout]
    model = MODELS[name]
    load = ["--load", str(checkpoints[name]), *FROM_CHECKPOINT]
    results = pool.train(world_size, [*model, *load, *extra])
    expected = one_process[name]
    assert expected[0].losses[-1] < expected[0].losses[0] - 0.1
    assert results[0].losses == pytest.approx(expected[0].losses, abs=1e-5)
    weights, wanted = full_weights(results), full_weights(expected)
    assert weights.keys() == wanted.keys()
    for key, weight in weights.items():
        torch.testing.assert_close(
            weight, wanted[key], rtol=0, atol=1e-4, msg=lambda m, k=key: k + m
        )


def test_a_window_is_refused_under_context_parallelism(pool: Pool) -> None:
    """Megatron's mask for it knows only where keys are counted from, not which queries are here."""
    results = pool.train(2, [*TINY, *CP, "--window-size", "4,0"])
    assert [result.exit_status for result in results] == [2, 2]
    assert "error: --window-size with --context-parallel-size needs a GPU" in results[0].stderr


def test_tensor_parallel_ranks_draw_different_weights(pool: Pool) -> None:
    """The tracker of random states seeds each tensor rank apart, and all of them reproducibly."""
    argv = [*TINY, *SP, *ONE_ITERATION]
    first, second = pool.train(2, argv), pool.train(2, argv)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    assert first[0].shards[name].size == 2
    assert not torch.allclose(first[0].weights[name], first[1].weights[name], atol=1e-2)
    assert all(
        torch.equal(a.weights[name], b.weights[name]) for a, b in zip(first, second, strict=True)
    )


# One process and data parallel


def test_two_runs_are_bit_identical(pool: Pool) -> None:
    """Same seed, same everything: losses, gradient norms and weights, with dropout and overlap."""
    argv = [*TINY, "--use-distributed-optimizer", "--overlap-grad-reduce"]
    argv += ["--overlap-param-gather", "--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
    (first, _), (second, _) = pool.train(2, argv), pool.train(2, argv)
    assert first.losses == second.losses
    assert first.grad_norms == second.grad_norms
    assert all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)


def test_recomputation_draws_the_same_dropout(pool: Pool) -> None:
    """Random states are restored when a layer runs again: the losses do not change by a bit."""
    argv = [*TINY, "--hidden-dropout", "0.2", "--attention-dropout", "0.2"]
    recompute = ["--recompute-granularity", "full", "--recompute-method", "uniform"]
    recompute += ["--recompute-num-layers", "1"]
    (plain,), (recomputed,) = pool.train(1, argv), pool.train(1, [*argv, *recompute])
    assert plain.losses == recomputed.losses


def test_bf16(pool: Pool) -> None:
    """bfloat16 with float32 main parameters follows float32 to bfloat16's 3 digits."""
    argv = [*TINY, "--use-distributed-optimizer"]
    half, full = pool.train(2, [*argv, "--bf16"])[0], pool.train(2, argv)[0]
    assert {weight.dtype for weight in half.weights.values()} == {torch.bfloat16}
    assert half.losses == pytest.approx(full.losses, abs=3e-2)
    assert half.losses != full.losses


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
def test_other_optimizers(pool: Pool, optimizer: str) -> None:
    """Megatron's other optimizers train too."""
    if optimizer == "muon":
        pytest.importorskip("emerging_optimizers")
    result = pool.train(2, [*TINY, "--optimizer", optimizer])[0]
    assert len(result.losses) == 5 and result.losses[-1] < result.losses[0]


@pytest.mark.parametrize("kind", ["torch_dist", "torch", "async"])
def test_checkpoints_resume_to_the_bit(pool: Pool, tmp_path: Path, kind: str) -> None:
    """Leaving after 3 of 6 iterations and resuming gives the losses of not leaving."""
    argv = [*TINY, "--train-iters", "6", "--hidden-dropout", "0.1"]
    stored = [*argv, "--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved")]
    stored += ["--save-interval", "1000"]
    stored += ["--async-save"] if kind == "async" else ["--ckpt-format", kind]
    whole = pool.train(2, argv)[0]
    before = pool.train(2, [*stored, "--exit-interval", "3"])[0]
    after = pool.train(2, stored)[0]
    assert len(before.losses) == len(after.losses) == 3
    assert before.losses + after.losses == whole.losses
    assert all(torch.equal(whole.weights[name], after.weights[name]) for name in whole.weights)


def test_reports_of_time_and_memory(pool: Pool, tmp_path: Path) -> None:
    """Timers, throughput, norms and memory are reported, and change nothing."""
    extra = "--log-throughput --timing-log-level 2 --log-params-norm --log-num-zeros-in-grad"
    extra += " --log-straggler --log-memory-to-tensorboard --log-timers-to-tensorboard --profile"
    extra += f" --tensorboard-dir {tmp_path} --log-interval 2 --log-progress --save {tmp_path}"
    extra += " --save-interval 1000 --logging-level 20"
    extra += " --profile-step-start 1 --profile-step-end 2"
    (first, last), quiet = pool.train(2, [*TINY, *extra.split()]), pool.train(2, TINY)[0]
    assert first.exit_status == 0 and first.losses == quiet.losses
    reports = "| allocated: 0.00", "forward-backward", "throughput per GPU", "params norm"
    said = first.stdout + last.stdout + last.stderr
    assert [word for word in reports if word not in said] == []
