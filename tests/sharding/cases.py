"""Hypothesis strategies: parameters as Megatron cuts them, and grids that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st

from megatron_aro.sharding import plan as plan_module
from megatron_aro.sharding.geometry import Layout, parts
from megatron_aro.sharding.logical import Interval, LogicalMatrix, stacked
from megatron_aro.sharding.plan import Plan, Position, Sharded, make_plan


@dataclass(frozen=True)
class Stored:
    """A parameter: its matrices and how a tensor-parallel group stores it."""

    matrices: tuple[LogicalMatrix, ...]
    layout: Layout
    columns: int

    @property
    def shard(self) -> int:
        """Elements that one tensor-parallel rank stores."""
        whole = self.layout.rows * self.columns
        return whole if self.layout.axis is None else whole // self.layout.size

    def stored(self, t: int) -> list[tuple[int, int]]:
        """(row, column) of each element of t's shard in its order, by Megatron's definition."""
        layout, columns = self.layout, range(self.columns)
        rows = list(range(layout.rows))
        if layout.axis == 0:
            block = layout.rows // layout.blocks
            height = block // layout.size
            rows = [
                i * block + t * height + row for i in range(layout.blocks) for row in range(height)
            ]
        elif layout.axis == 1:
            width = self.columns // layout.size
            columns = range(t * width, (t + 1) * width)
        return [(row, column) for row in rows for column in columns]

    def sharded(self, held: tuple[Interval, ...]) -> list[Sharded]:
        return [
            Sharded(matrix, parts(matrix, self.layout), self.layout.axis is None, held)
            for matrix in self.matrices
        ]


def stored(
    name: str, sizes: dict[str, int], columns: int, layout: Layout, repeats: int = 1
) -> Stored:
    """A parameter whose rows are parts of these sizes, `repeats` times over."""
    matrices = tuple(
        LogicalMatrix(f"{name}#{part}", name, intervals, columns, transposed=bool(number % 2))
        for number, (part, intervals) in enumerate(stacked(sizes, repeats=repeats).items())
    )
    return Stored(matrices, layout, columns)


@st.composite
def parameters(draw: st.DrawFn, tp: int, name: str = "w") -> Stored:
    """QKV (TP below, at and above the number of groups), gated fc1, axis 1, router, experts."""
    kind = draw(st.sampled_from(["qkv", "fc1", "rows", "columns", "router", "experts"]))
    columns, small = draw(st.integers(1, 4)), st.integers(1, 3)
    if kind == "qkv":
        head, groups = draw(small), draw(small)
        queries = draw(small)
        while groups * (queries + 2) * head % tp:
            queries += 1
        sizes = {"q": queries * head, "k": head, "v": head}
        rows = groups * (queries + 2) * head
        return stored(name, sizes, columns, Layout(rows, tp, 0), repeats=groups)
    if kind == "fc1":
        half = tp * draw(small)
        return stored(name, {"gate": half, "up": half}, columns, Layout(2 * half, tp, 0, 2))
    if kind == "experts":  # all experts of a layer fused into one weight
        half, experts = tp * draw(small), draw(small)
        sizes = {f"expert{e}#{half_}": half for e in range(experts) for half_ in ("gate", "up")}
        return stored(name, sizes, columns, Layout(2 * half * experts, tp, 0, 2 * experts))
    rows = draw(st.integers(1, 5))
    if kind == "rows":
        return stored(name, {"": rows * tp}, columns, Layout(rows * tp, tp, 0))
    if kind == "columns":
        return stored(name, {"": rows}, columns * tp, Layout(rows, tp, 1))
    return stored(name, {"": rows}, columns, Layout(rows, tp, None))


@st.composite
def ranges(draw: st.DrawFn, numel: int, dp: int) -> tuple[Interval, ...]:
    """One interval a rank that together tile [0, numel); some ranks hold nothing."""
    cuts = draw(st.lists(st.integers(0, numel), min_size=dp - 1, max_size=dp - 1))
    bounds = [0, *sorted(cuts), numel]
    return tuple(zip(bounds, bounds[1:], strict=False))


@dataclass(frozen=True)
class Grid:
    """Parameters on a grid, their matrices, and the plan."""

    stored: tuple[Stored, ...]
    sharded: tuple[Sharded, ...]
    of: tuple[int, ...]  # index into `stored` of each matrix's parameter
    plan: Plan
    chunk: int  # elements

    @property
    def positions(self) -> list[Position]:
        return [(t, d) for t in range(self.plan.tp) for d in range(self.plan.dp)]


@st.composite
def grids(draw: st.DrawFn, replicated: bool | None = None) -> Grid:
    """Up to four parameters on up to 4 x 4 positions; `replicated`: over data parallelism."""
    tp, dp = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 4))
    chunk = draw(st.sampled_from([4, plan_module.CHUNK_ELEMENTS]))
    everywhere = draw(st.booleans()) if replicated is None else replicated
    held_by: list[Stored] = []
    sharded: list[Sharded] = []
    of: list[int] = []
    for number in range(draw(st.integers(1, 4))):
        parameter = draw(parameters(tp, f"w{number}"))
        held = ((0, parameter.shard),) * dp if everywhere else draw(ranges(parameter.shard, dp))
        found = parameter.sharded(held)
        held_by.append(parameter)
        sharded += found
        of += [number] * len(found)
    plan = planned(sharded, tp, dp, chunk)
    return Grid(tuple(held_by), tuple(sharded), tuple(of), plan, chunk)


def planned(sharded: Sequence[Sharded], tp: int, dp: int, chunk: int) -> Plan:
    """The plan with chunks of another size, so that few elements make several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "CHUNK_ELEMENTS", chunk)
        return make_plan(sharded, tp, dp, work)


def work(matrix: LogicalMatrix) -> float:
    m, n = matrix.shape
    return float(m * n * min(m, n))
