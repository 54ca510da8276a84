"""Matrices that no rank ever holds whole: which columns each rank steps, and what moves for it.

A vocabulary matrix is stored [rows, width], a token a row, and stepped width x rows: its columns
are rows as stored. Tensor parallelism cuts them into equal shards. The distributed optimizer gives
each data-parallel rank a range of the flattened shard, whole rows but for one at each end: a rank
steps the rows that begin in its range, and what lies beyond its end comes from the ranks that hold
it. Where all ranks hold the same, they share the rows evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron_aro.sharding.logical import Interval
from megatron_aro.sharding.plan import Held


class Move(NamedTuple):
    """Elements [start, stop) of a flattened shard that complete a row."""

    source: int  # data-parallel rank that holds them
    target: int  # that steps their row
    start: int
    stop: int


@dataclass(frozen=True)
class ByColumns:
    """A matrix and how a grid of tensor- by data-parallel ranks stores it.

    Attributes:
        rows: true ones of the whole matrix; what is stored beyond them is padding.
        width: elements of a row, the side that is rotated.
        stored: rows of a shard, padding included.
        tp: size of the tensor-parallel group.
        replicated: every tensor-parallel rank stores the whole matrix.
        held: by data-parallel rank, the elements of the flattened shard that it holds.
    """

    name: str
    rows: int
    width: int
    stored: int
    tp: int
    replicated: bool
    held: Held

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n) after orientation."""
        return self.width, self.rows

    def first(self, t: int) -> int:
        """The row of the matrix with which the shard of tensor-parallel rank t begins."""
        return 0 if self.replicated else t * self.stored

    def true(self, t: int) -> int:
        """How many rows of shard t are no padding: its first ones."""
        return min(self.stored, max(0, self.rows - self.first(t)))

    @cached_property
    def shared(self) -> bool:
        """Whether all data-parallel ranks, being several, hold everything."""
        everything = (0, len(self.held), (0, self.stored * self.width))
        return len(self.held) > 1 and self.held.runs == (everything,)

    def rows_of(self, t: int, d: int) -> Interval:
        """The rows of shard t that data-parallel rank d answers for, at one t or at all."""
        true = self.true(t)
        if self.shared:
            dp = len(self.held)
            return true * d // dp, true * (d + 1) // dp
        low, high = (min(true, -(-x // self.width)) for x in self.held[d])
        return low, high

    def stepped(self, t: int, d: int) -> Interval:
        """The rows of shard t that (t, d) steps; of a replicated matrix each t has a share."""
        low, high = self.rows_of(t, d)
        if not self.replicated:
            return low, high
        count = high - low
        return low + count * t // self.tp, low + count * (t + 1) // self.tp

    def true_elements(self, t: int, d: int) -> int:
        """How many of the elements that (t, d) holds are no padding: its first ones."""
        low, high = self.held[d]
        return min(high, max(low, self.true(t) * self.width)) - low

    def moves(self, t: int) -> list[Move]:
        """What completes the rows of shard t that range boundaries cut, in order of elements."""
        if self.shared:
            return []
        found: list[Move] = []
        last, stepper = self.true(t) * self.width, 0
        for d, _, (low, high) in self.held.runs:
            begin = -(-low // self.width) * self.width
            start, stop = low, min(begin, high, last)
            if start < stop:
                found.append(Move(d, stepper, start, stop))
            if begin < high:
                stepper = d
        return found


def moved(matrices: Sequence[ByColumns], t: int, d: int) -> int:
    """Elements that (t, d) sends to complete rows of others, and receives back as updates."""
    return sum(m.stop - m.start for x in matrices for m in x.moves(t) if m.source == d)
