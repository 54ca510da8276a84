"""Saving and resuming with the same layout: bit for bit what an uninterrupted run gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from aro_runs import ARO, DISTRIBUTED, GATED, MOE, check_resumes
from pool import Pool

from megatron_aro.cli.inspect import inspect

# Dropout on: the state of the random number generators must come back too.
RUN = [*ARO, "--train-iters", "6", "--attention-dropout", "0.1", "--hidden-dropout", "0.1"]
RESHARDABLE = ["--dist-ckpt-optim-fully-reshardable"]
TORCH = ["--ckpt-format", "torch"]
MIXED = ["--aro-override", "*.linear_proj.weight=right", "--aro-split", "qkv"]
PROJ_TO_ADAMW = ["--aro-override", "*.linear_proj.weight=adamw", "--aro-init-rotation", "qr"]
TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
PP2 = ["--pipeline-model-parallel-size", "2"]
INSTANCES = [*DISTRIBUTED, "--num-distributed-optimizer-instances", "2"]
CP2 = ["--context-parallel-size", "2"]
EP2 = ["--expert-model-parallel-size", "2"]

# Three ranks and an odd width: the buckets of both optimizers are padded.
PADDED = """--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000
    --global-batch-size 6 --micro-batch-size 1 --ffn-hidden-size 34""".split()

CASES = {
    "float32": (1, GATED),
    "bf16, replicated": (2, [*GATED, "--bf16"]),
    "distributed": (2, [*GATED, *DISTRIBUTED]),
    "distributed bf16": (2, [*GATED, *DISTRIBUTED, "--bf16"]),
    "distributed bf16, fully reshardable": (2, [*GATED, *DISTRIBUTED, "--bf16", *RESHARDABLE]),
    "distributed, fully reshardable": (2, [*GATED, *DISTRIBUTED, *RESHARDABLE]),
    "distributed, padded buckets": (3, [*GATED, *DISTRIBUTED, *PADDED]),
    "distributed, padded buckets, fully reshardable": (
        3,
        [*GATED, *DISTRIBUTED, *PADDED, *RESHARDABLE],
    ),
    "distributed, two instances": (4, [*GATED, *INSTANCES]),
    "distributed, two instances, fully reshardable": (4, [*GATED, *INSTANCES, *RESHARDABLE]),
    "PP 2 x DP 2, two instances": (4, [*GATED, *PP2, *INSTANCES]),
    "EP 2, two instances": (4, [*MOE, *EP2, *INSTANCES]),
    "PP 2 x DP 2, a stage without layers": (
        4,
        [*GATED, *PP2, *DISTRIBUTED, "--pipeline-model-parallel-layout", "Ett|L"],
    ),
    "experts, distributed": (2, [*MOE, *DISTRIBUTED]),
    "projection adam, distributed": (2, [*GATED, *DISTRIBUTED, "--aro-projection", "adam"]),
    "torch, TP 2": (2, [*GATED, *TORCH, *TP2, "--bf16"]),
    "torch, distributed": (1, [*GATED, *TORCH, *DISTRIBUTED, "--bf16"]),
    "torch, DP 2 replicated": (2, [*GATED, *TORCH]),
    "torch, TP 2 x DP 2, projection adam": (
        4,
        [*GATED, *TORCH, *TP2, *DISTRIBUTED, "--bf16", "--aro-projection", "adam"],
    ),
    "torch, EP 2 x DP 2": (4, [*MOE, *TORCH, *EP2, *DISTRIBUTED]),
    "TP 2 x DP 2": (4, [*GATED, *TP2, *DISTRIBUTED, "--bf16"]),
    "TP 2 x DP 2, fully reshardable": (4, [*GATED, *TP2, *DISTRIBUTED, "--bf16", *RESHARDABLE]),
    "PP 2 x DP 2, replicated": (4, [*GATED, *PP2]),
    "experts, replicated": (2, MOE),
    "EP 2 x DP 2, fully reshardable": (4, [*MOE, *EP2, *DISTRIBUTED, *RESHARDABLE]),
    "EP 2 x DP 2, replicated": (4, [*MOE, *EP2]),
    "CP 2 x TP 2": (4, [*GATED, *CP2, *TP2, *DISTRIBUTED]),
    "EP 2 x DP 2": (4, [*MOE, *EP2, *DISTRIBUTED]),
}


@pytest.mark.parametrize(("world_size", "flags"), CASES.values(), ids=CASES.keys())
def test_a_resumed_run_is_bit_identical(
    pool: Pool, tmp_path: Path, world_size: int, flags: list[str]
) -> None:
    """Weights, momenta, moments, step counts, rotations, fall-back counters after 3 + 3 steps."""
    check_resumes(pool, tmp_path, world_size, [*RUN, *flags])


def test_the_checkpoints_own_arguments_can_be_used(pool: Pool, tmp_path: Path) -> None:
    """--use-checkpoint-args reads the checkpoint before anything can be compared with it."""
    argv = [*ARO, *GATED, *TP2]
    save = ["--save", str(tmp_path), "--save-interval", "5"]
    assert pool.train(2, [*argv, *save])[0].exit_status == 0
    load = ["--load", str(tmp_path), "--use-checkpoint-args", "--train-iters", "6"]
    resumed = pool.train(2, [*argv, *load, "--override-opt-param-scheduler"])[0]
    assert resumed.exit_status == 0, resumed.stderr[-2000:]
    assert len(resumed.losses) == 1


@pytest.mark.parametrize("form", [[], TORCH], ids=["torch_dist", "torch"])
def test_state_of_another_optimizer_or_setting_is_refused(
    pool: Pool, tmp_path: Path, form: list[str]
) -> None:
    """Nothing is reinitialised or misread silently: one sentence, before any weight changes.

    --no-load-optim starts from the weights alone; settings without state may change.
    """
    adam = ["adam" if flag == "aro" else flag for flag in [*ARO, *GATED, *form]]
    aro = [*ARO, *GATED, *form]
    for name, argv in (("adam", adam), ("aro", aro)):
        save = ["--save", str(tmp_path / name), "--save-interval", "5"]
        assert pool.train(1, [*argv, *save])[0].exit_status == 0
    for argv, sentence in (
        ([*aro, "--load", str(tmp_path / "adam")], "The checkpoint's optimizer is adam"),
        ([*adam, "--load", str(tmp_path / "aro")], "The checkpoint's optimizer is aro"),
        (
            [*aro, "--load", str(tmp_path / "aro"), "--aro-orientation", "left", *MIXED],
            "--aro-orientation from residual to left, --aro-override from none to "
            "*.linear_proj.weight=right, --aro-split from qkv,gate-up to qkv:",
        ),
        (
            [*aro, "--load", str(tmp_path / "aro"), *PROJ_TO_ADAMW],
            "sent nothing to AdamW with --aro-override, this one *.linear_proj.weight:",
        ),
        (
            [*aro, "--load", str(tmp_path / "aro"), "--aro-projection", "adam"],
            "--aro-projection from sinkhorn to adam",
        ),
    ):
        (refused,) = pool.train(1, argv)
        assert refused.exit_status == 2 and sentence in refused.stderr
    if form:
        (moved, _) = pool.train(2, [*aro, *TP2, "--load", str(tmp_path / "aro")])
        assert moved.exit_status == 2 and "saved with another layout" in moved.stderr
        assert "save with --ckpt-format torch_dist" in moved.stderr
    for flags in (
        ["--load", str(tmp_path / "adam"), "--finetune", "--no-load-optim"],
        ["--load", str(tmp_path / "aro"), "--aro-qr", "qr", "--train-iters", "7"]
        + ["--override-opt-param-scheduler"],
    ):
        started = pool.train(1, [*aro, *flags, "--no-load-rng"])[0]
        assert started.exit_status == 0
        assert started.losses[0] < 5.4  # from noise it is 5.55


@pytest.mark.parametrize("optimizer", ["adam", "aro"])
def test_flags_about_what_is_loaded_work_as_for_adam(
    pool: Pool, tmp_path: Path, optimizer: str
) -> None:
    """--ckpt-step, --no-load-optim, --finetune and --no-save-optim; losses say what started."""
    run = [optimizer if flag == "aro" else flag for flag in [*RUN, *GATED, "--bf16"]]
    save = ["--save", str(tmp_path / "all"), "--save-interval", "2"]
    straight = pool.train(2, [*run, *save])[0]
    load = ["--load", str(tmp_path / "all"), "--ckpt-step"]
    for flags, losses, first in (
        (["4"], 2, True),
        (["2"], 4, True),
        (["4", "--no-load-optim"], 2, True),
        (["4", "--finetune"], 6, False),
    ):
        resumed = pool.train(2, [*run, *load, *flags])[0]
        assert resumed.exit_status == 0 and len(resumed.losses) == losses, flags
        assert (resumed.losses[0] == straight.losses[-losses]) == first, flags
        assert resumed.losses[0] < straight.losses[0] - 0.02, flags  # trained weights
        assert (resumed.losses == straight.losses[-losses:]) == (len(flags) == 1), flags
    bare = ["--save", str(tmp_path / "bare"), "--save-interval", "2", "--no-save-optim"]
    assert pool.train(2, [*run, *bare, "--train-iters", "2"])[0].exit_status == 0
    found = inspect(tmp_path / "bare")["bytes"]
    assert found.keys() == {"weights"}
    # Megatron does not ask for the optimizer's state then, adam's neither.
    refused = pool.train(2, [*run, *load, "4", "--no-save-optim"])[0]
    assert refused.exit_status == 2 and not refused.losses
    assert "has --no-save-optim, with which" in refused.stderr or optimizer == "adam"
    more = ["--load", str(tmp_path / "bare"), "--override-opt-param-scheduler"]
    refused = pool.train(2, [*run, *more])[0]
    assert refused.exit_status == 2
    assert "--no-save-optim" in refused.stderr or optimizer == "adam"
    resumed = pool.train(2, [*run, *more, "--no-load-optim"])[0]
    assert resumed.exit_status == 0 and len(resumed.losses) == 4
