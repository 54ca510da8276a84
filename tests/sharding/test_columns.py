"""Matrices that lie by columns: each true row is stepped once, and what it needs arrives once."""

from __future__ import annotations

from collections import Counter

from cases import ranges
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_aro.sharding.buffers import everywhere, lay_out
from megatron_aro.sharding.columns import ByColumns, moved
from megatron_aro.sharding.plan import Held


def held_in_order(intervals: tuple) -> Held:
    runs = ((d, d + 1, i) for d, i in enumerate(intervals) if i[0] < i[1])
    return Held(len(intervals), tuple(runs))


@st.composite
def matrices(draw: st.DrawFn) -> ByColumns:
    """Any cuts: ranks with nothing, rows over several ranks, shards of padding alone."""
    tp, dp = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    width, stored = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    replicated = draw(st.booleans())
    rows = draw(st.integers(1, stored if replicated else stored * tp))
    numel = stored * width
    held = everywhere(numel, dp)
    if draw(st.booleans()):
        held = held_in_order(draw(ranges(numel, dp)))
    return ByColumns("w", rows, width, stored, tp, replicated, held)


def positions(matrix: ByColumns) -> list[tuple[int, int]]:
    return [(t, d) for t in range(matrix.tp) for d in range(len(matrix.held))]


@settings(derandomize=True, max_examples=200, deadline=None)
@given(matrices())
def test_each_true_row_is_stepped_once_and_no_padding(matrix: ByColumns) -> None:
    """Over all positions; of a replicated matrix too."""
    stepped = Counter(
        matrix.first(t) + row for t, d in positions(matrix) for row in range(*matrix.stepped(t, d))
    )
    assert stepped == Counter(range(matrix.rows))


@settings(derandomize=True, max_examples=200, deadline=None)
@given(matrices())
def test_rows_are_completed_by_what_moves(matrix: ByColumns) -> None:
    """Each element of a rank's rows is held there, or moves there once from where it is held.

    A rank has at most one cut row, its last, and gives at most what it holds of one.
    """
    for t in range(matrix.tp):
        moves = matrix.moves(t)
        for d in range(len(matrix.held)):
            low, high = matrix.held[d]
            first, last = matrix.rows_of(t, d)
            arriving = [m for m in moves if m.target == d]
            there = Counter(range(low, high)) + Counter(
                e for m in arriving for e in range(m.start, m.stop)
            )
            needed = range(first * matrix.width, last * matrix.width)
            assert all(there[e] == 1 for e in needed)
            begin = high // matrix.width * matrix.width
            for move in arriving:
                assert begin <= move.start < move.stop <= begin + matrix.width
                assert begin == (last - 1) * matrix.width >= low
            sent = [m for m in moves if m.source == d]
            assert len(sent) <= 1 and all(
                low == m.start and m.stop <= high and m.stop - m.start < matrix.width for m in sent
            )
            assert moved([matrix], t, d) == sum(m.stop - m.start for m in sent)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(matrices())
def test_every_true_element_gets_its_update(matrix: ByColumns) -> None:
    """What a rank holds before its padding is of rows that it answers for, or that it gives."""
    for t, d in positions(matrix):
        low, _ = matrix.held[d]
        first, last = matrix.rows_of(t, d)
        mine = set(range(first * matrix.width, last * matrix.width))
        mine |= {e for m in matrix.moves(t) if m.source == d for e in range(m.start, m.stop)}
        if matrix.shared:
            mine = set(range(matrix.true(t) * matrix.width))
        count = matrix.true_elements(t, d)
        assert set(range(low, low + count)) <= mine
        assert low + count == max(low, min(matrix.held[d][1], matrix.true(t) * matrix.width))


def test_the_largest_share_is_small() -> None:
    """Qwen3-8B's vocabulary at TP 2 x DP 4: an eighth of its rows each, one row cut at most."""
    rows, width = 151_936, 4096
    buffer = lay_out([rows // 2 * width, width], 4)
    matrix = ByColumns("w", rows, width, rows // 2, 2, False, buffer.held(0))
    shares = [b - a for t, d in positions(matrix) for a, b in [matrix.stepped(t, d)]]
    assert max(shares) - min(shares) <= 2 and sum(shares) == rows
    assert all(moved([matrix], t, d) < width for t, d in positions(matrix))
