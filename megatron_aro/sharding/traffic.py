"""What each position of a grid sends and receives for one step, and the buffers it takes.

The same walk as `megatron_aro.runtime.exchange`, for all positions at once and without tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_aro.sharding.cost import FP32
from megatron_aro.sharding.plan import Plan, Position, Sharded


@dataclass
class Hop:
    """One collective of one rank, in elements: what travels, and what its buffers hold."""

    sent: int = 0
    received: int = 0
    buffers: int = 0

    def send(self, elements: int) -> None:
        self.sent += elements
        self.buffers += elements

    def receive(self, elements: int) -> None:
        self.received += elements
        self.buffers += elements


@dataclass
class Direction:
    """A chunk on its way to the owners, or back; `parts`: elements of the parts made in between."""

    data: Hop = field(default_factory=Hop)
    tensor: Hop = field(default_factory=Hop)
    parts: int = 0

    def bytes(self, size: int) -> int:
        """Of the buffers at the worse of its two hops, what travels having this size."""
        return FP32 * self.parts + size * max(self.data.buffers, self.tensor.buffers)


@dataclass
class Traffic:
    """Of one rank."""

    gather: list[Direction]
    back: list[Direction]

    def sent(self, hop: str, size: int) -> int:
        """Bytes over "data" or "tensor" parallel ranks, both ways."""
        return size * sum(getattr(way, hop).sent for way in (*self.gather, *self.back))

    def received(self, hop: str, size: int) -> int:
        return size * sum(getattr(way, hop).received for way in (*self.gather, *self.back))

    def buffers(self, size: int) -> int:
        """Bytes that the exchange takes at its peak, beside the matrices themselves."""
        return max(way.bytes(size) for way in (*self.gather, *self.back))


def traffic(plan: Plan) -> list[list[Traffic]]:
    """By position [tp][dp]."""
    chunks = range(plan.chunks)
    found = [
        [
            Traffic([Direction() for _ in chunks], [Direction() for _ in chunks])
            for _ in range(plan.dp)
        ]
        for _ in range(plan.tp)
    ]
    replicates = plan.replicates and plan.dp > 1
    for i, (s, owner) in enumerate(zip(plan.sharded, plan.owners, strict=True)):
        _add_tensor_parallel(found, s, owner, plan.chunk_of[i])
        _add_parts(found, s, owner, plan.chunk_of[i])
        if not replicates:
            _add_cuts(found, s, owner, plan.chunk_of[i])
    if replicates:
        _add_replicas(found, plan)
    return found


def _add_cuts(found: list[list[Traffic]], s: Sharded, owner: Position, chunk: int) -> None:
    """Elements that the owner's data-parallel rank lacks go there, and their updates back."""
    t_owner, home = owner
    for first, last, interval in s.holders:
        counts = [sum(x[2] for x in s.within(t, interval)) for t in range(len(found))]
        for d in range(first, last):
            if d == home:
                continue
            for t, (row, count) in enumerate(zip(found, counts, strict=True)):
                if t == t_owner or not s.replicated:
                    row[d].gather[chunk].data.send(count)
                    row[home].gather[chunk].data.receive(count)
                row[home].back[chunk].data.send(count)
                row[d].back[chunk].data.receive(count)


def _add_replicas(found: list[list[Traffic]], plan: Plan) -> None:
    """Every update goes to all data-parallel ranks, in one all-gather of the longest share."""
    for t, row in enumerate(found):
        own = [[0] * plan.dp for _ in range(plan.chunks)]
        for i, (s, (_, home)) in enumerate(zip(plan.sharded, plan.owners, strict=True)):
            own[plan.chunk_of[i]][home] += s.parts[t].numel
        for chunk, shares in enumerate(own):
            for position in row:
                moved = (plan.dp - 1) * max(shares)  # by a ring
                position.back[chunk].data = Hop(moved, moved, (plan.dp + 1) * max(shares))


def _add_tensor_parallel(
    found: list[list[Traffic]], s: Sharded, owner: Position, chunk: int
) -> None:
    """Parts go to the owner (unless each rank has the whole) and parts of the update come back."""
    t_owner, home = owner
    at_owner = found[t_owner][home]
    for t, part in enumerate(s.parts):
        if t != t_owner:
            there = found[t][home]
            if not s.replicated:
                there.gather[chunk].tensor.send(part.numel)
                at_owner.gather[chunk].tensor.receive(part.numel)
            at_owner.back[chunk].tensor.send(part.numel)
            there.back[chunk].tensor.receive(part.numel)


def _add_parts(found: list[list[Traffic]], s: Sharded, owner: Position, chunk: int) -> None:
    """A part is made where it is neither the owner's matrix nor one run of what a rank holds."""
    t_owner, home = owner
    alone = s.replicated or len(s.parts) == 1
    for t, part in enumerate(s.parts):
        if (alone and t == t_owner) or [x[2] for x in s.segments(t, home)] == [part.numel]:
            continue
        if not s.replicated:
            found[t][home].gather[chunk].parts += part.numel
        found[t][home].back[chunk].parts += part.numel
