"""Logical matrices: what ARO steps, as opposed to what Megatron stores.

One stored parameter may hold several matrices (Q, K and V; gate and up; the experts of a fused
weight), interleaved by rows. A `LogicalMatrix` names the rows that make up one of them and says
which side is rotated; everything that moves or steps matrices works from this description.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Interval = tuple[int, int]  # half-open


@dataclass(frozen=True)
class LogicalMatrix:
    """One matrix inside a parameter that is viewed as [rows, columns].

    Attributes:
        name: unique in the model and free of any layout, ``<parameter>`` or ``<parameter>#<part>``.
        parameter: name of the parameter that stores it.
        intervals: row intervals of the parameter that make it up, in order.
        columns: number of columns of the parameter.
        transposed: whether the rotated side is the columns as stored.
        group: name of those whose rotation it shares, free of any layout; "" for its own.
    """

    name: str
    parameter: str
    intervals: tuple[Interval, ...]
    columns: int
    transposed: bool
    group: str = ""

    @property
    def rows(self) -> int:
        return sum(stop - start for start, stop in self.intervals)

    @property
    def stored(self) -> tuple[int, int, bool]:
        """Rows and columns as stored, and whether orientation transposes them."""
        return (self.rows, self.columns, self.transposed)

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n) after orientation: the m rows are the rotated side."""
        return (self.columns, self.rows) if self.transposed else (self.rows, self.columns)


def stacked(sizes: Mapping[str, int], *, repeats: int = 1) -> dict[str, tuple[Interval, ...]]:
    """Row intervals of parts that are stored one after the other, `repeats` times over.

    ``stacked({"gate": f, "up": f})`` is a gated fc1; ``stacked({"q": 4 * d, "k": d, "v": d},
    repeats=groups)`` is a QKV weight that is interleaved by query group.
    """
    parts: dict[str, list[Interval]] = {part: [] for part in sizes}
    start = 0
    for _ in range(repeats):
        for part, size in sizes.items():
            parts[part].append((start, start + size))
            start += size
    return {part: tuple(intervals) for part, intervals in parts.items()}


def check_partition(parameter: str, rows: int, matrices: Iterable[LogicalMatrix]) -> None:
    """Each row of the parameter must belong to exactly one matrix.

    Raises:
        ValueError: rows overlap, or are left over.
    """
    position = 0
    for start, stop in sorted(interval for matrix in matrices for interval in matrix.intervals):
        if start != position or stop <= start:
            raise ValueError(
                f"The logical matrices of {parameter} do not tile its {rows} rows: "
                f"rows {min(start, position)} to {max(start, position)} belong to none or to two."
            )
        position = stop
    if position != rows:
        raise ValueError(
            f"The logical matrices of {parameter} cover {position} of its {rows} rows."
        )
