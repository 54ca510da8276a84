"""Rotations that several matrices share, on one rank: what `sharding.groups` plans, carried out.

The mathematics is `rotation.stacks`. Each rank has the members that it owns as pieces of their
groups' stacks. In a step they meet in small sums, one all-reduce each over all ranks, and in two
all-to-alls: shares of what is to be orthonormalised to the groups' owners, new rotations back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_aro.config import AROConfig
from megatron_aro.rotation import (
    FALLBACK_RUNGS,
    MEASURES,
    initial_rotation,
    new_fallback_counts,
)
from megatron_aro.rotation.monitor import orthogonality_error
from megatron_aro.rotation.pieces import Look, Piece, Stack
from megatron_aro.rotation.stacks import look_ahead, turn, updates
from megatron_aro.runtime.totals import total_over
from megatron_aro.sharding.groups import GroupPlan


class Sharing:
    """The stacks of all groups as one rank sees them.

    Args:
        plan: the same on all ranks.
        rank: this one's number in the plan and in `group`.
        group: of all ranks; None where there is one.
    """

    def __init__(
        self,
        plan: GroupPlan,
        rank: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
        aro: AROConfig,
    ):
        self.plan, self._rank, self._group, self._device = plan, rank, group, device
        self._aro, self._total = aro, total_over(group)
        self._ranks = dist.get_world_size(group) if group else 1
        of_shape: dict[tuple[int, int], list[int]] = {}
        for i in plan.owned(rank):
            of_shape.setdefault(plan.groups[i].shape, []).append(i)
        self._turned = [_Turned(shape, indices, device) for shape, indices in of_shape.items()]
        self._rotations = {i: r for of in self._turned for i, r in of.rotations().items()}
        for i in plan.held(rank):
            if i not in self._rotations:
                (self._rotations[i],) = _identity(1, plan.groups[i].shape, device)
        self._shapes = {
            name: (group.rows, n, group.shape[1])
            for group in plan.groups
            for name, n in zip(group.members, group.columns, strict=True)
        }
        self._published = True  # whether the ranks with members have the owners' rotations
        self._stacks: list[Stack] = []
        self._looks: list[Look] = []

    def second_moment(self, name: str) -> Tensor | None:
        """Zeros for a member, [k, n] in the group's frame; None where the projection has none."""
        _, n, k = self._shapes[name]
        return torch.zeros(k, n, device=self._device) if self._aro.projection == "adam" else None

    def rotate(
        self, momenta: Mapping[str, Tensor], second_moments: Mapping[str, Tensor | None]
    ) -> None:
        """Steps 2 and 3 of all groups. A collective; owners of groups wait for the device.

        Args:
            momenta: [m, n] of all members that this rank owns; not to change before `updates`.
            second_moments: [k, n] of the same, projection adam only.
        """
        if not self._published:  # they were loaded
            self._publish()
        self._stacks = [
            Stack(
                self._rotations.get(i, torch.zeros((), device=self._device).expand(group.shape)),
                group.columns,
                [
                    Piece(momenta[name], member, start, second_moments[name])
                    for member, (name, start) in enumerate(
                        zip(group.members, group.starts, strict=True)
                    )
                    if name in momenta
                ],
            )
            for i, group in enumerate(self.plan.groups)
        ]
        self._looks = look_ahead(self._stacks, self._aro, self._total)
        self._sum_shares()
        for of in self._turned:
            turn(of.rotation, [self._looks[i] for i in of.groups], of.fallbacks, self._aro)
        for look in self._looks:
            look.target = look.target.new_empty(0)
        self._publish()

    def updates(self) -> dict[str, Tensor]:
        """Steps 4 and 5: U [m, n] of all members that this rank owns. A collective."""
        found = updates(self._stacks, self._looks, self._aro, self._total)
        names = (
            self.plan.groups[i].members[piece.member]
            for i, stack in enumerate(self._stacks)
            for piece in stack.pieces
        )
        self._stacks, self._looks = [], []
        return dict(zip(names, (u_mn for of_stack in found for u_mn in of_stack), strict=True))

    def _sum_shares(self) -> None:
        """Targets of the groups that this rank turns, each summed in the order of ranks."""
        ranks, me, groups = range(self._ranks), self._rank, self.plan.groups
        received = self._all_to_all(
            [[self._looks[i].target for i in self._from(me, to)] for to in ranks],
            [[groups[i].shape for i in self._from(source, me)] for source in ranks],
        )
        shares: dict[int, list[Tensor]] = {i: [] for of in self._turned for i in of.groups}
        for source in ranks:
            for i, share in zip(self._from(source, me), received[source], strict=True):
                shares[i].append(share)
            if source == me:
                for i in self.plan.between(me, me):
                    shares[i].append(self._looks[i].target)
        for i, (first, *others) in shares.items():
            for share in others:
                first += share
            self._looks[i].target = first

    def _publish(self) -> None:
        """Every rank with members gets its groups' rotations from those that turn them."""
        ranks, me, groups = range(self._ranks), self._rank, self.plan.groups
        received = self._all_to_all(
            [[self._rotations[i] for i in self._from(to, me)] for to in ranks],
            [[groups[i].shape for i in self._from(me, source)] for source in ranks],
        )
        for source in ranks:
            for i, rotation in zip(self._from(me, source), received[source], strict=True):
                self._rotations[i].copy_(rotation)
        self._published = True

    def _from(self, rank: int, owner: int) -> Sequence[int]:
        """Groups whose shares travel from one to the other."""
        return self.plan.between(rank, owner) if rank != owner else ()

    def _all_to_all(
        self, send: list[list[Tensor]], shapes: list[list[tuple[int, int]]]
    ) -> list[list[Tensor]]:
        """One collective: send[r] goes to rank r; what comes from r has shapes[r]."""
        if self._group is None:
            return [[]]
        sizes = [[m * k for m, k in of_rank] for of_rank in shapes]
        incoming = [sum(of_rank) for of_rank in sizes]
        outgoing = [sum(x.numel() for x in to) for to in send]
        nothing = torch.empty(0, device=self._device)
        sent = torch.cat([nothing, *(x.reshape(-1) for to in send for x in to)])
        received = torch.empty(sum(incoming), device=self._device)
        dist.all_to_all_single(received, sent, incoming, outgoing, group=self._group)
        return [
            [x.view(shape) for x, shape in zip(flat.split(of_rank), of_shapes, strict=True)]
            for flat, of_rank, of_shapes in zip(
                received.split(incoming), sizes, shapes, strict=True
            )
        ]

    def state(self) -> dict[str, Tensor]:
        """What this rank keeps for the groups that it turns, as `MatrixOptimizer.rotation_state`.

        Whoever changes it says so with `loaded`.
        """
        state = {}
        for of in self._turned:
            for b, i in enumerate(of.groups):
                state[f"rotation.{self.plan.groups[i].name}"] = of.rotation[b]
                state[f"fallbacks.{self.plan.groups[i].name}"] = of.fallbacks[b]
        return state

    def loaded(self) -> None:
        """Rotations are other ones, on all ranks: the next step tells those that have members."""
        self._published = False
        for of in self._turned:
            of.counted.copy_(of.fallbacks)

    def owned(self) -> list[str]:
        """The names of the groups that this rank turns."""
        return [self.plan.groups[i].name for of in self._turned for i in of.groups]

    def measures(self, sample: Collection[str]) -> Tensor:
        """Of each group of `owned`, as `MatrixOptimizer.measures`: orthogonality, and counts."""
        rows = [torch.empty(0, len(MEASURES) + len(FALLBACK_RUNGS), device=self._device).double()]
        for of in self._turned:
            measures = torch.full((len(of.groups), len(MEASURES)), torch.nan, device=self._device)
            for b, i in enumerate(of.groups):
                if self.plan.groups[i].name in sample:
                    error = orthogonality_error(of.rotation[b : b + 1])[0]
                    measures[b, MEASURES.index("orthogonality")] = error
            counts = of.fallbacks - of.counted
            of.counted.copy_(of.fallbacks)
            rows.append(torch.cat([measures.double(), counts.double()], dim=1))
        return torch.cat(rows)

    def fallback_counts(self) -> list[Tensor]:
        """Counts of FALLBACK_RUNGS, summed over groups of a shape."""
        return [of.fallbacks.sum(dim=0) for of in self._turned]


class _Turned:
    """Groups of one shape that this rank turns together."""

    def __init__(self, shape: tuple[int, int], groups: list[int], device: torch.device):
        self.groups = groups  # indices into the plan
        self.rotation = _identity(len(groups), shape, device)
        self.fallbacks = new_fallback_counts(len(groups), device)
        self.counted = self.fallbacks.clone()  # as of the last `Sharing.measures`

    def rotations(self) -> dict[int, Tensor]:
        return dict(zip(self.groups, self.rotation, strict=True))


def _identity(b: int, shape: tuple[int, int], device: torch.device) -> Tensor:
    m, k = shape
    return initial_rotation(b, m, k, dtype=torch.float32, device=device)
