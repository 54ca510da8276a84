"""Columns over gloo, whatever the cuts: every rank gets the update of what it holds."""

from __future__ import annotations

import torch
from column_runs import step_cases, weights
from pool import Pool

from megatron_aro.config import AROConfig
from megatron_aro.rotation import (
    MatrixBatch,
    compute_updates,
    initial_rotation,
    new_fallback_counts,
)
from megatron_aro.sharding.buffers import everywhere
from megatron_aro.sharding.columns import ByColumns
from megatron_aro.sharding.plan import Held


def ranges(*bounds: int) -> Held:
    pairs = zip(bounds, bounds[1:], strict=False)
    runs = ((d, d + 1, pair) for d, pair in enumerate(pairs) if pair[0] < pair[1])
    return Held(len(bounds) - 1, tuple(runs))


# Rows of 6: over several ranks, nothing on some, cuts at and beside rows, padding within a range.
CASES = [
    (1, 4, [ByColumns("a", 9, 6, 10, 1, True, ranges(0, 20, 21, 23, 60))]),
    (1, 4, [ByColumns("a", 20, 6, 20, 1, True, ranges(0, 0, 61, 119, 120))]),
    (
        2,
        2,
        [
            ByColumns("a", 15, 6, 10, 2, False, ranges(0, 31, 60)),
            ByColumns("b", 7, 6, 8, 2, True, ranges(0, 13, 48)),
            ByColumns("c", 6, 6, 10, 2, False, ranges(0, 36, 60)),  # the second shard is padding
        ],
    ),
    (2, 2, [ByColumns("a", 17, 6, 10, 2, False, everywhere(60, 2))]),
    (2, 2, [ByColumns("a", 9, 6, 10, 2, True, everywhere(60, 2))]),
    (4, 1, [ByColumns("a", 9, 6, 10, 4, True, everywhere(60, 1))]),
]


def test_updates_are_those_of_the_whole(pool: Pool) -> None:
    """In float64 to 1e-9, over three steps; padding gets none; replicas are alike to the bit."""
    ranks = pool.run(4, step_cases, CASES, 3)
    assert sum(len(matrix.moves(0)) for _, _, of in CASES for matrix in of) >= 6
    for case, (_, _, matrices) in enumerate(CASES):
        for i, matrix in enumerate(matrices):
            m, n = matrix.shape
            rotation = initial_rotation(1, m, n, dtype=torch.float64, device="cpu")
            batch = MatrixBatch(torch.empty(0), rotation, new_fallback_counts(1, "cpu"))
            for step in range(3):
                batch.momentum = weights(matrix, step)[:n].mT[None]
                (update,) = compute_updates([batch], AROConfig())
                expected = update[0].mT.reshape(-1)
                found = torch.full_like(weights(matrix, step), float("nan")).view(-1)
                for (t, d), taken in (rank[case] for rank in ranks):
                    start = matrix.first(t) * matrix.width + matrix.held[d][0]
                    mine = taken[step][i][: matrix.true_elements(t, d)]
                    target = found[start : start + len(mine)]
                    assert bool((target.isnan() | (target == mine)).all())
                    target.copy_(mine)
                    assert taken[step][i][len(mine) :].isnan().all()
                found = found[: n * m]
                assert not found.isnan().any()
                assert (found - expected).abs().max() < 1e-9, (case, matrix.name, step)
