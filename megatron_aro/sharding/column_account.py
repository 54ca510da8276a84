"""What matrices stepped by columns cost each rank of a stage; `account` has the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_aro.sharding.columns import ByColumns, moved
from megatron_aro.sharding.cost import (
    FP32,
    Rates,
    members_bytes,
    rotation_bytes,
    step_work,
    turning_seconds,
)
from megatron_aro.sharding.plan import Position

if TYPE_CHECKING:
    from megatron_aro.sharding.account import Figures

_ROW_SUMS = 2 * (1 + 5)  # vectors of k sums: rows and five iterations of Sinkhorn, twice a step


def add_columns(
    matrices: Sequence[ByColumns],
    owner: Position,
    figures: Sequence[Sequence[Figures]],
    rates: Rates,
) -> None:
    """Add it to the figures of the positions [tp][dp]; `owner` turns the rotations.

    In a step each rank holds at its peak, beside what its columns take (`members_bytes`), of each
    rotation its share of A and two copies of it flat; or the owner, while it turns them together,
    eleven m x k of each.
    """
    for t, row in enumerate(figures):
        for d, figure in enumerate(row):
            rotations = 0
            elements = [0]
            for matrix in matrices:
                m, n = matrix.shape
                start, stop = matrix.stepped(t, d)
                mine = stop - start
                work, rotation = step_work(m, n), rotation_bytes(m, n)
                flops = work.products * mine / n
                took = flops / rates.products + m * mine * rates.element
                if (t, d) == owner:
                    figure.matrices += 1
                    flops += work.factors
                    took += turning_seconds([(m, n)], rates)
                figure.flops += flops
                figure.milliseconds += 1e3 * took
                figure.rotation += rotation
                elements.append(m * mine)
                rotations += rotation
                if len(figures) * len(row) > 1:
                    figure.summed += 2 * rotation + FP32 * _ROW_SUMS * min(m, n)
                if matrix.shared:
                    own, true = matrix.rows_of(t, d), matrix.true(t)
                    rows = own[1] - own[0]
                    figure.dp_sent += FP32 * m * rows * (len(row) - 1)
                    figure.dp_received += FP32 * m * (true - rows)
            workspace = members_bytes(sum(elements), max(elements)) + 3 * rotations
            turning = 11 * rotations if (t, d) == owner else 0
            figure.workspace = max(figure.workspace, workspace, turning)
            # Momenta there and updates back.
            out = FP32 * moved(matrices, t, d)
            back = FP32 * sum(
                m.stop - m.start for x in matrices for m in x.moves(t) if m.target == d
            )
            figure.dp_sent += out + back
            figure.dp_received += out + back
