"""Runs with the monitor on, and what its writers were given; functions that run in a pool."""

from __future__ import annotations

import sys
import zlib
from typing import Any
from unittest import mock

import runs
import torch
from aro_runs import optimizer_state


class Writers:
    """TensorBoard and W&B, which are not installed, as far as Megatron uses them: they note."""

    def __init__(self) -> None:
        self.tensorboard: dict[int, dict[str, float]] = {}
        self.wandb: list[tuple[int, dict[str, Any]]] = []
        # Mocks answer to all else that Megatron asks of the two.
        board, wandb = mock.MagicMock(), mock.MagicMock()
        board.add_scalar = self._scalar
        wandb.log = lambda data, step: self.wandb.append((step, dict(data)))
        sys.modules["torch.utils.tensorboard"] = mock.MagicMock(SummaryWriter=lambda **_: board)
        sys.modules["wandb"] = wandb

    def _scalar(self, tag: str, value: float, iteration: int) -> None:
        self.tensorboard.setdefault(iteration, {})[tag] = value

    def readings(self) -> dict[int, dict[str, float]]:
        """By iteration what the monitor wrote to TensorBoard."""
        ours = {
            iteration: {tag: v for tag, v in scalars.items() if tag.startswith("aro-")}
            for iteration, scalars in self.tensorboard.items()
        }
        return {iteration: scalars for iteration, scalars in ours.items() if scalars}


def train_read(argv: list[str], folder: str) -> dict[str, Any]:
    """Train with writers; what they were given, the end state, and how often something was done."""
    from megatron_aro.megatron.monitor import Monitor
    from megatron_aro.runtime import matrix_optimizer

    writers, calls = Writers(), {"measured": 0, "gathered": 0}
    measure, gather = matrix_optimizer.measure_before, Monitor._gathered

    def measured(*args: Any) -> Any:
        calls["measured"] += 1
        return measure(*args)

    def gathered(self: Monitor) -> Any:
        calls["gathered"] += 1
        return gather(self)

    matrix_optimizer.measure_before = measured
    Monitor._gathered = gathered  # type: ignore[method-assign]
    flags = ["--tensorboard-dir", folder, "--wandb-project", "p", "--wandb-exp-name", "n"]
    flags += ["--wandb-save-dir", folder, "--tensorboard-log-interval", "1"]
    result = runs.train([*argv, *flags], inspect=optimizer_state)
    return {
        "result": result,
        "readings": writers.readings(),
        "wandb": writers.wandb,
        "calls": calls,
    }


def given(name: str, shape: tuple[int, int], step: int) -> torch.Tensor:
    """A matrix's gradient of a step, counted from 1, as stored."""
    seed = zlib.crc32(f"{name} {step}".encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def train_on_given_gradients(argv: list[str], folder: str) -> dict[str, Any]:
    """`train_read`, one matrix at a time, on gradients that depend on name and step alone.

    Each rank's pieces are cut out of the same whole matrices, so that momenta are the same, to the
    bit, in every layout.
    """
    from megatron_aro.megatron import optimizer
    from megatron_aro.runtime.matrix_optimizer import MatrixOptimizer

    optimizer.batch_limit = lambda m, n, workspace: 1
    original, steps = MatrixOptimizer._start, {}

    def start(self: MatrixOptimizer) -> None:
        steps[id(self)] = steps.get(id(self), 0) + 1
        exchange = self._exchange
        for sharded in exchange.plan.sharded:
            matrix, part = sharded.matrix, sharded.parts[exchange.t]
            gradient = given(matrix.name, (matrix.rows, matrix.columns), steps[id(self)])
            flat = gradient[slice(*part.rows), slice(*part.columns)].flatten()
            for first, start, length in sharded.segments(exchange.t, exchange.d):
                piece = self._main[matrix.parameter].grad.view(-1)
                piece[start : start + length] = flat[first : first + length]
        original(self)

    MatrixOptimizer._start = start  # type: ignore[method-assign]
    return train_read(argv, folder)
