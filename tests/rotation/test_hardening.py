"""Adversarial states beside healthy matrices, on CPU and GPU: nothing turns NaN, nobody else moves.

Each victim is stepped together with other matrices of its shape, of which some are in its batch, by
`megatron_aro.ARO`; the same run with a healthy matrix in its place says what the others do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

import pytest
import torch
from aro_cases import PROJECTIONS, ROTATIONS, normal

from megatron_aro.optimizer import ARO
from megatron_aro.rotation import fast
from megatron_aro.rotation.orthonormal import ORTHONORMAL

STEPS = 6
SHAPES = [(6, 10), (10, 6), (7, 7), (1, 9), (9, 1)]  # also matrices of one row and of one column
VICTIM = 1  # of three in a batch


def rank_one(g: torch.Tensor, step: int) -> torch.Tensor:
    return g[:, :1] @ g[:1]


def ill_conditioned(g: torch.Tensor, step: int) -> torch.Tensor:
    u, s, vt = torch.linalg.svd(g.double().cpu(), full_matrices=False)
    return (u * torch.logspace(0, -12, len(s), dtype=s.dtype) @ vt).to(g)


def mixed(g: torch.Tensor, step: int) -> torch.Tensor:
    """Entries from 1e-38, below the smallest normal number, to 1e38."""
    exponents = torch.linspace(-38, 38, g.numel(), dtype=torch.float64).reshape(g.shape)
    return (g.sign().double().cpu() * 10.0**exponents).to(g)


def graded(size: int) -> torch.Tensor:
    """From 1 to 1e-42: squares of some underflow to denormals, whose reciprocals overflow."""
    return 10.0 ** torch.linspace(0, -42, size, dtype=torch.float64)


# What becomes of a random gradient in the given step.
HARDSHIPS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "always zero": lambda g, step: torch.zeros_like(g),
    "zero at first": lambda g, step: g * (step > 3),
    "zero in between": lambda g, step: g * (step % 3 == 0),
    "rank one": rank_one,
    "equal rows": lambda g, step: g[:1].expand_as(g).clone(),
    "the same again": lambda g, step: torch.ones_like(g),
    "condition 1e12": ill_conditioned,
    "columns fade": lambda g, step: (g.double() * graded(g.shape[1]).to(g.device)).to(g),
    "rows fade": lambda g, step: (g.double().mT * graded(g.shape[0]).to(g.device)).mT.to(g),
    "1e-38": lambda g, step: g.sign() * 1e-38,
    "1e38": lambda g, step: g.sign() * 1e38,
    "1e-38 to 1e38": mixed,
    "1e38, then 1e-38": lambda g, step: g.sign() * (1e38 if step < 4 else 1e-38),
    "NaN": lambda g, step: g.masked_fill(g == g.max(), float("nan")),
}

RESTING = [HARDSHIPS[name] for name in ("always zero", "1e-38")]


@cache
def run(shape: tuple[int, int], device: str, hardship: Callable | None, **settings: str) -> list:
    """Weights and state of three matrices after STEPS steps, one of them under hardship.

    Beside them, of each, the RMS of its last update over that which is asked for, and last how
    many orthonormalisations of all three climbed the ladder.
    """
    weights = [torch.nn.Parameter(normal(*shape, seed=i).to(device)) for i in range(3)]
    optimizer = ARO(weights, 1e-2, **settings)
    for step in range(STEPS):
        for i, w in enumerate(weights):
            w.grad = normal(*shape, seed=10 * step + i + 3).to(device)
        if hardship is not None:
            weights[VICTIM].grad = hardship(weights[VICTIM].grad, step)
        before = [0.999 * w.detach() for w in weights]  # decayed
        optimizer.step()
    sizes = [(w - b).square().mean().sqrt() / 2e-3 for w, b in zip(weights, before, strict=True)]
    matrices = [
        [w.detach(), *optimizer.state[w].values(), s] for w, s in zip(weights, sizes, strict=True)
    ]
    return [*matrices, optimizer.fallbacks["extra_pass"] + optimizer.fallbacks["householder"]]


@cache
def healthy(shape: tuple[int, int], device: str, **settings: str) -> list:
    return run(shape, device, None, **settings)


def check(shape: tuple[int, int], device: str, hardship: Callable, **settings: str) -> list:
    """The three matrices of `run`, of which this holds.

    All state is finite, and the neighbours' is what it is beside a healthy matrix, to the bit.
    On CUDA for as long as none of them climbs the ladder: those who climb do so together, and in
    a batch of two products round otherwise than in a batch of one. Where A is singular, as it
    often is with sign or adam, rounding alone decides what is left open of the new rotation, so
    that no tolerance holds for it: orthonormal, to what the ladder asks for, is all it is then.
    """
    *expected, climbed = healthy(shape, device, **settings)
    hard = run(shape, device, hardship, **settings)
    for i, (_, _, rotation, *_) in enumerate(hard[:-1]):
        assert all(tensor.isfinite().all() for tensor in hard[i]), (settings, i)
        if settings.get("qr") != "scqr":  # whose single pass promises none of this
            gram = rotation.mT @ rotation
            error = (gram - torch.eye(len(gram), device=device)).abs().max()
            assert error <= ORTHONORMAL, (settings, i)
        if i != VICTIM and not (device == "cuda" and climbed):
            same = [torch.equal(a, b) for a, b in zip(expected[i], hard[i], strict=True)]
            assert all(same), (settings, i, same)
    return hard[:-1]


@pytest.mark.parametrize("hardship", HARDSHIPS.values(), ids=HARDSHIPS.keys())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_hardship_stays_finite_and_alone(device: str, hardship: Callable, shape: tuple) -> None:
    """As `check` says, for every projection and rotation.

    Updates have their size, unless there is nothing to go by: a momentum that is zero, or below the
    normal numbers, or a gradient that is NaN (whose matrix rests, decay included).
    """
    for projection, rotation in itertools.product(PROJECTIONS, ROTATIONS):
        settings = {"projection": projection, "rotation": rotation}
        for i, matrix in enumerate(check(shape, device, hardship, **settings)):
            if i != VICTIM or hardship is not HARDSHIPS["NaN"]:
                expected_size = 0.0 if i == VICTIM and hardship in RESTING else 1.0
                assert matrix[-1].item() == pytest.approx(expected_size, abs=1e-3), settings


@pytest.mark.parametrize(
    ("projection", "rotation"),
    [("sinkhorn", "aro"), ("rownorm", "eigen"), ("adam", "polar"), ("sign", "rgd")],
)
@pytest.mark.parametrize("qr", ["qr", "scqr"])
def test_hardship_under_the_other_orthonormalisations(
    device: str, qr: str, projection: str, rotation: str
) -> None:
    """As `check` says, for every projection and every rotation that has one."""
    for hardship, shape in itertools.product(HARDSHIPS.values(), SHAPES):
        check(shape, device, hardship, qr=qr, projection=projection, rotation=rotation)


@pytest.mark.parametrize("precision", ["fp16x3", "fp16"])
@pytest.mark.parametrize("qr", ["scqr2", "scqr"])
@pytest.mark.parametrize(
    ("projection", "rotation"), [("sinkhorn", "aro"), ("rownorm", "aro"), ("adam", "eigen")]
)
def test_hardship_in_halves(
    precision: str, qr: str, projection: str, rotation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step of `rotation.fast`, by the torch twins of its kernels; on GPUs it is the tests' own.

    Updates have their size to the 1e-3 of float16 halves.
    """
    monkeypatch.setattr(fast, "covers", lambda config, momentum: True)
    settings = {"qr": qr, "precision": precision, "projection": projection, "rotation": rotation}
    for hardship, shape in itertools.product(HARDSHIPS.values(), SHAPES):
        hard = check(shape, "cpu", hardship, **settings)
        if hardship is not HARDSHIPS["NaN"]:
            expected = 0.0 if hardship in RESTING else 1.0
            assert hard[VICTIM][-1].item() == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("rotation", ["aro", "eigen"])
