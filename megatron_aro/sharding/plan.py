"""The ownership plan: which rank steps which matrix, and which elements travel for it.

The ranks that share a set of matrices form a grid of tensor-parallel by data-parallel positions
(t, d). A matrix is stepped by one owner. Its parts meet there in two hops, and its update goes
back the same way:

1. data parallel, at each t: the elements of t's part that other ranks hold go to the owner's d.
   With the distributed optimizer a rank holds one range of each flat buffer, so only a matrix
   that a range boundary cuts travels at all.
2. tensor parallel, at the owner's d: the parts go to the owner's t.

All of it follows from integers that every rank knows, so every rank makes the same plan.
"""

from __future__ import annotations

import hashlib
import heapq
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import overload

from megatron_aro.sharding.geometry import Part
from megatron_aro.sharding.logical import Interval, LogicalMatrix

Position = tuple[int, int]
Run = tuple[int, int, Interval]  # data-parallel ranks [first, last + 1), what each of them holds


@dataclass(frozen=True)
class Held(Sequence[Interval]):
    """What each of `size` data-parallel ranks holds, by runs of ranks that hold the same.

    A tuple of intervals says the same; this is small also where there are thousands of ranks, of
    which few hold something (a range of a flat buffer) or all hold everything. Runs are in order;
    ranks in none hold (0, 0).
    """

    size: int
    runs: tuple[Run, ...]

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, d: int) -> Interval: ...
    @overload
    def __getitem__(self, d: slice) -> Sequence[Interval]: ...
    def __getitem__(self, d: int | slice) -> Interval | Sequence[Interval]:
        if isinstance(d, slice):
            return tuple(self[i] for i in range(*d.indices(self.size)))
        if not 0 <= d < self.size:
            raise IndexError(d)
        i = bisect_right(self.runs, d, key=lambda run: run[0]) - 1
        return self.runs[i][2] if i >= 0 and d < self.runs[i][1] else (0, 0)


@dataclass(frozen=True)
class Sharded:
    """A logical matrix and how a grid stores it.

    Attributes:
        parts: by tensor-parallel rank; one and the same for all where `replicated`.
        replicated: every tensor-parallel rank stores the whole matrix (a router, say).
        held: by data-parallel rank, the elements of the flattened stored shard that it holds, the
            same at every tensor-parallel rank; everything everywhere where data parallelism
            replicates.
    """

    matrix: LogicalMatrix
    parts: tuple[Part, ...]
    replicated: bool
    held: Sequence[Interval]

    def segments(self, t: int, d: int) -> tuple[tuple[int, int, int], ...]:
        """What (t, d) holds of part t: (first element in the part, in the held range, length)."""
        low, high = self.held[d]
        found = []
        offset = 0
        for start, stop in self.parts[t].spans:
            a, b = max(start, low), min(stop, high)
            if a < b:
                found.append((offset + a - start, a - low, b - a))
            offset += stop - start
        return tuple(found)

    def count(self, d: int) -> int:
        """How many elements of the matrix data-parallel rank d holds, over all parts."""
        shards = range(1 if self.replicated else len(self.parts))
        return sum(length for t in shards for _, _, length in self.segments(t, d))

    def holders(self) -> list[Run]:
        """Runs of data-parallel ranks with the same interval; those without elements left out."""
        if isinstance(self.held, Held):
            runs = list(self.held.runs)
        else:
            runs, first = [], 0
            for interval, same in groupby(self.held):
                last = first + len(list(same))
                runs.append((first, last, interval))
                first = last
        return [run for run in runs if self.count(run[0])]

    @property
    def numel(self) -> int:
        m, n = self.matrix.shape
        return m * n


