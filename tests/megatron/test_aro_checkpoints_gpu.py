"""Checkpoints on several GPUs over NCCL: exact resume, DP 4 to TP 2 x DP 2 and back, async saves.

One command: ``scripts/test.sh -m gpu tests/megatron/test_aro_checkpoints_gpu.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torchrun
from aro_runs import DISTRIBUTED, same
from logical_state import logical, train_watched
from runs import TrainResult
from test_aro_multi_gpu import MODEL, TP2

pytestmark = pytest.mark.gpu

RUN = [*MODEL, "--bf16", "--train-iters", "20"]
RESHARDABLE = ["--dist-ckpt-optim-fully-reshardable"]
ASYNC = ["--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore"]
TRACKER = "latest_checkpointed_iteration.txt"


def train(folder: Path, ranks: int, *flags: str, iteration: int = 0) -> list[TrainResult]:
    """A run under torchrun; `inspected` is the state after so many of its own iterations."""
    return torchrun.run(folder, ranks, train_watched, [*RUN, *flags], iteration)


def state(results: list[TrainResult]) -> dict[str, torch.Tensor]:
    return logical([result.inspected for result in results])


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (4, [*DISTRIBUTED, *RESHARDABLE]),
        (4, [*TP2, *DISTRIBUTED]),
        (2, []),
        (2, [*DISTRIBUTED, *ASYNC]),
    ],
    ids=["DP 4", "TP 2 x DP 2, bucket space", "DP 2 replicated", "DP 2, async"],
)
def test_a_resumed_run_is_bit_identical(tmp_path: Path, ranks: int, flags: list[str]) -> None:
    """State as saved, then losses and weights of the uninterrupted run."""
    save = ["--save", str(tmp_path), "--save-interval", "10"]
    straight = train(tmp_path, ranks, *flags, *save, iteration=10)
    (tmp_path / TRACKER).write_text("10")
    resumed = train(tmp_path, ranks, *flags, "--load", str(tmp_path))
    assert same(state(resumed), state(straight))
    for before, after in zip(straight, resumed, strict=True):
        assert after.losses == before.losses[10:]
        assert same(after.weights, before.weights)


def test_from_dp_4_to_tp_2_and_back(tmp_path: Path) -> None:
    """The state bit for bit at each change; losses as of the uninterrupted run."""
    save = ["--save", str(tmp_path), *RESHARDABLE, "--save-interval"]
    straight = train(tmp_path, 4, *DISTRIBUTED, *save, "10", iteration=10)
    (tmp_path / TRACKER).write_text("10")
    load = ["--load", str(tmp_path)]
    moved = train(tmp_path, 4, *TP2, *DISTRIBUTED, *load)
    assert same(state(moved), state(straight))
    moved = train(tmp_path, 4, *TP2, *DISTRIBUTED, *load, *save, "5", iteration=5)
    (tmp_path / TRACKER).write_text("15")
    back = train(tmp_path, 4, *DISTRIBUTED, *load)
    assert same(state(back), state(moved))
    losses = straight[0].losses
    assert moved[0].losses == pytest.approx(losses[10:], abs=2e-2)
    assert back[0].losses == pytest.approx(losses[15:], abs=2e-2)
    assert losses[-1] < losses[0] - 0.3
