"""Logical matrices: rows split without loss, and cutting out and storing back are inverse."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_aro.runtime.matrix_optimizer import oriented, store
from megatron_aro.sharding.logical import LogicalMatrix, by_shape, check_partition, stacked

sizes = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def split(sizes: list[int], repeats: int, columns: int, transposed: bool) -> list[LogicalMatrix]:
    parts = stacked({f"part{i}": size for i, size in enumerate(sizes)}, repeats=repeats)
    return [
        LogicalMatrix(f"w#{part}", "w", intervals, columns, transposed)
        for part, intervals in parts.items()
    ]


@settings(derandomize=True, max_examples=50, deadline=None)
@given(sizes, st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_cut_and_store_are_inverse_and_touch_each_element_once(sizes, repeats, columns, transposed):
    """Every element of a parameter is in exactly one matrix, at the place it came from."""
    matrices = split(sizes, repeats, columns, transposed)
    rows = sum(sizes) * repeats
    check_partition("w", rows, matrices)
    flat = torch.arange(rows * columns, dtype=torch.float32)
    rebuilt = torch.full_like(flat, -1)
    for matrix in matrices:
        cut = oriented(flat, matrix)
        assert tuple(cut.shape) == matrix.shape
        store(cut, matrix, rebuilt)
    assert torch.equal(flat, rebuilt)
    assert sum(m * n for m, n in (x.shape for x in matrices)) == flat.numel()


def test_interleaved_parts_are_the_rows_that_attention_reads():
    """The split of an interleaved QKV is the one of Megatron's view [groups, q + k + v, hidden]."""
    groups, queries, head, hidden = 3, 4, 2, 5
    weight = torch.arange(groups * (queries + 2 * head) * hidden, dtype=torch.float32)
    grouped = weight.view(groups, queries + 2 * head, hidden)
    parts = stacked({"q": queries, "k": head, "v": head}, repeats=groups)
    expected = dict(zip("qkv", grouped.split([queries, head, head], dim=1), strict=True))
    for part, intervals in parts.items():
        cut = oriented(weight, LogicalMatrix(part, "w", intervals, hidden, False))
        assert torch.equal(cut, expected[part].reshape(-1, hidden))


@pytest.mark.parametrize(
    "intervals", [((0, 2), (1, 4)), ((0, 2), (3, 4)), ((0, 3),), ((0, 4), (4, 4))]
)
def test_rows_that_overlap_or_are_left_over_are_refused(intervals):
    """Nothing is dropped or stepped twice silently."""
    with pytest.raises(ValueError, match="rows"):
        check_partition("w", 4, [LogicalMatrix("w", "w", intervals, 2, False)])


def test_batches_hold_equal_oriented_shapes_in_order():
    """A transposed 3 x 2 and a plain 2 x 3 are one batch."""
    tall = LogicalMatrix("a", "a", ((0, 3),), 2, True)
    wide = LogicalMatrix("b", "b", ((0, 2),), 3, False)
    other = LogicalMatrix("c", "c", ((0, 3),), 2, False)
    assert by_shape([tall, other, wide]) == {(2, 3): [tall, wide], (3, 2): [other]}