def test_sizes_in_halves_where_columns_fade(rotation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates have their size, to 1e-3, of 300 momenta for which Sinkhorn does not converge.

    Next to each other stand there what it brings to scales 1e5 apart.
    """
    monkeypatch.setattr(fast, "covers", lambda config, momentum: True)
    weights = [torch.nn.Parameter(normal(6, 10, seed=i)) for i in range(300)]
    optimizer = ARO(weights, 1e-2, rotation=rotation)
    for step in range(2):
        for i, w in enumerate(weights):
            w.grad = HARDSHIPS["columns fade"](normal(6, 10, seed=600 * step + i + 300), step)
        before = [0.999 * w.detach() for w in weights]
        optimizer.step()
        for w, b in zip(weights, before, strict=True):
            assert (w - b).square().mean().sqrt().item() == pytest.approx(2e-3, rel=1e-3)


@pytest.mark.parametrize("projection", ["sinkhorn", "adam"])
def test_an_expert_without_tokens_for_long(device: str, projection: str) -> None:
    """500 steps of zero gradients, through the denormals, and tokens again.

    Meanwhile its momentum only shrinks, so that updates go on at full size in one direction until
    it counts as zero (here within 400 steps: 0.8^400 = 1e-39); after that weights rest. What comes
    then is stepped at full size again.
    """
    weight = torch.nn.Parameter(normal(5, 8).to(device))
    optimizer = ARO([weight], 1e-3, 0.8, weight_decay=0.0, projection=projection)
    seen = {}
    for step in range(510):
        seen[step] = weight.detach().clone()
        weight.grad = torch.zeros_like(weight)
        if step < 5 or step >= 500:
            weight.grad = normal(5, 8, seed=step + 1).to(device)
        optimizer.step()
    assert torch.equal(seen[400], seen[500])
    for last in (350, 505):
        size = (seen[last] - seen[last - 1]).square().mean().sqrt().item()
        assert size == pytest.approx(1e-3 * 0.2, rel=1e-3)  # float32 weights of size one
    assert all(tensor.isfinite().all() for tensor in (weight, *optimizer.state[weight].values()))


def test_parameters_frozen_midway(device: str) -> None:
    """Without a gradient nothing of them moves, and they go on from where they were."""
    weights = [torch.nn.Parameter(normal(6, 6, seed=i).to(device)) for i in range(2)]
    optimizer = ARO(weights, 1e-2)
    for step in range(9):
        for i, w in enumerate(weights):
            w.grad = normal(6, 6, seed=10 * step + i).to(device)
        if 3 <= step < 6:
            weights[0].requires_grad_(False)
            weights[0].grad = None
        before = [
            weights[0].detach().clone(),
            *map(torch.clone, optimizer.state[weights[0]].values()),
        ]
        optimizer.step()
        now = [weights[0].detach(), *optimizer.state[weights[0]].values()]
        moved = not all(torch.equal(a, b) for a, b in zip(before, now, strict=False))
        assert moved == (not 3 <= step < 6)
        weights[0].requires_grad_(True)
    assert all(w.isfinite().all() for w in weights)


@pytest.mark.parametrize("projection, rotation", list(itertools.product(PROJECTIONS, ROTATIONS)))
def test_learning_rate_zero(device: str, projection: str, rotation: str) -> None:
    """Weights stay to the bit, momentum and rotation go on."""
    weight = torch.nn.Parameter(normal(6, 9).to(device))
    optimizer = ARO([weight], 0.0, projection=projection, rotation=rotation)
    before = weight.detach().clone()
    for seed in range(3):
        weight.grad = normal(6, 9, seed=seed).to(device)
        optimizer.step()
    assert torch.equal(weight, before)
    assert optimizer.state[weight]["exp_avg"].any()
    turned = not torch.equal(optimizer.state[weight]["rotation"], torch.eye(6, device=device))
    assert turned == (rotation != "none")
