"""Carries out a plan: matrices meet at their owners, and updates go back where they came from.

At most two fused collectives a direction, whatever the number of matrices: one over the
data-parallel group for what range boundaries cut, one over the tensor-parallel group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_aro.sharding.geometry import Part
from megatron_aro.sharding.plan import Plan

Group = dist.ProcessGroup | None


class _Run(NamedTuple):
    """Consecutive elements that one rank holds: where in the matrix's part, where in the piece."""

    matrix: int  # index into the plan
    first: int  # in the part
    parameter: str
    held: int  # first in the piece
    length: int


class _Chunk(NamedTuple):
    """What travels in one chunk; the same in every step."""

    owned: list[int]  # matrices that this rank steps
    gathered: list[int]  # matrices whose part of this tensor-parallel rank meets here
    returned: list[list[int]]  # by data-parallel rank, matrices whose update passes there
    in_pieces: dict[int, _Run]  # parts that need not be made: one run of what this rank holds
    # By data-parallel rank: what this one holds of the parts that meet there, and what that one
    # holds of the parts that meet here.
    gather_to: list[list[_Run]]
    gather_from: list[list[_Run]]
    return_from: list[list[_Run]]
    return_to: list[list[_Run]]


class Exchange:
    """One rank's side of a plan.

    Args:
        plan: the same on all ranks of the grid.
        tp_group, dp_group: the grid's groups through this rank, None where of size 1.
        device: where pieces and matrices live.
        dtype: what travels.

    Raises:
        RuntimeError: the ranks have made different plans. A collective over both groups.
    """

    def __init__(
        self,
        plan: Plan,
        tp_group: Group,
        dp_group: Group,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ):
        self.plan, self._tp_group, self._dp_group, self.device = plan, tp_group, dp_group, device
        self._dtype = dtype
        self.t = dist.get_rank(tp_group) if tp_group else 0
        self.d = dist.get_rank(dp_group) if dp_group else 0
        self._replicates, self._cuts = plan.replicates, plan.cuts
        self._chunks = [self._chunk(chunk) for chunk in range(plan.chunks)]
        for group in filter(None, (tp_group, dp_group)):
            digests: list[str] = [""] * dist.get_world_size(group)
            dist.all_gather_object(digests, plan.digest(), group=group)
            if len(set(digests)) != 1:
                raise RuntimeError(f"The ranks of a group have made different plans: {digests}.")

    @property
    def travels(self) -> bool:
        """Whether anything leaves this rank."""
        return self._tp_group is not None or self._dp_group is not None

    def gather(
        self, chunk: int, pieces: Mapping[str, Tensor], matrices: Mapping[int, Tensor]
    ) -> None:
        """Make the matrices of a chunk that this rank owns whole.

        Args:
            pieces: by parameter name, the flat float32 elements that this rank holds.
            matrices: [rows, columns] as stored, contiguous, by index into the plan; filled.
        """
        plan, t, of = self.plan, self.t, self._chunks[chunk]
        parts = self._parts(of, of.gathered, pieces, matrices)
        own = [run for run in of.gather_to[self.d] if run.matrix not in of.in_pieces]
        _copy(_in_parts(parts, own), _in_pieces(pieces, own))
        if self._dp_group and self._cuts:
            self._all_to_all(
                self._dp_group,
                [_in_pieces(pieces, runs) for runs in of.gather_to],
                [_in_parts(parts, runs) for runs in of.gather_from],
            )
        if self._tp_group:
            mine = [i for i in of.owned if not plan.sharded[i].replicated]
            sharded = [i for i in of.gathered if not plan.sharded[i].replicated]
            _copy(
                [_rectangle(matrices[i], plan.sharded[i].parts[t]) for i in mine],
                [self._shaped(parts[i], i) for i in mine],
            )
            self._all_to_all(
                self._tp_group,
                [[parts[i] for i in sharded if plan.owners[i][0] == to] for to in range(plan.tp)],
                [
                    [_rectangle(matrices[i], plan.sharded[i].parts[source]) for i in mine]
                    for source in range(plan.tp)
                ],
            )

    def scatter(
        self, chunk: int, matrices: Mapping[int, Tensor], pieces: Mapping[str, Tensor]
    ) -> None:
        """Inverse of `gather`: fill the pieces of all ranks from the matrices that they own."""
        plan, t, of = self.plan, self.t, self._chunks[chunk]
        if self._dtype != torch.float32:
            # What stays here is rounded like what travels: replicas must not drift apart.
            for i in of.owned:
                matrices[i].copy_(matrices[i].to(self._dtype))
        parts = self._parts(of, of.returned[self.d], pieces, matrices)
        if self._tp_group:
            mine = [i for i in of.owned if not plan.sharded[i].replicated]
            _copy(
                [self._shaped(parts[i], i) for i in mine],
                [_rectangle(matrices[i], plan.sharded[i].parts[t]) for i in mine],
            )
            self._all_to_all(
                self._tp_group,
                [
                    [_rectangle(matrices[i], plan.sharded[i].parts[to]) for i in of.owned]
                    for to in range(plan.tp)
                ],
                [
                    [part for i, part in parts.items() if plan.owners[i][0] == source]
                    for source in range(plan.tp)
                ],
            )
        own = [run for run in of.return_from[self.d] if run.matrix not in of.in_pieces]
        _copy(_in_pieces(pieces, own), _in_parts(parts, own))
        if self._dp_group and self._replicates:
            self._all_gather(of, parts, pieces)
        elif self._dp_group and self._cuts:
            self._all_to_all(
                self._dp_group,
                [_in_parts(parts, runs) for runs in of.return_to],
                [_in_pieces(pieces, runs) for runs in of.return_from],
            )

    def _chunk(self, chunk: int) -> _Chunk:
        plan, ranks = self.plan, range(self.plan.dp)
        gathered = [plan.gathered(self.t, d, chunk) for d in ranks]
        returned = [plan.returned(d, chunk) for d in ranks]
        here = gathered[self.d] + returned[self.d]
        in_pieces = {
            run.matrix: run
            for run in self._runs(here, self.d)
            if run.length == plan.sharded[run.matrix].parts[self.t].numel
            and not self._is_matrix(run.matrix)
        }
        return _Chunk(
            [i for i in returned[self.d] if plan.owners[i] == (self.t, self.d)],
            gathered[self.d],
            returned,
            in_pieces,
            [self._runs(indices, self.d) for indices in gathered],
            [self._runs(gathered[self.d], d) for d in ranks],
            [self._runs(indices, self.d) for indices in returned],
            [self._runs(returned[self.d], d) for d in ranks],
        )

    def _runs(self, indices: Iterable[int], d: int) -> list[_Run]:
        """What data-parallel rank d holds of this tensor-parallel rank's parts of matrices."""
        return [
            _Run(i, first, self.plan.sharded[i].matrix.parameter, held, length)
            for i in indices
            for first, held, length in self.plan.sharded[i].segments(self.t, d)
        ]

    def _is_matrix(self, i: int) -> bool:
        """Whether this tensor-parallel rank's part is the matrix, and stepped here."""
        alone = self._tp_group is None or self.plan.sharded[i].replicated
        return alone and self.plan.owners[i] == (self.t, self.d)

    def _parts(
        self,
        chunk: _Chunk,
        indices: list[int],
        pieces: Mapping[str, Tensor],
        matrices: Mapping[int, Tensor],
    ) -> dict[int, Tensor]:
        """This tensor-parallel rank's parts, flat: the matrix, the piece, or memory for it."""
        made = {}
        for i in indices:
            if self._is_matrix(i):
                made[i] = matrices[i].view(-1)
            elif i in chunk.in_pieces:
                (made[i],) = _in_pieces(pieces, [chunk.in_pieces[i]])
            else:
                made[i] = torch.empty(self.plan.sharded[i].parts[self.t].numel, device=self.device)
        return made

    def _shaped(self, part: Tensor, i: int) -> Tensor:
        """A flat part of this rank as the rectangle of the matrix that it is."""
        low, high = self.plan.sharded[i].parts[self.t].columns
        return part.view(-1, high - low)

    def _all_to_all(
        self, group: dist.ProcessGroup, send: list[list[Tensor]], receive: list[list[Tensor]]
    ) -> None:
        """One collective: send[r] goes to rank r and fills there what it receives from us.

        What a rank keeps for itself has been copied already.
        """
        me = dist.get_rank(group)
        send[me], receive[me] = [], []
        outgoing = [sum(x.numel() for x in to) for to in send]
        incoming = [sum(x.numel() for x in source) for source in receive]
        sent = torch.empty(sum(outgoing), device=self.device, dtype=self._dtype)
        _pack(sent, [x for to in send for x in to])
        received = torch.empty(sum(incoming), device=self.device, dtype=self._dtype)
        dist.all_to_all_single(received, sent, incoming, outgoing, group=group)
        _unpack(received, [x for source in receive for x in source])

    def _all_gather(
        self, chunk: _Chunk, parts: Mapping[int, Tensor], pieces: Mapping[str, Tensor]
    ) -> None:
        """Every data-parallel rank gets the updates of all owners, in one collective."""
        plan, sharded = self.plan, self.plan.sharded
        sizes = [[sharded[i].parts[self.t].numel for i in indices] for indices in chunk.returned]
        longest = max(map(sum, sizes))
        sent = torch.empty(longest, device=self.device, dtype=self._dtype)
        _pack(sent, list(parts.values()))
        received = torch.empty(plan.dp, longest, device=self.device, dtype=self._dtype)
        dist.all_gather_into_tensor(received.view(-1), sent, group=self._dp_group)
        for d in range(plan.dp):
            if d != self.d:
                flat = received[d][: sum(sizes[d])].split(sizes[d])
                theirs = dict(zip(chunk.returned[d], flat, strict=True))
                runs = chunk.return_from[d]
                _copy(_in_pieces(pieces, runs), _in_parts(theirs, runs))


def _in_parts(parts: Mapping[int, Tensor], runs: Iterable[_Run]) -> list[Tensor]:
    return [parts[run.matrix][run.first : run.first + run.length] for run in runs]


def _in_pieces(pieces: Mapping[str, Tensor], runs: Iterable[_Run]) -> list[Tensor]:
    return [pieces[run.parameter][run.held : run.held + run.length] for run in runs]


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


def _rectangle(matrix: Tensor, part: Part) -> Tensor:
    """The view of a matrix [rows, columns] that a part is."""
    return matrix[slice(*part.rows), slice(*part.columns)]


def _pack(flat: Tensor, sources: list[Tensor]) -> None:
    """Copy sources of any shape to consecutive elements."""
    _copy(_consecutive(flat, sources), sources)


def _unpack(flat: Tensor, targets: list[Tensor]) -> None:
    """Copy consecutive elements into targets of any shape."""
    _copy(targets, _consecutive(flat, targets))


def _consecutive(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Views of a flat tensor, one after the other, of these shapes."""
    sizes = [x.numel() for x in like]
    chunks = flat[: sum(sizes)].split(sizes)
    return [chunk.view(x.shape) for chunk, x in zip(chunks, like, strict=True)]
