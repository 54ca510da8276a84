"""Groups of matrices that share a rotation: owners, what travels, and that all ranks agree."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_aro.config import AROConfig
from megatron_aro.sharding import rules
from megatron_aro.sharding.groups import GroupPlan, Member, plan_groups

HIDDEN = 8
MEMBERS = st.integers(1, 5).flatmap(
    lambda ranks: st.tuples(
        st.lists(
            st.tuples(
                st.sampled_from("abc"),
                st.integers(1, 12),
                st.integers(0, ranks - 1),
            ),
            min_size=1,
            max_size=15,
        ),
        st.lists(st.integers(0, 500), min_size=ranks, max_size=ranks),
    )
)


def cost(m: int, k: int) -> float:
    return float(m * k)


def members_of(drawn: list[tuple[str, int, int]]) -> list[Member]:
    return [Member(g, f"w{i}", (HIDDEN, n), rank) for i, (g, n, rank) in enumerate(drawn)]


@settings(derandomize=True, max_examples=200, deadline=None)
@given(MEMBERS)
def test_a_stack_is_its_members_side_by_side(case: tuple) -> None:
    """Every member once, columns without a gap, the rotation as wide as they allow."""
    members, loads = members_of(case[0]), [float(x) for x in case[1]]
    plan = plan_groups(members, loads, cost)
    names = [name for group in plan.groups for name in group.members]
    assert sorted(names) == sorted(member.name for member in members)
    known = {member.name: member for member in members}
    for group in plan.groups:
        of = [known[name] for name in group.members]
        assert {member.group for member in of} == {group.name}
        assert list(group.columns) == [member.shape[1] for member in of]
        ends = [start + n for start, n in zip(group.starts, group.columns, strict=True)]
        assert [0, *ends[:-1]] == group.starts
        assert group.shape == (HIDDEN, min(HIDDEN, ends[-1]))
        assert set(group.ranks) == {member.rank for member in of}
        assert list(group.ranks) == sorted(group.ranks) and group.owner in group.ranks


@settings(derandomize=True, max_examples=200, deadline=None)
@given(MEMBERS)
def test_shares_travel_from_each_rank_with_members_to_the_owner(case: tuple) -> None:
    """Once each; what a rank sends is what the other one expects, in one order."""
    members, loads = members_of(case[0]), [float(x) for x in case[1]]
    plan = plan_groups(members, loads, cost)
    ranks = range(len(loads))
    shares: Counter[tuple[int, int]] = Counter()
    for rank, owner in itertools.product(ranks, ranks):
        between = plan.between(rank, owner)
        assert between == sorted(between)
        for i in between:
            assert plan.groups[i].owner == owner
            shares[i, rank] += 1
    wanted = {(i, rank) for i, group in enumerate(plan.groups) for rank in group.ranks}
    assert set(shares) == wanted and set(shares.values()) == {1}
    assert sorted(i for rank in ranks for i in plan.owned(rank)) == list(range(len(plan.groups)))
    assert {(i, rank) for rank in ranks for i in plan.held(rank)} == wanted


@settings(derandomize=True, max_examples=200, deadline=None)
@given(MEMBERS, st.randoms(use_true_random=False))
def test_the_order_in_which_ranks_report_does_not_matter(case: tuple, random) -> None:
    """Nor do owners of members change members and columns: groups are free of any layout."""
    members, loads = members_of(case[0]), [float(x) for x in case[1]]
    plan = plan_groups(members, loads, cost)
    shuffled = random.sample(members, len(members))
    assert plan_groups(shuffled, loads, cost) == plan
    moved = [member._replace(rank=0) for member in members]
    elsewhere = plan_groups(moved, loads, cost)
    assert free(elsewhere) == free(plan)


def free(plan: GroupPlan) -> list[tuple]:
    return [(group.name, group.members, group.columns) for group in plan.groups]


def test_the_least_loaded_of_the_ranks_with_members_turns() -> None:
    """Three groups of equal cost on three ranks that have members of all go to one each."""
    members = [Member(g, f"{g}{r}", (HIDDEN, 9), r) for g in "abc" for r in range(3)]
    plan = plan_groups(members, [0.0, 1.0, 2.0, 0.0], cost)
    assert [group.owner for group in plan.groups] == [0, 1, 2]
    busy = plan_groups(members, [1000.0, 0.0, 0.0, 0.0], cost)
    assert {group.owner for group in busy.groups} == {1, 2}


@pytest.mark.parametrize(
    "second", [Member("a", "w1", (7, 3), 0), Member("a", "w0", (8, 3), 1)], ids=["rows", "name"]
)
def test_members_that_cannot_be_are_refused(second: Member) -> None:
    with pytest.raises(ValueError, match="Matrices of a have rows"):
        plan_groups([Member("a", "w0", (8, 3), 0), second], [0.0, 0.0], cost)


LAYER = "decoder.layers.4."
GROUPS = {
    LAYER + "self_attention.linear_qkv.weight": ((24, 8), "chain.4"),
    LAYER + "self_attention.linear_q_down_proj.weight": ((3, 8), "chain.4"),
    LAYER + "self_attention.linear_q_up_proj.weight": ((24, 3), ""),
    LAYER + "self_attention.linear_proj.weight": ((8, 12), "chain.5"),
    LAYER + "mlp.router.weight": ((4, 8), "chain.4"),
    LAYER + "mlp.experts.local_experts.2.linear_fc1.weight": ((6, 8), "chain.4"),
    LAYER + "mlp.experts.linear_fc1.weight3": ((6, 8), "chain.4"),
    LAYER + "mlp.experts.linear_fc2.weight3": ((8, 6), "chain.5"),
    LAYER + "mlp.experts.linear_fc2.weight4": ((5, 6), ""),  # of a latent dimension
    LAYER + "mlp.shared_experts.linear_fc2.weight": ((8, 6), "chain.5"),
    LAYER + "mlp.shared_experts.gate_weight": ((1, 8), "chain.4"),
    LAYER + "mixer.in_proj.weight": ((20, 8), "chain.4"),
    LAYER + "mixer.out_proj.weight": ((8, 10), "chain.5"),
    LAYER + "mixer.strange.weight": ((8, 10), ""),
    "mtp.layers.1.eh_proj.weight": ((8, 16), "mtp.1.chain.0"),
    "mtp.layers.1.transformer_layer.mlp.linear_fc1.weight": ((24, 8), "mtp.1.chain.0"),
    "mtp.layers.1.transformer_layer.mlp.linear_fc2.weight": ((8, 12), "mtp.1.chain.1"),
    "vision.layers.0.mlp.linear_fc2.weight": ((8, 12), ""),
}


@pytest.mark.parametrize(("name", "shape", "group"), [(k, *v) for k, v in GROUPS.items()])
def test_who_shares_with_whom(name: str, shape: tuple[int, int], group: str) -> None:
    """By the table of names; only where the rotated side is the residual stream's."""
    rows, columns = shape

    def of(**settings: str) -> str:
        aro = AROConfig(**settings)
        (matrix,), _ = rules.matrices(name, {"": ((0, rows),)}, columns, aro, HIDDEN)
        assert not matrix.group or matrix.shape[0] == HIDDEN
        return matrix.group

    assert of() == ""
    assert of(sharing="chain") == group
    known = bool(group) or name.startswith("vision")
    assert of(sharing="global") == ("global" if known else "")
    other = "left" if columns == HIDDEN and group else "right"
    assert of(sharing="chain", override=f"{name}={other}") == ""
