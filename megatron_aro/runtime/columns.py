"""Steps matrices where they lie, by columns, and parameters that have no side to rotate.

What crosses ranks: sums of rows, one m x k matrix to the rank that turns it and the rotation back,
and the elements of rows that range boundaries cut. The number of collectives does not depend on
that of parameters, except that a matrix with copies on other pipeline stages is sent to them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_aro.config import AROConfig
from megatron_aro.rotation import initial_rotation, new_fallback_counts
from megatron_aro.rotation.pieces import Look, Piece, Stack, Total
from megatron_aro.rotation.scaling import ZERO_COLUMN
from megatron_aro.rotation.stacks import look_ahead, turn, updates
from megatron_aro.runtime.totals import total_over
from megatron_aro.sharding.columns import ByColumns
from megatron_aro.sharding.plan import Position

Group = dist.ProcessGroup | None
Pieces = Mapping[str, Tensor]  # by parameter name, the flat elements that this rank holds


class Vector(NamedTuple):
    """A parameter that is stepped with R = I: all that has no rows and columns."""

    name: str
    numel: int
    """Of the whole parameter."""
    counted: bool
    """Whether what this rank holds counts for the whole; else another rank has the same."""


class Copied(NamedTuple):
    """A matrix that several pipeline stages have a copy of, cut alike on each."""

    name: str
    """What this stage calls it; "" if it has none."""
    numel: int
    """Elements that a rank holds of it."""
    group: dist.ProcessGroup
    """The first rank steps it, and the others take its update."""


class Columns:
    """One rank's side of the matrices and vectors that a grid steps where they lie.

    Args:
        matrices, vectors: in an order that all ranks of the grid share.
        owner: the position that turns the rotations.
        position: this rank's.
        held: names of the parameters of which this rank has elements.
        tp_group, dp_group: the grid's groups through this rank, None where of size 1.
    """

    def __init__(
        self,
        matrices: Sequence[ByColumns],
        vectors: Sequence[Vector],
        copied: Sequence[Copied],
        owner: Position,
        position: Position,
        held: Collection[str],
        tp_group: Group,
        dp_group: Group,
        device: torch.device,
        aro: AROConfig,
    ):
        self.matrices, self.vectors, self._copied = list(matrices), list(vectors), list(copied)
        self._owner, (self._t, self._d) = owner, position
        self._tp_group, self._dp_group, self._device, self._aro = tp_group, dp_group, device, aro
        self._rotations = [
            initial_rotation(1, *matrix.shape, dtype=torch.float32, device=device)[0]
            for matrix in self.matrices
        ]
        self._fallbacks = new_fallback_counts(len(self.matrices), device)
        self._moves = [matrix.moves(self._t) for matrix in self.matrices]
        mine = [i for i, vector in enumerate(self.vectors) if vector.name in held]
        self._held_vectors = [self.vectors[i].name for i in mine]
        self._places = torch.tensor(mine, dtype=torch.int64, device=device)
        counted = [self.vectors[i].counted for i in mine]
        self._counted = torch.tensor(counted, dtype=torch.bool, device=device)
        self._numel = torch.tensor([vector.numel for vector in self.vectors], device=device)
        self._stacks: list[Stack] = []
        self._looks: list[Look] = []

    @property
    def is_owner(self) -> bool:
        """Whether this rank turns the rotations, counts fall-backs, and writes checkpoints."""
        return (self._t, self._d) == self._owner

    def start(self, momenta: Pieces) -> None:
        """Look ahead, from momenta that have been advanced."""
        self._cut = [torch.empty(matrix.width, device=self._device) for matrix in self.matrices]
        self._complete(momenta)
        self._stacks = [
            Stack(rotation, (matrix.rows,), self._pieces(i, momenta))
            for i, (matrix, rotation) in enumerate(zip(self.matrices, self._rotations, strict=True))
        ]
        self._looks = look_ahead(self._stacks, self._aro, self._total)

    def finish(self, momenta: Pieces, gradients: Pieces) -> None:
        """Turn the rotations and write the updates over the gradients."""
        if self._aro.rotation != "none":
            self._turn()
        parts = updates(self._stacks, self._looks, self._aro, self._total)
        for i, of_matrix in enumerate(parts):
            rows = self.matrices[i].stepped(self._t, self._d)
            for target, d_mn in zip(self._rows(i, rows, gradients), of_matrix, strict=True):
                target.view(d_mn.mT.shape).copy_(d_mn.mT)
        self._stacks, self._looks, parts = [], [], []
        self._return(gradients)
        self._step_vectors(momenta, gradients)
        for copied in self._copied:
            if not copied.numel:
                continue
            update = gradients.get(copied.name)
            if update is None:  # this stage has no copy
                update = torch.empty(copied.numel, device=self._device)
            dist.broadcast(update, group_src=0, group=copied.group)

    def align(self, momenta: Pieces, sweeps: int) -> None:
        """Turn the rotations as so many steps on these momenta would."""
        if self._aro.rotation == "none":
            return
        for _ in range(sweeps):
            self.start(momenta)
            self._turn()
        self._stacks, self._looks = [], []

    def rotation_state(self) -> dict[str, Tensor]:
        """As `MatrixOptimizer.rotation_state`; every rank has rotations, the owner has counts."""
        state = {}
        for i, matrix in enumerate(self.matrices):
            state[f"rotation.{matrix.name}"] = self._rotations[i]
            if self.is_owner:
                state[f"fallbacks.{matrix.name}"] = self._fallbacks[i]
        return state

    def fallbacks(self) -> Tensor:
        """Counts of FALLBACK_RUNGS of what this rank turns, summed."""
        return self._fallbacks.sum(dim=0)

    @property
    def _total(self) -> Total:
        """Over the grid, in the same order on all of its ranks."""
        over_tp, over_dp = total_over(self._tp_group), total_over(self._dp_group)
        return lambda tensors, op: over_dp(over_tp(tensors, op), op)

    def _pieces(self, i: int, momenta: Pieces) -> list[Piece]:
        matrix = self.matrices[i]
        rows = matrix.stepped(self._t, self._d)
        column = matrix.first(self._t) + rows[0]
        pieces = []
        for flat in self._rows(i, rows, momenta):
            by_row = flat.view(-1, matrix.width)
            pieces.append(Piece(by_row.mT, column=column))
            column += by_row.shape[0]
        return pieces

    def _rows(self, i: int, rows: tuple[int, int], held: Pieces) -> list[Tensor]:
        """Where these rows of those that this rank answers for are: the whole ones, the cut one."""
        matrix, (first, last) = self.matrices[i], rows
        if first >= last:
            return []
        low, high = matrix.held[self._d]
        whole = min(last, max(first, high // matrix.width))
        found = []
        if first < whole:
            start, stop = first * matrix.width - low, whole * matrix.width - low
            found.append(held[matrix.name][start:stop])
        if whole < last:
            found.append(self._cut[i])
        return found

    def _ends(self, i: int, held: Pieces) -> tuple[list[Tensor], list[Tensor]]:
        """This rank's elements of its cut row: in that row, and where it holds them."""
        matrix, moves = self.matrices[i], self._moves[i]
        if not any(move.target == self._d for move in moves):
            return [], []
        low, high = matrix.held[self._d]
        begin = high // matrix.width * matrix.width
        return [self._cut[i][: high - begin]], [held[matrix.name][begin - low :]]

    def _travelling(self, held: Pieces) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """By data-parallel rank: elements held here of its rows, and of rows here that it holds."""
        ranks = range(dist.get_world_size(self._dp_group) if self._dp_group else 1)
        theirs: list[list[Tensor]] = [[] for _ in ranks]
        ours: list[list[Tensor]] = [[] for _ in ranks]
        for i, (matrix, moves) in enumerate(zip(self.matrices, self._moves, strict=True)):
            low = matrix.held[self._d][0]
            for move in moves:
                if move.source == self._d:
                    theirs[move.target].append(
                        held[matrix.name][move.start - low : move.stop - low]
                    )
                if move.target == self._d:
                    begin = move.start // matrix.width * matrix.width
                    ours[move.source].append(self._cut[i][move.start - begin : move.stop - begin])
        return theirs, ours

    def _complete(self, held: Pieces) -> None:
        """Bring the rows that this rank steps together."""
        if not any(self._moves):
            return
        for i in range(len(self.matrices)):
            for row, end in zip(*self._ends(i, held), strict=True):
                row.copy_(end)
        theirs, ours = self._travelling(held)
        self._all_to_all(theirs, ours)

    def _return(self, updates: Pieces) -> None:
        """Bring each update to all ranks that hold its elements."""
        ranks = range(dist.get_world_size(self._tp_group) if self._tp_group else 1)
        spread = [i for i, matrix in enumerate(self.matrices) if matrix.replicated]
        if self._tp_group and spread:
            self._all_gather(
                self._tp_group,
                [
                    [
                        target
                        for i in spread
                        for target in self._rows(i, self.matrices[i].stepped(t, self._d), updates)
                    ]
                    for t in ranks
                ],
            )
        if any(self._moves):
            for i in range(len(self.matrices)):
                for row, end in zip(*self._ends(i, updates), strict=True):
                    end.copy_(row)
            theirs, ours = self._travelling(updates)
            self._all_to_all(ours, theirs)
        shared = [i for i, matrix in enumerate(self.matrices) if matrix.shared]
        if shared and self._dp_group:
            self._all_gather(
                self._dp_group,
                [
                    [
                        target
                        for i in shared
                        for target in self._rows(i, self.matrices[i].rows_of(self._t, d), updates)
                    ]
                    for d in range(dist.get_world_size(self._dp_group))
                ],
            )

    def _turn(self) -> None:
        """The owner gets the sums of what all ranks looked ahead to, and gives the rotations."""
        if not self.matrices:
            return
        t, d = self._owner
        sums = _flat(look.target for look in self._looks)
        if self._tp_group:
            dist.reduce(sums, group_dst=t, group=self._tp_group)
        if self._dp_group and self._t == t:
            dist.reduce(sums, group_dst=d, group=self._dp_group)
        if self.is_owner:
            for look, total in zip(self._looks, _like(sums, self._rotations), strict=True):
                look.target = total
            for alike in self._alike():
                rotation = torch.stack([self._rotations[i] for i in alike])
                counts = self._fallbacks[alike]
                turn(rotation, [self._looks[i] for i in alike], counts, self._aro)
                self._fallbacks[alike] = counts
                for i, turned in zip(alike, rotation, strict=True):
                    self._rotations[i].copy_(turned)
        new = _flat(self._rotations)
        if self._dp_group and self._t == t:
            dist.broadcast(new, group_src=d, group=self._dp_group)
        if self._tp_group:
            dist.broadcast(new, group_src=t, group=self._tp_group)
        torch._foreach_copy_(self._rotations, _like(new, self._rotations))

    def _alike(self) -> list[list[int]]:
        """Matrices by the shape of their rotation."""
        shapes: dict[torch.Size, list[int]] = {}
        for i, rotation in enumerate(self._rotations):
            shapes.setdefault(rotation.shape, []).append(i)
        return list(shapes.values())

    def _step_vectors(self, momenta: Pieces, gradients: Pieces) -> None:
        """U = rms sqrt(n) D / ||D|| with D the signs of the momentum (spec, 1-D parameters).

        A vector is a row of columns of one entry: which counts as zero is ZERO_COLUMN's business,
        lest what only decays keeps its sign for ever. One that is not finite stays where it is.
        """
        if not self.vectors:
            return
        held = [momenta[name] for name in self._held_vectors]
        norms = torch._foreach_norm(held, 2, dtype=torch.float64) if held else ()
        whole = self._sum_of_vectors([norm.square() for norm in norms]).sqrt()
        least = (ZERO_COLUMN * whole).clamp(min=torch.finfo(torch.float32).tiny)
        least = least.masked_fill(~whole.isfinite(), math.inf).float()[self._places]
        signs: tuple[Tensor, ...] = ()
        if held:
            m = torch.cat(held)
            limits = torch.cat([limit.expand_as(x) for x, limit in zip(held, least, strict=True)])
            signs = torch.where((m.abs() >= limits) & m.isfinite(), m.sign(), 0.0).split(
                [len(x) for x in held]
            )
        counts = self._sum_of_vectors(torch._foreach_norm(signs, 1) if held else ())
        scales = self._aro.update_rms * (self._numel / counts.clamp(min=1)).sqrt()
        if held:
            torch._foreach_mul_(signs, list(scales.float()[self._places].unbind()))
            torch._foreach_copy_([gradients[name] for name in self._held_vectors], signs)

    def _sum_of_vectors(self, of_held: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
        """Of each vector the sum, float64, over the pieces that ranks hold."""
        sums = torch.zeros(len(self.vectors), dtype=torch.float64, device=self._device)
        if of_held:
            sums[self._places] = torch.stack(of_held).double().masked_fill(~self._counted, 0)
        (sums,) = self._total([sums], "sum")
        return sums

    def _all_to_all(self, send: list[list[Tensor]], receive: list[list[Tensor]]) -> None:
        """One collective over data-parallel ranks."""
        outgoing, incoming = (
            [sum(x.numel() for x in of) for of in ranks] for ranks in (send, receive)
        )
        sent = _flat(x for to in send for x in to) if sum(outgoing) else self._nothing()
        received = torch.empty(sum(incoming), device=self._device)
        dist.all_to_all_single(received, sent, incoming, outgoing, group=self._dp_group)
        _unpack(received, [x for source in receive for x in source])

    def _all_gather(self, group: dist.ProcessGroup, ranks: list[list[Tensor]]) -> None:
        """One collective: all get what rank r has of ``ranks[r]``; padded, gloo wants it even."""
        longest = max(sum(x.numel() for x in of) for of in ranks)
        if not longest:
            return
        sent = torch.zeros(longest, device=self._device)
        me = dist.get_rank(group)
        if ranks[me]:
            flat = _flat(ranks[me])
            sent[: flat.numel()] = flat
        received = torch.empty(len(ranks), longest, device=self._device)
        dist.all_gather_into_tensor(received.view(-1), sent, group=group)
        for r, of in enumerate(ranks):
            if r != me:
                _unpack(received[r], of)

    def _nothing(self) -> Tensor:
        return torch.empty(0, device=self._device)


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _like(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of consecutive elements of a flat tensor, of these shapes."""
    sizes = [x.numel() for x in like]
    parts = flat[: sum(sizes)].split(sizes)
    return [part.view(x.shape) for part, x in zip(parts, like, strict=True)]


def _unpack(flat: Tensor, targets: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, _like(flat, targets))
