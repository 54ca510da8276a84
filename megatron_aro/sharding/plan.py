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
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple, overload

from megatron_aro.sharding.geometry import Part
from megatron_aro.sharding.logical import Interval, LogicalMatrix

# A chunk must be worth its launches: a collective moves 32 MiB in about the time that the kernels
# of a batch take to launch.
CHUNK_ELEMENTS = 8 << 20
MOST_CHUNKS = 4

_start = itemgetter(0)

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
        i = bisect_right(self.runs, d, key=_start) - 1
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
        return self.within(t, self.held[d])

    def within(self, t: int, interval: Interval) -> tuple[tuple[int, int, int], ...]:
        """What an interval of the stored shard holds of part t, like `segments`."""
        low, high = interval
        spans, offsets = self.parts[t].spans, self.parts[t].offsets
        found = []
        # From the last span that starts at or before the interval.
        for i in range(max(0, bisect_right(spans, low, key=_start) - 1), len(spans)):
            start, stop = spans[i]
            if start >= high:
                break
            a, b = max(start, low), min(stop, high)
            if a < b:
                found.append((offsets[i] + a - start, a - low, b - a))
        return tuple(found)

    def count(self, d: int) -> int:
        """How many elements of the matrix data-parallel rank d holds, over all parts."""
        return self._count(self.held[d])

    def _count(self, interval: Interval) -> int:
        shards = range(1 if self.replicated else len(self.parts))
        return sum(length for t in shards for _, _, length in self.within(t, interval))

    @cached_property
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
        return [run for run in runs if self._count(run[2])]

    @cached_property
    def counts(self) -> list[tuple[int, int, int]]:
        """Of the holders: (first rank, last + 1, elements of the matrix that each holds)."""
        return [(first, last, self._count(interval)) for first, last, interval in self.holders]

    @property
    def numel(self) -> int:
        m, n = self.matrix.shape
        return m * n


class Batch(NamedTuple):
    """Matrices of one stored shape that their owner steps together.

    Those that share rotations with others are only gathered and returned so, by themselves.
    """

    owner: Position
    chunk: int
    stored: tuple[int, int, bool]  # rows, columns, whether orientation transposes them
    members: tuple[int, ...]  # indices into the plan

    @property
    def shape(self) -> tuple[int, int, int]:
        """(matrices, m, n), m being the rotated side."""
        rows, columns, transposed = self.stored
        return (len(self.members), *((columns, rows) if transposed else (rows, columns)))


@dataclass(frozen=True)
class Plan:
    """Who steps what.

    Attributes:
        tp, dp: sizes of the grid.
        sharded: the matrices, in an order that all ranks share.
        owners: of each matrix.
        batches: of all owners, every matrix in one; those of a chunk travel together.
        loads: predicted cost of each position, [tp][dp], in the cost function's unit.
        turner: who turns the rotations of what is stepped by columns (full-model mode).
    """

    tp: int
    dp: int
    sharded: tuple[Sharded, ...]
    owners: tuple[Position, ...]
    batches: tuple[Batch, ...]
    loads: tuple[tuple[float, ...], ...]
    turner: Position = (0, 0)

    @cached_property
    def chunks(self) -> int:
        return max((batch.chunk for batch in self.batches), default=0) + 1

    @cached_property
    def chunk_of(self) -> list[int]:
        """Of each matrix."""
        chunks = {i: batch.chunk for batch in self.batches for i in batch.members}
        return [chunks[i] for i in range(len(self.sharded))]

    def owned(self, position: Position) -> list[int]:
        """Indices of the matrices that a position steps."""
        return [i for i, owner in enumerate(self.owners) if owner == position]

    def stepped(self, position: Position, chunk: int) -> list[Batch]:
        """What a position steps of a chunk."""
        return [b for b in self.batches if b.owner == position and b.chunk == chunk]

    def gathered(self, t: int, d: int, chunk: int) -> list[int]:
        """Indices of the matrices whose part t meets at (t, d) on its way to the owner."""
        return [
            i
            for i, (owner_t, owner_d) in enumerate(self.owners)
            if owner_d == d
            and self.chunk_of[i] == chunk
            and (owner_t == t or not self.sharded[i].replicated)
        ]

    def returned(self, d: int, chunk: int) -> list[int]:
        """Indices of the matrices whose update passes data-parallel rank d, at every t."""
        return [
            i
            for i, (_, owner_d) in enumerate(self.owners)
            if owner_d == d and self.chunk_of[i] == chunk
        ]

    @property
    def replicates(self) -> bool:
        """Whether every data-parallel rank holds everything, so that updates go to all of them."""
        return all(s.counts == [(0, self.dp, s.numel)] for s in self.sharded)

    @property
    def cuts(self) -> bool:
        """Whether some owner lacks elements of its matrix that other data-parallel ranks hold."""
        owned = zip(self.sharded, self.owners, strict=True)
        return any(s.count(d) != s.numel for s, (_, d) in owned)

    def digest(self) -> str:
        """A hash that agrees between ranks exactly if their plans do."""
        return hashlib.sha256(
            repr((self.tp, self.dp, self.sharded, self.owners, self.batches, self.turner)).encode()
        ).hexdigest()


