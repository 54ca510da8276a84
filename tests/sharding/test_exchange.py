"""The exchange that a plan describes, carried out on lists of integers.

Each rank works out alone, from the plan, what it sends and what it receives. Every element of
every matrix has a number of its own, so that a wrong place shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from cases import Grid, grids
from hypothesis import given, settings

from megatron_aro.sharding.plan import Plan, Position

# (matrix, first element in the part, values)
Message = list[tuple[int, int, list[int]]]
Messages = dict[tuple[Position, Position], Message]


def gathered(plan: Plan, t: int, d: int) -> list[int]:
    """Over all chunks, in their order."""
    return [i for chunk in range(plan.chunks) for i in plan.gathered(t, d, chunk)]


class Ranks:
    """What each rank of a grid holds, and the two hops there and back."""

    def __init__(self, grid: Grid) -> None:
        self.grid, self.plan = grid, grid.plan
        numbers: dict[int, dict[tuple[int, int], int]] = {}
        total = 0
        for index, parameter in enumerate(grid.stored):
            cells = [(r, c) for r in range(parameter.layout.rows) for c in range(parameter.columns)]
            numbers[index] = {cell: total + i for i, cell in enumerate(cells)}
            total += len(cells)
        self.numbers = numbers
        held_of = {self.grid.of[i]: s.held for i, s in enumerate(grid.sharded)}
        # Elements that each rank holds of each parameter, in the order of its flat buffer.
        self.held = {
            (t, d): {
                index: [numbers[index][cell] for cell in parameter.stored(t)][slice(*held[d])]
                for index, parameter in enumerate(grid.stored)
                for held in [held_of[index]]
            }
            for t, d in grid.positions
        }

    def matrix(self, i: int) -> list[list[int]]:
        """The whole matrix as it must arrive at its owner."""
        matrix, numbers = self.grid.sharded[i].matrix, self.numbers[self.grid.of[i]]
        rows = [row for start, stop in matrix.intervals for row in range(start, stop)]
        return [[numbers[row, column] for column in range(matrix.columns)] for row in rows]

    def mine(self, i: int, t: int, d: int) -> Message:
        """What a rank holds of its part of matrix i."""
        held = self.held[t, d][self.grid.of[i]]
        segments = self.grid.sharded[i].segments(t, d)
        return [(i, first, held[at : at + length]) for first, at, length in segments]

    def sent_over_data(self, t: int, d: int) -> dict[Position, Message]:
        """First hop, by the sender: its pieces of what other ranks of its row step."""
        if self.plan.replicates:
            return {}
        return {
            (t, to): [piece for i in gathered(self.plan, t, to) for piece in self.mine(i, t, d)]
            for to in range(self.plan.dp)
            if to != d
        }

    def expected_over_data(self, t: int, d: int) -> dict[Position, list[tuple[int, int, int]]]:
        """First hop, by the receiver: (matrix, first element, length) by sender."""
        if self.plan.replicates:
            return {}
        return {
            (t, sender): [
                (i, first, length)
                for i in gathered(self.plan, t, d)
                for first, _, length in self.grid.sharded[i].segments(t, sender)
            ]
            for sender in range(self.plan.dp)
            if sender != d
        }

    def gather(self) -> tuple[Messages, Messages, dict[int, list[list[int]]]]:
        """Both hops: messages over data and over tensor parallelism, and the owners' matrices."""
        over_data: Messages = {
            (sender, to): message
            for sender in self.grid.positions
            for to, message in self.sent_over_data(*sender).items()
        }
        met: dict[tuple[Position, int], list[int | None]] = {}
        for t, d in self.grid.positions:
            for i in gathered(self.plan, t, d):
                part: list[int | None] = [None] * self.grid.sharded[i].parts[t].numel
                received = [over_data.get(((t, s), (t, d)), []) for s in range(self.plan.dp)]
                pieces = [p for message in received for p in message if p[0] == i]
                for _, first, values in [*pieces, *self.mine(i, t, d)]:
                    part[first : first + len(values)] = values
                met[(t, d), i] = part
        over_tensor: Messages = {}
        whole = {}
        for i, (owner, s) in enumerate(zip(self.plan.owners, self.grid.sharded, strict=True)):
            sources = [owner[0]] if s.replicated else range(self.plan.tp)
            rows: list[list] = [[None] * s.matrix.columns for _ in range(s.matrix.rows)]
            for t in sources:
                part = met.pop(((t, owner[1]), i))
                if t != owner[0]:
                    over_tensor.setdefault(((t, owner[1]), owner), []).append((i, 0, part))
                left, right = s.parts[t].columns
                for number, row in enumerate(range(*s.parts[t].rows)):
                    cut = part[number * (right - left) : (number + 1) * (right - left)]
                    rows[row][left:right] = cut
            whole[i] = rows
        assert not met, "a part was gathered that no owner steps"
        return over_data, over_tensor, whole

    def scatter(self, whole: dict[int, list[list[int]]]) -> dict[Position, dict[int, list]]:
        """Owners' matrices back to everybody who holds some of them, by the same two hops."""
        back: dict[Position, dict[int, list]] = {
            position: {i: [None] * len(held) for i, held in of.items()}
            for position, of in self.held.items()
        }
        for d in range(self.plan.dp):
            for i in (i for c in range(self.plan.chunks) for i in self.plan.returned(d, c)):
                s = self.grid.sharded[i]
                for t, part in enumerate(s.parts):
                    rows = whole[i][slice(*part.rows)]
                    flat = [value for row in rows for value in row[slice(*part.columns)]]
                    for to in range(self.plan.dp):
                        for first, at, length in s.segments(t, to):
                            target = back[t, to][self.grid.of[i]]
                            assert target[at : at + length] == [None] * length
                            target[at : at + length] = flat[first : first + length]
        return back


