"""Damaged checkpoints are told in one sentence; a killed save loses no earlier checkpoint."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from aro_runs import ARO, DISTRIBUTED, GATED, same
from killed_runs import train_killed
from pool import Pool

TRACKER = "latest_checkpointed_iteration.txt"
TORCH = ["--ckpt-format", "torch"]


def largest(folder: Path) -> Path:
    return max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no metadata": lambda folder: (folder / ".metadata").unlink(),
    "truncated metadata": lambda folder: truncate(folder / ".metadata"),
    "foreign metadata": lambda folder: (folder / ".metadata").write_bytes(b"not a checkpoint"),
    "no type": lambda folder: (folder / "metadata.json").unlink(),
    "no tensors": lambda folder: largest(folder).unlink(),
    "truncated tensors": lambda folder: truncate(largest(folder)),
    "foreign tensors": lambda folder: largest(folder).write_bytes(b"noise" * 10000),
    "no folder": lambda folder: shutil.rmtree(folder),
    "foreign tracker": lambda folder: (folder.parent / TRACKER).write_text("yesterday"),
}


def test_damaged_files_are_one_sentence(pool: Pool, tmp_path: Path) -> None:
    """Status 2 before the first step, whatever is damaged, and no rank trains."""
    whole = tmp_path / "whole"
    argv = [*ARO, *GATED, *DISTRIBUTED]
    assert pool.train(2, [*argv, "--save", str(whole), "--save-interval", "5"])[0].exit_status == 0
    load = ["--train-iters", "6", "--override-opt-param-scheduler", "--load"]
    for name, damage in DAMAGES.items():
        broken = tmp_path / "broken"
        shutil.copytree(whole, broken)
        damage(broken / "iter_0000005")
        ranks = pool.run_ranks(2, "runs:train", [*argv, *load, str(broken)], grace=0.5)
        refused = [rank for rank in ranks if rank.value and rank.value.exit_status == 2]
        assert refused, name
        for rank in refused:  # the other one may have read its share; it waits until it is ended
            assert f"The checkpoint in {broken} cannot be loaded" in rank.stderr, name
            assert "Traceback" not in rank.stderr, name
        assert not any(rank.value and rank.value.losses for rank in ranks), name
        shutil.rmtree(broken)
    other = [*argv, *load, str(whole), "--hidden-size", "64"]
    assert "cannot be loaded" in pool.train(2, other)[0].stderr
    (whole / TRACKER).write_text("")  # killed between truncating and writing it
    resumed = pool.train(2, [*argv, *load, str(whole)])[0]
    assert resumed.exit_status == 0 and len(resumed.losses) == 1
    assert (whole / TRACKER).read_text() == "5"


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model_optim_rng.pt", truncate),
        ("aro_matrices_*.pt", truncate),
        ("aro_matrices_*.pt", Path.unlink),
        ("aro_matrices_*.pt", lambda path: path.write_bytes(b"noise" * 1000)),
    ],
    ids=["truncated", "truncated matrices", "no matrices", "foreign matrices"],
)
def test_a_damaged_torch_checkpoint_does_not_end_in_success(
    pool: Pool, tmp_path: Path, name: str, damage: Callable[[Path], object]
) -> None:
    """One sentence before the first step, as for torch_dist."""
    argv = [*ARO, *GATED, *TORCH]
    assert pool.train(1, [*argv, "--save", str(tmp_path), "--save-interval", "5"])[0].weights
    damage(next(tmp_path.glob(f"iter_*/**/{name}")))
    (refused,) = pool.train(1, [*argv, "--load", str(tmp_path), "--train-iters", "6"])
    assert refused.exit_status == 2 and not refused.losses
    assert "cannot be loaded" in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("times", "flags"),
    [
        (3, []),
        (3, ["--aro-mode", "full-model"]),
        pytest.param(20, [], marks=pytest.mark.slow),
        pytest.param(20, ["--aro-sharing", "chain"], marks=pytest.mark.slow),
    ],
)
def test_killed_runs_lose_no_checkpoint(
    pool: Pool, tmp_path: Path, times: int, flags: list[str]
) -> None:
    """SIGKILL to one rank or all, in a step or a save; what restarts ends as if never killed."""
    iterations = 2 * times + 2
    argv = [*ARO, *GATED, *DISTRIBUTED, *flags, "--train-iters", str(iterations)]
    straight = pool.train(2, argv)
    argv += ["--save", str(tmp_path), "--load", str(tmp_path), "--save-interval", "1"]
    chance = random.Random(times)
    at, killed = 0, 0
    for _ in range(times):
        ranks = pool.run_ranks(
            2,
            train_killed,
            argv,
            victims=chance.choice([[0], [1], [0, 1]]),
            moment=chance.choice(["train_step", "save_checkpoint"]),
            call=chance.choice([1, 2]),
            delay=chance.uniform(0.0, 0.3),
            grace=0.2,
        )
        killed += any("SIGKILL" in rank.error for rank in ranks)
        tracker = tmp_path / TRACKER
        now = int(tracker.read_text() or at) if tracker.exists() else 0
        assert now >= at
        at = now
    assert killed >= times - 1  # a delay may outlast the run
    resumed = pool.train(2, argv)
    for before, after in zip(straight, resumed, strict=True):
        assert after.exit_status == 0
        assert after.losses == before.losses[at:]
        assert same(after.weights, before.weights)