def make_plan(
    sharded: Sequence[Sharded],
    tp: int,
    dp: int,
    cost: Callable[[LogicalMatrix], float],
    loads: Sequence[Sequence[float]] | None = None,
    at_most: Callable[[int, int], int] | None = None,
    turning: float = 0.0,
) -> Plan:
    """Choose owners so that the slowest rank has little to do, then so that little moves.

    A matrix that one data-parallel rank holds whole stays there; one that a boundary cuts goes to
    one of the ranks that hold some of it; with replicated data parallelism any rank will do.
    Largest first, each to the least loaded candidate (longest processing time first, at most 4/3
    of the optimum where any rank will do).

    Args:
        cost: of stepping a matrix, in any unit.
        loads: what each position [tp][dp] has to do already, in the same unit.
        at_most: how many matrices of an oriented shape (m, n) may be stepped at once; all if None.
        turning: cost of turning the rotations of what is stepped by columns, which falls to
            whoever would have least to do without it.
    """
    if turning:
        plan = make_plan(sharded, tp, dp, cost, loads, at_most)
        t, d = turner = min(
            ((t, d) for t in range(tp) for d in range(dp)), key=lambda p: plan.loads[p[0]][p[1]]
        )
        before = [list(row) for row in loads] if loads else [[0.0] * dp for _ in range(tp)]
        before[t][d] += turning
        return replace(make_plan(sharded, tp, dp, cost, before, at_most), turner=turner)
    loaded = [list(row) for row in loads] if loads else [[0.0] * dp for _ in range(tp)]
    owners: list[Position] = [(0, 0)] * len(sharded)
    costs = [cost(s.matrix) for s in sharded]
    # Every position by its load, for matrices that any rank may take. An entry whose load is not
    # the position's any more is out of date and dropped.
    by_load = [(loaded[t][d], (t, d)) for t in range(tp) for d in range(dp)]
    heapq.heapify(by_load)
    for i in sorted(range(len(sharded)), key=lambda i: (-costs[i], i)):
        runs = _candidates(sharded[i])
        if [run[:2] for run in runs] == [(0, dp)]:
            while by_load[0][0] != loaded[by_load[0][1][0]][by_load[0][1][1]]:
                heapq.heappop(by_load)
            owners[i] = by_load[0][1]
        else:
            counts = {d: count for first, last, count in runs for d in range(first, last)}
            owners[i] = min(
                ((t, d) for t in range(tp) for d in counts),
                key=lambda p: (loaded[p[0]][p[1]], -counts[p[1]], p),
            )
        t, d = owners[i]
        loaded[t][d] += costs[i]
        heapq.heappush(by_load, (loaded[t][d], (t, d)))
    batches = _batches(sharded, owners, costs, at_most)
    return Plan(tp, dp, tuple(sharded), tuple(owners), batches, tuple(map(tuple, loaded)))


def _batches(
    sharded: Sequence[Sharded],
    owners: Sequence[Position],
    costs: Sequence[float],
    at_most: Callable[[int, int], int] | None,
) -> tuple[Batch, ...]:
    """Group what each owner does by stored shape, and cut it into chunks of whole batches.

    One chunk travels while another is stepped. There are as many as the busiest traveller's bytes
    are worth, the same number for all, about equal in each owner's cost. Batches are not cut for
    them: on four H100s smaller batches cost more than the overlap gained.
    """
    of_owner: dict[Position, dict[tuple[tuple[int, int, bool], bool], list[int]]] = {}
    travelling: dict[Position, int] = {}
    for i, (s, (t, d)) in enumerate(zip(sharded, owners, strict=True)):
        kind = (s.matrix.stored, bool(s.matrix.group))
        of_owner.setdefault((t, d), {}).setdefault(kind, []).append(i)
        moved = s.numel - sum(length for _, _, length in s.segments(t, d))
        replicas = len(s.held)
        if replicas > 1 and s.count(d) == s.numel == s.count((d + 1) % replicas):
            moved += s.numel  # its update goes to all of them
        travelling[t, d] = travelling.get((t, d), 0) + moved
    count = min(MOST_CHUNKS, 1 + max(travelling.values(), default=0) // CHUNK_ELEMENTS)
    found = []
    for owner, groups in sorted(of_owner.items()):
        total = sum(costs[i] for members in groups.values() for i in members)
        done = 0.0
        for (stored, _), members in sorted(groups.items()):
            size = at_most(*sharded[members[0]].matrix.shape) if at_most else len(members)
            for first in range(0, len(members), size):
                batch = tuple(members[first : first + size])
                cost = sum(costs[i] for i in batch)
                middle = (done + cost / 2) / total if total else 0.0
                found.append(Batch(owner, min(count - 1, int(count * middle)), stored, batch))
                done += cost
    used = sorted({batch.chunk for batch in found})  # few batches leave some empty
    return tuple(batch._replace(chunk=used.index(batch.chunk)) for batch in found)


def _candidates(s: Sharded) -> list[tuple[int, int, int]]:
    """Data-parallel ranks that may own a matrix: (first, last + 1, elements that each holds)."""
    return [run for run in s.counts if run[2] == s.numel] or s.counts