@settings(derandomize=True, max_examples=300, deadline=None)
@given(grids())
def test_gathering_makes_whole_matrices_and_scattering_undoes_it(grid: Grid) -> None:
    """Owners see each element at its place; with the update returned everybody has its own."""
    ranks = Ranks(grid)
    _, _, whole = ranks.gather()
    assert whole == {i: ranks.matrix(i) for i in range(len(grid.sharded))}
    assert ranks.scatter(whole) == ranks.held


@settings(derandomize=True, max_examples=200, deadline=None)
@given(grids())
def test_send_and_receive_lists_mirror(grid: Grid) -> None:
    """What a receiver expects of a sender is what that sends, in the same order."""
    ranks = Ranks(grid)
    for position in grid.positions:
        for sender, expected in ranks.expected_over_data(*position).items():
            message = ranks.sent_over_data(*sender)[position]
            assert [(i, first, len(values)) for i, first, values in message] == expected


@settings(derandomize=True, max_examples=200, deadline=None)
@given(grids())
def test_each_element_that_is_sent_has_one_receiver(grid: Grid) -> None:
    """No element travels twice in a hop, and none over data parallelism that its owner has."""
    ranks = Ranks(grid)
    over_data, over_tensor, _ = ranks.gather()
    for messages, name in ((over_data, "data"), (over_tensor, "tensor")):
        sent = Counter(v for message in messages.values() for _, _, vs in message for v in vs)
        assert set(sent.values()) <= {1}, name
    for (_, receiver), message in over_data.items():
        for i, _, values in message:
            own = [v for _, _, vs in ranks.mine(i, *receiver) for v in vs]
            assert not set(values).intersection(own)


def whole_in_one_range(grid: Grid) -> Callable[[int], bool]:
    holders = [s.holders for s in grid.sharded]
    return lambda i: [last - first for first, last, _ in holders[i]] == [1]


@settings(derandomize=True, max_examples=200, deadline=None)
@given(grids())
def test_a_matrix_in_one_range_moves_nothing_over_data_parallelism(grid: Grid) -> None:
    """Only what a range boundary cuts travels; with replicas nothing does."""
    over_data, _, _ = Ranks(grid).gather()
    moved = {i for message in over_data.values() for i, _, values in message if values}
    is_whole = whole_in_one_range(grid)
    assert not any(is_whole(i) for i in moved)
    if grid.plan.replicates:
        assert not moved
    if grid.plan.cuts:
        assert moved