@dataclass(frozen=True)
class Plan:
    """Who steps what.

    Attributes:
        tp, dp: sizes of the grid.
        sharded: the matrices, in an order that all ranks share.
        owners: of each matrix.
        loads: predicted cost of each position, [tp][dp], in the cost function's unit.
    """

    tp: int
    dp: int
    sharded: tuple[Sharded, ...]
    owners: tuple[Position, ...]
    loads: tuple[tuple[float, ...], ...]

    def owned(self, position: Position) -> list[int]:
        """Indices of the matrices that a position steps."""
        return [i for i, owner in enumerate(self.owners) if owner == position]

    def batches(self, indices: Sequence[int]) -> list[tuple[tuple[int, int], list[int]]]:
        """Indices grouped by oriented shape, in order: a group is stepped as one batch."""
        groups: dict[tuple[int, int], list[int]] = {}
        for i in indices:
            groups.setdefault(self.sharded[i].matrix.shape, []).append(i)
        return list(groups.items())

    def gathered(self, t: int, d: int) -> list[int]:
        """Indices of the matrices whose part t meets at (t, d) on its way to the owner."""
        return [
            i
            for i, (owner_t, owner_d) in enumerate(self.owners)
            if owner_d == d and (owner_t == t or not self.sharded[i].replicated)
        ]

    def returned(self, d: int) -> list[int]:
        """Indices of the matrices whose update passes data-parallel rank d, at every t."""
        return [i for i, (_, owner_d) in enumerate(self.owners) if owner_d == d]

    @property
    def replicates(self) -> bool:
        """Whether every data-parallel rank holds everything, so that updates go to all of them."""
        return all(s.count(d) == s.numel for s in self.sharded for d in range(self.dp))

    @property
    def cuts(self) -> bool:
        """Whether some owner lacks elements of its matrix that other data-parallel ranks hold."""
        owned = zip(self.sharded, self.owners, strict=True)
        return any(s.count(d) != s.numel for s, (_, d) in owned)

    def digest(self) -> str:
        """A hash that agrees between ranks exactly if their plans do."""
        return hashlib.sha256(
            repr((self.tp, self.dp, self.sharded, self.owners)).encode()
        ).hexdigest()


def make_plan(
    sharded: Sequence[Sharded], tp: int, dp: int, cost: Callable[[LogicalMatrix], float]
) -> Plan:
    """Choose owners so that the slowest rank has little to do, then so that little moves.

    A matrix that one data-parallel rank holds whole stays there; one that a boundary cuts goes to
    one of the ranks that hold some of it; with replicated data parallelism any rank will do.
    Largest first, each to the least loaded candidate (longest processing time first, at most 4/3
    of the optimum where any rank will do).

    Args:
        cost: of stepping a matrix, in any unit.
    """
    loads = [[0.0] * dp for _ in range(tp)]
    owners: list[Position] = [(0, 0)] * len(sharded)
    costs = [cost(s.matrix) for s in sharded]
    # Every position by its load, for matrices that any rank may take. An entry whose load is not
    # the position's any more is out of date and dropped.
    by_load = [(0.0, (t, d)) for t in range(tp) for d in range(dp)]
    for i in sorted(range(len(sharded)), key=lambda i: (-costs[i], i)):
        runs = _candidates(sharded[i])
        if [run[:2] for run in runs] == [(0, dp)]:
            while by_load[0][0] != loads[by_load[0][1][0]][by_load[0][1][1]]:
                heapq.heappop(by_load)
            owners[i] = by_load[0][1]
        else:
            counts = {d: count for first, last, count in runs for d in range(first, last)}
            owners[i] = min(
                ((t, d) for t in range(tp) for d in counts),
                key=lambda p: (loads[p[0]][p[1]], -counts[p[1]], p),
            )
        t, d = owners[i]
        loads[t][d] += costs[i]
        heapq.heappush(by_load, (loads[t][d], (t, d)))
    return Plan(tp, dp, tuple(sharded), tuple(owners), tuple(map(tuple, loads)))


def _candidates(s: Sharded) -> list[tuple[int, int, int]]:
    """Data-parallel ranks that may own a matrix: (first, last + 1, elements that each holds)."""
    runs = [(first, last, s.count(first)) for first, last, _ in s.holders()]
    return [run for run in runs if run[2] == s.numel] or runs
