"""Stacks whose columns lie on several processes, against the step on whole matrices.

Processes are threads here that meet at a barrier for each sum, as ranks do.
"""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch
from aro_cases import PROJECTIONS, QRS, counts_by_rung, make_batch, normal
from test_hardening import HARDSHIPS

from megatron_aro.config import AROConfig
from megatron_aro.rotation import advance_momentum, compute_updates, fast, new_fallback_counts
from megatron_aro.rotation.pieces import Look, Piece, Stack
from megatron_aro.rotation.stacks import covers, look_ahead, turn, updates

ROTATIONS = ["aro", "eigen", "polar", "none"]
FLOAT = torch.float32


class Meeting:
    """Sums and maxima over threads."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size)
        self.given: list[list[torch.Tensor]] = [[] for _ in range(size)]
        self.elements: list[int] = []

    def total(self, rank: int, tensors: list[torch.Tensor], op: str) -> list[torch.Tensor]:
        self.given[rank] = tensors
        self.barrier.wait()
        of_all = [torch.stack(each) for each in zip(*self.given, strict=True)]
        if rank == 0:
            self.elements.append(sum(tensor.numel() for tensor in tensors))
        self.barrier.wait()
        return [x.sum(dim=0) if op == "sum" else x.amax(dim=0) for x in of_all]


class Process:
    """One rank's part of the stacks of several momenta [m, n], cut at the same share of columns."""

    def __init__(self, rank: int, momenta: list[torch.Tensor], cut: list[tuple[int, int]], aro):
        self.rank, self.aro, self.stacks = rank, aro, []
        for m_mn, (start, stop) in zip(momenta, cut, strict=True):
            m, n = m_mn.shape
            rotation = torch.eye(m, min(m, n), dtype=m_mn.dtype, device=m_mn.device)
            pieces = []
            if stop > start:
                moment = None
                if aro.projection == "adam":
                    k = m if aro.rotation == "none" else min(m, n)
                    moment = m_mn.new_zeros(k, stop - start)
                pieces = [Piece(m_mn[:, start:stop], 0, start, moment)]
            self.stacks.append(Stack(rotation, (n,), pieces))


def run(momenta_by_step, cuts, aro: AROConfig):
    """Updates, rotations and counts after each step, and the elements of each sum."""
    ranks = len(cuts[0])
    meeting = Meeting(ranks)
    counts = new_fallback_counts(len(momenta_by_step[0]), momenta_by_step[0][0].device)
    looks: list[list[Look]] = [[] for _ in range(ranks)]
    processes = [
        Process(r, momenta_by_step[0], [cut[r] for cut in cuts], aro) for r in range(ranks)
    ]

    def of_rank(process: Process):
        results = []
        for momenta in momenta_by_step:
            for stack, m_mn in zip(process.stacks, momenta, strict=True):
                for piece in stack.pieces:
                    stop = piece.column + piece.momentum.shape[1]
                    piece.momentum = m_mn[:, piece.column : stop]

            def total(tensors, op):
                return meeting.total(process.rank, tensors, op)

            own = look_ahead(process.stacks, aro, total)
            looks[process.rank] = own
            targets = total([look.target for look in own], "sum")
            if aro.rotation != "none":
                for i, (stack, look) in enumerate(zip(process.stacks, own, strict=True)):
                    look.target = targets[i]
                    rotation = stack.rotation.clone()[None]
                    of_stack = counts[i : i + 1]
                    if process.rank:
                        of_stack = torch.zeros_like(of_stack)
                    turn(rotation, [look], of_stack, aro)
                    stack.rotation = rotation[0]
            results.append(updates(process.stacks, own, aro, total))
        return results

    with ThreadPoolExecutor(ranks) as pool:
        by_rank = list(pool.map(of_rank, processes))
    steps = [
        [
            torch.cat([part for rank in by_rank for part in rank[step][i]], dim=1)
            for i in range(len(momenta_by_step[0]))
        ]
        for step in range(len(momenta_by_step))
    ]
    return steps, [stack.rotation for stack in processes[0].stacks], counts, meeting


def momenta_of(
    shapes, dtype, steps: int = 4, hardship=None, victims=(1,), device: str = "cpu"
) -> list[list[torch.Tensor]]:
    """Of gradients of noise; what becomes of the victims' is the hardship."""
    found = []
    momenta = [torch.zeros(*shape, dtype=dtype, device=device) for shape in shapes]
    for step in range(steps):
        gradients = [
            normal(*s, seed=step * 10 + i, dtype=dtype).to(device) for i, s in enumerate(shapes)
        ]
        if hardship is not None:
            for i in victims:
                gradients[i] = hardship(gradients[i], step)
        advance_momentum(momenta, gradients, 0.95)
        found.append([momentum.clone() for momentum in momenta])
    return found


