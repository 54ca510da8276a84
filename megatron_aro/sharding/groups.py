"""Rotations that several matrices share: who turns each, and which ranks must hear of it.

Matrices of a group stand side by side in a stack of m rows, whose rotation is m x k. They stay
with their owners, in any pipeline stage, and meet in sums only: each rank that owns some sends its
share of the m x k matrix to be orthonormalised to the group's owner, and gets the rotation back.
Groups are known to all ranks, so every rank makes the same plan from what all own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple


class Member(NamedTuple):
    """A matrix that shares a rotation."""

    group: str
    name: str
    shape: tuple[int, int]  # oriented: m rows, n columns
    rank: int  # its owner's, of all ranks


@dataclass(frozen=True)
class Group:
    """A stack, and where its parts are.

    Attributes:
        name: layout-free, as are the order of members and so the columns.
        rows: m.
        columns: n of each member.
        ranks: those that own members, in order.
        owner: the one of them that keeps and turns the rotation.
    """

    name: str
    rows: int
    members: tuple[str, ...]
    columns: tuple[int, ...]
    ranks: tuple[int, ...]
    owner: int

    @property
    def shape(self) -> tuple[int, int]:
        """(m, k) of the rotation."""
        return (self.rows, min(self.rows, sum(self.columns)))

    @property
    def starts(self) -> list[int]:
        """The first column of each member in the stack."""
        return list(accumulate(self.columns[:-1], initial=0))


@dataclass(frozen=True)
class GroupPlan:
    """All groups, in an order that all ranks share."""

    groups: tuple[Group, ...]

    @cached_property
    def _between(self) -> dict[tuple[int, int], list[int]]:
        found: dict[tuple[int, int], list[int]] = {}
        for i, group in enumerate(self.groups):
            for rank in group.ranks:
                found.setdefault((rank, group.owner), []).append(i)
        return found

    def between(self, rank: int, owner: int) -> list[int]:
        """Groups of which `rank` has members and that `owner` turns.

        Their shares travel from `rank` to `owner`, their rotations back.
        """
        return self._between.get((rank, owner), [])

    def owned(self, rank: int) -> list[int]:
        """Groups that a rank turns."""
        return [i for i, group in enumerate(self.groups) if group.owner == rank]

    def held(self, rank: int) -> list[int]:
        """Groups that a rank has members of."""
        return [i for i, group in enumerate(self.groups) if rank in group.ranks]


def plan_groups(
    members: Iterable[Member], loads: Sequence[float], cost: Callable[[int, int], float]
) -> GroupPlan:
    """Choose who turns each rotation: of the ranks that own members the least loaded.

    The dearest first, since few ranks of many have members of one group. A rank with members
    needs the rotation anyway.

    Args:
        members: of all ranks, in any order.
        loads: what each rank has to do already, in any unit.
        cost: of turning an m x k rotation, in that unit.

    Raises:
        ValueError: the members of a group have not the same number of rows, or two one name.
    """
    stacks: dict[str, list[Member]] = {}
    for member in sorted(members):
        stacks.setdefault(member.group, []).append(member)
    loaded = list(loads)
    found = []
    for name, of in stacks.items():
        rows = {member.shape[0] for member in of}
        names = tuple(member.name for member in of)
        if len(rows) != 1 or len(set(names)) != len(names):
            raise ValueError(f"Matrices of {name} have rows of {sorted(rows)}, or one name twice.")
        columns = tuple(member.shape[1] for member in of)
        ranks = tuple(sorted({member.rank for member in of}))
        found.append(Group(name, rows.pop(), names, columns, ranks, owner=-1))
    owners = {}
    for group in sorted(found, key=lambda group: (-cost(*group.shape), len(group.ranks))):
        owner = min(group.ranks, key=lambda rank: (loaded[rank], rank))
        owners[group.name] = owner
        loaded[owner] += cost(*group.shape)
    return GroupPlan(tuple(replace(group, owner=owners[group.name]) for group in found))
