"""Columns on real groups of ranks, without Megatron; functions here run inside a pool's ranks."""

from __future__ import annotations

from typing import Any

import torch

from megatron_aro.config import AROConfig
from megatron_aro.sharding.columns import ByColumns


def weights(matrix: ByColumns, step: int) -> torch.Tensor:
    """A gradient of the whole matrix as stored, padding included."""
    generator = torch.Generator().manual_seed(step)
    rows = matrix.stored * (1 if matrix.replicated else matrix.tp)
    return torch.randn(rows, matrix.width, generator=generator, dtype=torch.float64)


def step_cases(cases: list[tuple[int, int, list[ByColumns]]], steps: int) -> list[Any]:
    """Of each case (tp, dp, matrices) the position and, by step and matrix, this rank's updates.

    The momenta of a step are `weights`; mathematics and what travels are in float64.
    """
    import torch.distributed as dist

    from megatron_aro.runtime import columns

    initial = columns.initial_rotation
    columns.initial_rotation = lambda *args, **kwargs: initial(*args, **kwargs).double()
    torch.set_default_dtype(torch.float64)
    results = []
    for tp, dp, matrices in cases:
        t, d = dist.get_rank() % tp, dist.get_rank() // tp
        tensor = [dist.new_group([i * tp + j for j in range(tp)]) for i in range(dp)][d]
        data = [dist.new_group([i * tp + j for i in range(dp)]) for j in range(tp)][t]
        of_rank = columns.Columns(
            matrices,
            [],
            [],
            (tp - 1, dp - 1),
            (t, d),
            [],
            tensor if tp > 1 else None,
            data if dp > 1 else None,
            torch.device("cpu"),
            AROConfig(),
        )
        taken = []
        for step in range(steps):
            momenta, updates = {}, {}
            for matrix in matrices:
                low, high = matrix.held[d]
                first = matrix.first(t) * matrix.width
                momentum = weights(matrix, step).view(-1)[first + low : first + high].clone()
                momenta[matrix.name] = momentum
                updates[matrix.name] = torch.full_like(momentum, float("nan"))
            of_rank.start(momenta)
            of_rank.finish(momenta, updates)
            taken.append([updates[matrix.name] for matrix in matrices])
        results.append(((t, d), taken))
    return results