def whole(momenta_by_step, aro: AROConfig):
    batches = [make_batch(m[None].clone(), aro) for m in momenta_by_step[0]]
    steps = []
    for momenta in momenta_by_step:
        for batch, m_mn in zip(batches, momenta, strict=True):
            batch.momentum = m_mn[None]
        steps.append([update[0] for update in compute_updates(batches, aro)])
    return steps, batches


def cuts_of(shapes, ranks: int = 3):
    """Of each shape's columns for each rank, uneven; the last stack is the last rank's alone."""
    cuts = []
    for number, (_, n) in enumerate(shapes):
        bounds = [0, n // 4, n // 4 + n // 2, n] if number < len(shapes) - 1 else [0, 0, 0, n]
        cuts.append(list(itertools.pairwise(bounds))[:ranks])
    return cuts


SHAPES = [(9, 40), (12, 12), (33, 7), (9, 9)]


@pytest.mark.parametrize("qr", QRS)
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_pieces_are_stepped_as_the_whole(projection: str, rotation: str, qr: str) -> None:
    """Updates over four steps, wide, square and thin, in float64: reassociation alone, 1e-8.

    That is rounding times A's condition, of which CPUs make less than 1e-9 or 2e-9.
    Sign is for wide ones: of others its A is singular, and rounding decides what that leaves open.
    """
    aro = AROConfig(projection=projection, rotation=rotation, qr=qr)
    shapes = SHAPES if projection != "sign" else [(9, 40), (12, 50)]
    momenta = momenta_of(shapes, torch.float64)
    expected, batches = whole(momenta, aro)
    steps, rotations, counts, _ = run(momenta, cuts_of(shapes), aro)
    for ours, theirs in zip(steps, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a - b).abs().max() < 1e-8
    for rotation_mk, batch in zip(rotations, batches, strict=True):
        if rotation != "none":
            assert (rotation_mk - batch.rotation[0]).abs().max() < 1e-8
    assert counts[:, 1:].sum() == sum(batch.fallbacks[:, 1:].sum() for batch in batches)


@pytest.mark.parametrize(
    ("projection", "rotation"), [("sinkhorn", "aro"), ("rownorm", "aro"), ("sinkhorn", "eigen")]
)
@pytest.mark.parametrize("precision", ["fp32", "fp16x3"])
def test_square_stacks_turn_within_the_frame_in_float32(
    projection: str, rotation: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that fall to 1e-4, where scqr2 of A fails: as float64 has it, to 1 - cos of 1e-5.

    In halves as on a GPU, by the twins of its kernels: S has float16's 11 bits there.
    """
    aro = AROConfig(precision=precision, projection=projection, rotation=rotation)
    monkeypatch.setattr(fast, "covers", lambda config, x: config.in_halves and x.dtype == FLOAT)
    rows = torch.logspace(0, -4, 24, dtype=torch.float64)[:, None]
    momenta = [[rows * m for m in of_step] for of_step in momenta_of([(24, 96)], torch.float64)]
    expected, _ = whole(momenta, aro)
    steps, rotations, counts, _ = run(
        [[m.float() for m in of_step] for of_step in momenta], cuts_of([(24, 96), (1, 1)])[:1], aro
    )
    for ours, theirs in zip(steps, expected, strict=True):
        cosine = torch.cosine_similarity(ours[0].double().flatten(), theirs[0].flatten(), dim=0)
        assert 1 - cosine < 1e-5
    assert (rotations[0].mT @ rotations[0] - torch.eye(24)).abs().max() < 1e-5
    assert counts[0].tolist() == [4, 0, 0, 0]


def test_sums_are_few_and_short() -> None:
    """Their number does not grow with the stacks, and no sum has the length of the columns."""
    aro = AROConfig()
    lengths = []
    for count in (1, 4):
        shapes = [(8, 1000)] * count
        _, _, _, meeting = run(
            momenta_of(shapes, torch.float32, 1), cuts_of([*shapes, (1, 3)])[:-1], aro
        )
        lengths.append(meeting.elements)
    one, four = lengths
    # Largest, rows, sinkhorn, the target, rows, sinkhorn, norms.
    assert len(one) == len(four) == 1 + 1 + 5 + 1 + 1 + 5 + 1
    assert max(one) == 8 * 8 and four == [4 * n for n in one]


@pytest.mark.parametrize("halved", [False, True])
@pytest.mark.parametrize("projection", ["sinkhorn", "rownorm"])
@pytest.mark.parametrize("rms", [0.2, 50.0])
def test_each_member_has_its_own_rms(
    halved: bool, projection: str, rms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two matrices side by side, one 1e6 times the other: both updates have the RMS asked for."""
    dtype = torch.float64
    if halved:
        dtype = torch.float32
        monkeypatch.setattr(fast, "covers", lambda config, x: config.in_halves)
    m_mn = normal(6, 30, dtype=dtype)
    m_mn[:, 10:] *= 1e-6
    aro = AROConfig(projection=projection, update_rms=rms)
    pieces = [Piece(m_mn[:, :10], 0, 0), Piece(m_mn[:, 10:], 1, 10)]
    stack = Stack(torch.eye(6, dtype=dtype), (10, 20), pieces)
    looks = look_ahead([stack], aro, lambda tensors, op: tensors)
    rotation = stack.rotation[None].clone()
    turn(rotation, looks, new_fallback_counts(1, "cpu"), aro)
    stack.rotation = rotation[0]
    (parts,) = updates([stack], looks, aro, lambda tensors, op: tensors)
    for part in parts:
        assert part.square().mean().sqrt() == pytest.approx(rms, rel=1e-3 if halved else 1e-6)


@pytest.mark.parametrize("rotation", ["aro", "eigen"])
def test_thin_stacks_in_halves_have_their_size(
    rotation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though their R is orthonormal to 1e-2 only; beside a wide one, which is stepped otherwise."""
    monkeypatch.setattr(fast, "covers", lambda config, x: config.in_halves)
    momenta = [normal(20, 10, seed=i) * 10 ** -normal(10, seed=i).abs() for i in range(9, 40)]
    momenta[1:1] = [normal(12, 40)]
    cuts = [[(0, n // 3), (n // 3, n)] for n in (m.shape[1] for m in momenta)]
    (updates_of_all,), *_ = run([[m.float() for m in momenta]], cuts, AROConfig(rotation=rotation))
    for update in updates_of_all:
        assert update.square().mean().sqrt() == pytest.approx(0.2, rel=1e-3)


def test_quiet_rows_before_loud_ones_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As float64 has it, of one process and of three, which sums otherwise."""
    monkeypatch.setattr(fast, "covers", lambda config, x: config.in_halves and x.dtype == FLOAT)
    for seed, power in itertools.product(range(10), (-3, -4, -4.5)):
        m_mn = normal(8, 32, seed=seed, dtype=torch.float64)
        m_mn[0] *= 10.0**power
        ((expected,),), _ = whole([[m_mn]], AROConfig())
        for cut in ([(0, 32)], [(0, 9), (9, 20), (20, 32)]):
            ((update,),), *_ = run([[m_mn.float()]], [cut], AROConfig())
            cosine = torch.cosine_similarity(update.double().flatten(), expected.flatten(), dim=0)
            assert 1 - cosine < 1e-4


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("value", [0.0, 1e-40, float("nan"), float("inf")])
def test_a_stack_in_hardship_leaves_the_others_alone(projection: str, value: float) -> None:
    """Its rotation and second moment stay, its update is zero; the others' are theirs alone."""
    aro = AROConfig(projection=projection)
    shapes = [(8, 24), (8, 24), (8, 24)]
    momenta = momenta_of(shapes, torch.float32, 2)
    cuts = cuts_of(shapes)
    alone, _, _, _ = run([[of_step[0]] for of_step in momenta], cuts[:1], aro)
    for of_step in momenta:
        of_step[1] = torch.full_like(of_step[1], 0.0 if value == value and value < 1 else 1.0)
        of_step[1][3, -1] = value
    steps, rotations, _, _ = run(momenta, cuts, aro)
    for ours, theirs in zip(steps, alone, strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert not ours[1].any() and all(update.isfinite().all() for update in ours)
    assert torch.equal(rotations[1], torch.eye(8))


# Wide, of one row, of one column, thin and square, between two that are healthy.
VICTIMS = {1: (8, 24), 2: (1, 9), 3: (9, 1), 4: (10, 6), 5: (7, 7)}
BESIDE = [(8, 24), *VICTIMS.values(), (8, 24)]


@cache
def beside(hardship, projection: str, rotation: str, device: str):
    """Updates and rotations of stacks of which some are in hardship.

    Over three processes on the CPU, in one on CUDA: its precision of products is one setting for
    all threads, which a step changes for a moment.
    """
    momenta = momenta_of(BESIDE, torch.float32, 5, hardship, VICTIMS, device)
    cuts = cuts_of(BESIDE) if device == "cpu" else [[(0, n)] for _, n in BESIDE]
    steps, rotations, *_ = run(momenta, cuts, AROConfig(projection=projection, rotation=rotation))
    return steps, rotations


@pytest.mark.parametrize("hardship", HARDSHIPS.values(), ids=HARDSHIPS.keys())
def test_stacks_endure_what_matrices_do(device: str, hardship) -> None:
    """Rank one, equal rows, condition 1e12, 1e38, fading rows and columns, and so on: all finite,
    and not a bit of the other stacks' updates moves."""
    for projection, rotation in itertools.product(PROJECTIONS, ROTATIONS):
        healthy, _ = beside(None, projection, rotation, device)
        hard, rotations = beside(hardship, projection, rotation, device)
        for expected, found in zip(healthy, hard, strict=True):
            assert all(update.isfinite().all() for update in found), (projection, rotation)
            assert torch.equal(found[0], expected[0]) and torch.equal(found[-1], expected[-1])
        assert all(rotation_mk.isfinite().all() for rotation_mk in rotations)


def test_stacks_in_halves_endure_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where a GPU takes halves, by the twins of its kernels."""
    monkeypatch.setattr(fast, "covers", lambda config, x: config.in_halves)
    healthy, _ = beside.__wrapped__(None, "sinkhorn", "aro", "cpu")
    for hardship in HARDSHIPS.values():
        hard, rotations = beside.__wrapped__(hardship, "sinkhorn", "aro", "cpu")
        for expected, found in zip(healthy, hard, strict=True):
            assert all(update.isfinite().all() for update in found)
            assert torch.equal(found[0], expected[0]) and torch.equal(found[-1], expected[-1])
        for r in rotations:
            assert (r.mT @ r - torch.eye(r.shape[1])).abs().max() < 1e-2


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_a_member_without_tokens_for_long(projection: str) -> None:
    """An expert whose momentum only shrinks: its updates keep their size until its columns count
    as zero beside the other member's, then it rests, and tokens bring it back to full size."""
    aro = AROConfig(projection=projection)
    m_mn = torch.zeros(6, 16)
    moment = torch.zeros(6, 16) if projection == "adam" else None
    columns = slice(0, 10), slice(10, 16)
    pieces = [
        Piece(m_mn[:, own], i, own.start, moment[:, own] if moment is not None else None)
        for i, own in enumerate(columns)
    ]
    stack = Stack(torch.eye(6), (10, 6), pieces)
    sizes = []
    for step in range(510):
        gradient = normal(6, 16, seed=step)
        gradient[:, columns[1]] *= step < 5 or step >= 500
        advance_momentum([m_mn], [gradient], 0.8)
        looks = look_ahead([stack], aro, lambda tensors, op: tensors)
        turn(stack.rotation[None], looks, new_fallback_counts(1, "cpu"), aro)
        (parts,) = updates([stack], looks, aro, lambda tensors, op: tensors)
        assert all(part.isfinite().all() for part in parts)
        sizes.append([part.square().mean().sqrt().item() for part in parts])
    assert all(of[0] == pytest.approx(0.2, rel=1e-5) for of in sizes)
    found = [of[1] for of in sizes]
    assert found[:30] + found[500:] == pytest.approx([0.2] * 40, rel=1e-5)
    assert not any(found[400:500])


def test_a_singular_stack_climbs_the_ladder() -> None:
    """Rank one under sign: counted as the whole is, and orthonormal all the same."""
    aro = AROConfig(projection="sign")
    ones = [[torch.ones(16, 40)]]
    _, batches = whole(ones, aro)
    _, rotations, counts, _ = run(ones, cuts_of([(16, 40), (1, 1)])[:1], aro)
    assert counts_by_rung(batches)["householder"] == counts[0, 2] == 1
    assert (rotations[0].mT @ rotations[0] - torch.eye(16)).abs().max() < 1e-5


def test_rgd_is_not_for_stacks() -> None:
    assert [r for r in (*ROTATIONS, "rgd") if not covers(AROConfig(rotation=r))] == ["rgd"]
