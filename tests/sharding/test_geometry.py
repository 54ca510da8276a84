"""Parts: what tensor-parallel ranks store of a matrix, against Megatron's definition of a shard."""

from __future__ import annotations

from collections import Counter

import pytest
from cases import Stored, parameters, stored
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_aro.sharding.geometry import Layout, parts
from megatron_aro.sharding.logical import LogicalMatrix

sizes = st.sampled_from([1, 2, 3, 4])


def rows_of(matrix: LogicalMatrix) -> list[int]:
    """The parameter's rows that make up the matrix, in its order."""
    return [row for start, stop in matrix.intervals for row in range(start, stop)]


@settings(derandomize=True, max_examples=200, deadline=None)
@given(sizes.flatmap(parameters))
def test_spans_are_the_rectangle_row_by_row(parameter: Stored) -> None:
    """Reading a part's spans gives its rows and columns of the matrix, in order."""
    for matrix in parameter.matrices:
        rows = rows_of(matrix)
        for t, part in enumerate(parts(matrix, parameter.layout)):
            shard = parameter.stored(t)
            read = [shard[i] for start, stop in part.spans for i in range(start, stop)]
            assert read == [
                (row, column) for row in rows[slice(*part.rows)] for column in range(*part.columns)
            ]
            assert part.numel == len(read)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(sizes.flatmap(parameters))
def test_each_element_is_in_one_part_or_in_every_one(parameter: Stored) -> None:
    """Parts tile each matrix, and the spans of all matrices tile each shard."""
    layout = parameter.layout
    copies = layout.size if layout.axis is None else 1
    for matrix in parameter.matrices:
        found = Counter(
            (row, column)
            for part in parts(matrix, layout)
            for row in range(*part.rows)
            for column in range(*part.columns)
        )
        tall = range(matrix.rows)
        assert found == {(r, c): copies for r in tall for c in range(matrix.columns)}
    for t in range(layout.size):
        spans = sorted(s for m in parameter.matrices for s in parts(m, layout)[t].spans)
        assert [i for span in spans for i in range(*span)] == list(range(parameter.shard))


def test_tensor_parallelism_beyond_the_query_groups_cuts_inside_a_group() -> None:
    """Two groups of (q q k v) over four ranks: one has queries only, its neighbour K and V only."""
    qkv = stored("qkv", {"q": 2, "k": 1, "v": 1}, 1, Layout(8, 4, 0), repeats=2)
    q, k, v = (parts(matrix, qkv.layout) for matrix in qkv.matrices)
    assert [part.rows for part in q] == [(0, 2), (0, 0), (2, 4), (0, 0)]
    assert [part.spans for part in k] == [(), ((0, 1),), (), ((0, 1),)]
    assert [part.rows for part in v] == [(0, 0), (0, 1), (0, 0), (1, 2)]


def test_a_gated_fc1_is_stored_gate_over_up() -> None:
    """Rank t has rows t of gate, and below them the same rows of up."""
    fc1 = stored("fc1", {"gate": 4, "up": 4}, 3, Layout(8, 2, 0, blocks=2))
    gate, up = (parts(matrix, fc1.layout) for matrix in fc1.matrices)
    assert [(part.spans, part.rows) for part in gate] == [(((0, 6),), (0, 2)), (((0, 6),), (2, 4))]
    assert [(part.spans, part.rows) for part in up] == [(((6, 12),), (0, 2)), (((6, 12),), (2, 4))]


@pytest.mark.parametrize(
    ("rows", "columns", "layout", "message"),
    [
        (6, 4, (6, 4, 0), "6 rows in 1 blocks"),
        (8, 6, (8, 4, 1), "6 columns of w"),
        (8, 4, (8, 2, 0, 2), "several blocks"),
    ],
)
def test_what_does_not_split_is_refused(
    rows: int, columns: int, layout: tuple, message: str
) -> None:
    """Uneven shards do not exist in Megatron, and a part must be a rectangle."""
    with pytest.raises(ValueError, match=message):
        parts(LogicalMatrix("w", "w", ((0, rows),), columns, False), Layout(*layout))
