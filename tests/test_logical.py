"""Logical matrices: the rows of a parameter split as Megatron's layers read them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_aro.sharding.logical import LogicalMatrix, check_partition, stacked

sizes = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def split(sizes: list[int], repeats: int, columns: int, transposed: bool) -> list[LogicalMatrix]:
    parts = stacked({f"part{i}": size for i, size in enumerate(sizes)}, repeats=repeats)
    return [
        LogicalMatrix(f"w#{part}", "w", intervals, columns, transposed)
        for part, intervals in parts.items()
    ]


@settings(derandomize=True, max_examples=50, deadline=None)
@given(sizes, st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_parts_tile_their_parameter(sizes, repeats, columns, transposed):
    """Every row of a parameter is in exactly one matrix."""
    matrices = split(sizes, repeats, columns, transposed)
    check_partition("w", sum(sizes) * repeats, matrices)
    assert sum(m * n for m, n in (x.shape for x in matrices)) == sum(sizes) * repeats * columns


def test_interleaved_parts_are_the_rows_that_attention_reads():
    """The split of an interleaved QKV is the one of Megatron's view [groups, q + k + v, hidden]."""
    groups, queries, head, hidden = 3, 4, 2, 5
    weight = torch.arange(groups * (queries + 2 * head) * hidden, dtype=torch.float32)
    grouped = weight.view(groups, queries + 2 * head, hidden)
    parts = stacked({"q": queries, "k": head, "v": head}, repeats=groups)
    expected = dict(zip("qkv", grouped.split([queries, head, head], dim=1), strict=True))
    for part, intervals in parts.items():
        cut = torch.cat([weight.view(-1, hidden)[start:stop] for start, stop in intervals])
        assert torch.equal(cut, expected[part].reshape(-1, hidden))


@pytest.mark.parametrize(
    "intervals", [((0, 2), (1, 4)), ((0, 2), (3, 4)), ((0, 3),), ((0, 4), (4, 4))]
)
def test_rows_that_overlap_or_are_left_over_are_refused(intervals):
    """Nothing is dropped or stepped twice silently."""
    with pytest.raises(ValueError, match="rows"):
        check_partition("w", 4, [LogicalMatrix("w", "w", intervals, 2, False)])
