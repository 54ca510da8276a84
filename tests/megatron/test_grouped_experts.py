"""Experts under transformer-engine's names (weight0..N) train as any other matrices do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from aro_runs import ARO, DISTRIBUTED, MOE, same
from pool import Pool
from stepped import check_steps

TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
EP2 = ["--expert-model-parallel-size", "2"]
LAYOUTS = {
    "one process": (1, []),
    "DP 2": (2, DISTRIBUTED),
    "EP 2": (2, EP2),
    "EP 2 x DP 2": (4, [*EP2, *DISTRIBUTED]),
    "EP 2 x DP 2 replicated": (4, EP2),
    # Experts are in the dense parameters' groups and buffers here: allreduce is True.
    "expert TP 2": (2, [*TP2, *DISTRIBUTED]),
    "EP 2, expert TP 2": (4, [*TP2, *EP2, *DISTRIBUTED]),
    "EP 2, expert TP 2 replicated": (4, [*TP2, *EP2]),
    "EP 2, TP 2, expert TP 1": (4, [*TP2, *EP2, "--expert-tensor-parallel-size", "1"]),
}


@pytest.mark.parametrize(("world_size", "flags"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_grouped_experts_step_as_the_single_process_optimizer(
    pool: Pool, world_size: int, flags: list[str]
) -> None:
    """Each expert's gate, up and down projection, numbered over all ranks, to the bit."""
    argv = [*ARO, *MOE, "--micro-batch-size", "1", *flags]
    names = check_steps(pool.run(world_size, "grouped:train_recorded", argv), argv)
    layers = [f"decoder.layers.{layer}.mlp.experts" for layer in range(2)]
    assert {name for name in names if ".experts." in name} == {
        f"{layer}.{part.format(expert)}"
        for layer in layers
        for expert in range(4)
        for part in (
            "linear_fc1.weight{}#gate",
            "linear_fc1.weight{}#up",
            "linear_fc2.weight{}",
        )
    }


@pytest.mark.parametrize(
    "flags",
    [DISTRIBUTED, [*DISTRIBUTED, "--dist-ckpt-optim-fully-reshardable"], []],
    ids=["distributed", "fully reshardable", "replicated"],
)
def test_grouped_experts_resume_to_the_bit(pool: Pool, tmp_path: Path, flags: list[str]) -> None:
    """Losses, weights, momenta and rotations after 3 + 3 steps, EP 2 x expert TP 2."""
    argv = [*ARO, *MOE, *TP2, *EP2, *flags, "--train-iters", "6"]
    save = ["--save", str(tmp_path), "--save-interval", "3"]
    straight = pool.run(4, "grouped:train", [*argv, *save])
    shutil.rmtree(tmp_path / "iter_0000006")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    resumed = pool.run(4, "grouped:train", [*argv, "--load", str(tmp_path)])
    for before, after in zip(straight, resumed, strict=True):
        assert after.exit_status == 0
        assert after.losses == before.losses[3:]
        assert same(after.weights, before.weights)
        assert same(after.inspected, before.inspected)
