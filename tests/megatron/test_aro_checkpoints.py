"""Saving and resuming with the same layout: bit for bit what an uninterrupted run gives."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from aro_runs import ARO, DISTRIBUTED, GATED, MOE, optimizer_state, same
from pool import Pool

# Dropout on: the state of the random number generators must come back too.
RUN = [*ARO, "--train-iters", "6", "--attention-dropout", "0.1", "--hidden-dropout", "0.1"]
RESHARDABLE = ["--dist-ckpt-optim-fully-reshardable"]
TORCH = ["--ckpt-format", "torch"]

CASES = {
    "float32": (1, GATED),
    "bf16, replicated": (2, [*GATED, "--bf16"]),
    "distributed": (2, [*GATED, *DISTRIBUTED]),
    "distributed bf16": (2, [*GATED, *DISTRIBUTED, "--bf16"]),
    "distributed bf16, fully reshardable": (2, [*GATED, *DISTRIBUTED, "--bf16", *RESHARDABLE]),
    "distributed, fully reshardable": (2, [*GATED, *DISTRIBUTED, *RESHARDABLE]),
    "experts, distributed": (2, [*MOE, *DISTRIBUTED]),
    "projection adam": (1, [*GATED, "--aro-projection", "adam"]),
    "torch": (2, [*GATED, *TORCH, "--bf16"]),
    "torch, distributed": (2, [*GATED, *TORCH, *DISTRIBUTED, "--bf16"]),
}


@pytest.mark.parametrize(("world_size", "flags"), CASES.values(), ids=CASES.keys())
def test_a_resumed_run_is_bit_identical(
    pool: Pool, tmp_path: Path, world_size: int, flags: list[str]
) -> None:
    """Weights, momenta, moments, step counts, rotations, fall-back counters after 3 + 3 steps."""
    save = ["--save", str(tmp_path), "--save-interval", "3"]
    straight = pool.train(world_size, [*RUN, *flags, *save], inspect=optimizer_state)
    assert {p.name for p in tmp_path.glob("iter_*")} == {"iter_0000003", "iter_0000006"}
    shutil.rmtree(tmp_path / "iter_0000006")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")

    load = ["--load", str(tmp_path)]
    resumed = pool.train(world_size, [*RUN, *flags, *load], inspect=optimizer_state)
    for before, after in zip(straight, resumed, strict=True):
        assert after.exit_status == 0
        assert after.losses == before.losses[3:]
        assert same(after.weights, before.weights)
        assert same(after.inspected, before.inspected)


def test_a_checkpoint_of_another_optimizer_is_refused(pool: Pool, tmp_path: Path) -> None:
    """Nothing is reinitialised silently; --no-load-optim is the way to start from its weights."""
    save = ["--save", str(tmp_path), "--save-interval", "5"]
    adam = ["adam" if flag == "aro" else flag for flag in ARO]
    saved = pool.train(1, [*adam, *GATED, *save])[0]
    (refused,) = pool.run_ranks(1, "runs:train", [*ARO, *GATED, "--load", str(tmp_path)])
    assert refused.error or refused.value.exit_status != 0

    start = ["--load", str(tmp_path), "--finetune", "--no-load-optim", "--no-load-rng"]
    started = pool.train(1, [*ARO, *GATED, *start])[0]
    assert started.exit_status == 0
    assert started.losses[0] < saved.losses[0] - 0.2
