"""What each tensor-parallel position stores of a logical matrix, as element intervals."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from megatron_aro.sharding.logical import Interval, LogicalMatrix


@dataclass(frozen=True)
class Layout:
    """How a parameter of `rows` rows is cut over a tensor-parallel group of `size`.

    Attributes:
        axis: 0 cuts rows, 1 cuts columns, None leaves every position with the whole parameter.
        blocks: with axis 0, the rows are so many equal blocks, each cut for itself (2 for a gated
            fc1, of which a position stores its gate above its up).
    """

    rows: int
    size: int
    axis: int | None
    blocks: int = 1

    def __post_init__(self) -> None:
        if self.axis == 0 and self.rows % (self.size * self.blocks):
            raise ValueError(
                f"{self.rows} rows in {self.blocks} blocks do not split over {self.size} ranks."
            )


@dataclass(frozen=True)
class Part:
    """What one tensor-parallel position stores of a matrix.

    Attributes:
        spans: element intervals of the flattened stored shard; in order they are the rectangle
            below, row by row.
        rows, columns: the rectangle of the matrix, before orientation.
    """

    spans: tuple[Interval, ...]
    rows: Interval
    columns: Interval

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Of each span, its first element in the part."""
        return tuple(accumulate((stop - start for start, stop in self.spans[:-1]), initial=0))

    @cached_property
    def numel(self) -> int:
        return sum(stop - start for start, stop in self.spans)


def parts(matrix: LogicalMatrix, layout: Layout) -> tuple[Part, ...]:
    """The part of each position, by tensor-parallel rank.

    Raises:
        ValueError: the matrix does not split evenly, or what a position stores of it is no
            rectangle (a matrix in several of the layout's blocks).
    """
    if layout.axis is None or layout.size == 1:
        return (_part(matrix, [(0, layout.rows, 0)], (0, matrix.columns)),) * layout.size
    if layout.axis == 1:
        if matrix.columns % layout.size:
            raise ValueError(
                f"{matrix.columns} columns of {matrix.name} do not split over {layout.size} ranks."
            )
        width = matrix.columns // layout.size
        return tuple(
            _part(matrix, [(0, layout.rows, 0)], (t * width, (t + 1) * width))
            for t in range(layout.size)
        )
    block = layout.rows // layout.blocks
    height = block // layout.size
    return tuple(
        _part(
            matrix,
            [
                (i * block + t * height, i * block + (t + 1) * height, i * height)
                for i in range(layout.blocks)
            ],
            (0, matrix.columns),
        )
        for t in range(layout.size)
    )


def _part(matrix: LogicalMatrix, stored: list[tuple[int, int, int]], columns: Interval) -> Part:
    """The part made of stored rows; `stored` has (first, last + 1, first row in the shard)."""
    width = columns[1] - columns[0]
    spans: list[Interval] = []
    low, high, above = None, 0, 0
    for start, stop in matrix.intervals:
        for first, last, local in stored:
            a, b = max(start, first), min(stop, last)
            if a < b:
                here = ((local + a - first) * width, (local + b - first) * width)
                if spans and spans[-1][1] == here[0]:
                    here = (spans.pop()[0], here[1])
                spans.append(here)
                low = above + a - start if low is None else low
                high = above + b - start
        above += stop - start
    part = Part(tuple(spans), (low or 0, high), columns)
    if part.numel != (part.rows[1] - part.rows[0]) * width:
        raise ValueError(
            f"{matrix.name} lies in several blocks of {matrix.parameter}: a rank's share of it "
            "would not be consecutive rows."
        )
    return part
