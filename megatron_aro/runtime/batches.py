"""Batches of matrices that one rank gathers and steps, and what it keeps for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_aro.config import AROConfig
from megatron_aro.rotation import (
    MEASURES,
    Attempt,
    MatrixBatch,
    attempt_rotation,
    finish_update,
    initial_rotation,
    is_recordable,
    measure_after,
    new_fallback_counts,
    second_moment_shape,
)
from megatron_aro.rotation.monitor import objective
from megatron_aro.runtime.recorded import Recorded
from megatron_aro.sharding.cost import recorded
from megatron_aro.sharding.plan import Batch


class Gathered:
    """A batch of matrices that are whole on this rank for the time of a step."""

    sample: Sequence[int] = ()  # of the batch, see `MatrixOptimizer.watch`
    measures: Tensor | None = None  # of a step that is being measured

    def __init__(self, batch: Batch):
        self.batch = batch
        self.release()

    def allocate(self, device: torch.device) -> None:
        """Memory of this step: the gathered momenta [b, rows, columns], later the updates."""
        rows, columns, transposed = self.batch.stored
        self.stored = torch.empty(len(self.batch.members), rows, columns, device=device)
        self.momentum = self.stored.mT if transposed else self.stored

    def release(self) -> None:
        self.stored = self.momentum = torch.empty(0)


class Members(Gathered):
    """Matrices that share rotations, with each other or with others elsewhere."""

    second_moments: Sequence[Tensor | None] = ()

    def __init__(self, batch: Batch, names: Sequence[str]):
        super().__init__(batch)
        self.names = names

    def measure(self, updates: Mapping[str, Tensor]) -> None:
        """Before updates, U [m, n] by name, take the momenta's place; rotations go with groups."""
        self.measures = self.momentum.new_full((len(self.names), len(MEASURES)), torch.nan)
        for i, (name, m_mn) in enumerate(zip(self.names, self.momentum, strict=True)):
            u_mn = updates[name]
            rms = torch.linalg.vector_norm(u_mn) / u_mn.numel() ** 0.5
            self.measures[i, MEASURES.index("update_rms")] = rms
            if i in self.sample:
                self.measures[i, MEASURES.index("objective")] = objective(m_mn[None], u_mn[None])[0]


class Stepped(Gathered):
    """A batch, what is kept for it from step to step, and where it is in the current one."""

    attempt: Attempt
    _keeps = False

    def __init__(self, batch: Batch, state: MatrixBatch, aro: AROConfig):
        self.state = state
        self.counted = state.fallbacks.clone()  # as of the last `MatrixOptimizer.measures`
        self._aro = aro
        self._attempt: Callable[[], Attempt] = self._attempted
        self._replace: Callable[[], Tensor] = self._replaced
        super().__init__(batch)

    def record(self, pool: Any) -> None:
        """Have steps replayed as CUDA graphs from the second on: the momenta keep their memory."""
        self._attempt = Recorded(self._attempted, pool)
        self._replace = Recorded(self._replaced, pool)
        self._keeps = True

    def allocate(self, device: torch.device) -> None:
        if not (self._keeps and self.stored.numel()):
            super().allocate(device)
            self.state.momentum = self.momentum

    def start(self) -> None:
        """The first attempt at the rotations; nothing waits for the device."""
        self.attempt = self._attempt()

    def finish(self) -> None:
        """The updates, in place of the momenta."""
        if self.measures is not None:
            self._replaced()
        else:
            self._replace()
        del self.attempt

    def release(self) -> None:
        if not self._keeps:
            super().release()
            self.state.momentum = self.momentum

    def _attempted(self) -> Attempt:
        return attempt_rotation(self.state, self._aro)

    def _replaced(self) -> Tensor:
        update = finish_update(self.state, self.attempt, self._aro)
        if self.measures is not None:
            measure_after(self.measures, self.state, update, self.sample)
        return self.state.momentum.copy_(update)


def record_small(batches: Sequence[Stepped], aro: AROConfig) -> None:
    """Have small batches replayed as CUDA graphs, on GPUs and for settings for which that goes."""
    if not aro.replays or not all(is_recordable(x.state, aro) for x in batches):
        return
    found, _ = recorded([x.batch.shape for x in batches])
    pool = torch.cuda.graph_pool_handle() if found else None
    for i in found:
        batches[i].record(pool)


def new_state(aro: AROConfig, b: int, m: int, n: int, device: torch.device) -> MatrixBatch:
    """What is kept for b matrices [m, n] before their first step; momenta are each step's own."""
    moment = second_moment_shape(aro, m, n)
    return MatrixBatch(
        momentum=torch.empty(0),
        rotation=initial_rotation(b, m, n, dtype=torch.float32, device=device),
        fallbacks=new_fallback_counts(b, device),
        second_moment=torch.zeros(b, *moment, device=device) if moment else None,
    )
