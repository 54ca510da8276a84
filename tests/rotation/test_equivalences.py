"""docs/equivalences.md: the flags of each named method against that method's definition.

Definitions are written out here in numpy float64, from the table and not from the package.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_aro.config import AROConfig, flag, settings
from megatron_aro.optimizer import ARO

ROWS = {
    name: words
    for name, words in re.findall(
        r"^\| ([^|]+) \| `(--aro[^`]+)` \|",
        (Path(__file__).parents[2] / "docs" / "equivalences.md").read_text(),
        re.MULTILINE,
    )
}
LR, BETA, BETA2 = 1e-2, 0.95, 0.95
Direction = Callable[[Iterator[np.ndarray]], Iterator[np.ndarray]]


def named(name: str) -> dict[str, str]:
    """Arguments of ARO from a row's flags; an unknown flag or value fails."""
    words = ROWS[name].split()
    known = {flag(f.name): f.name for f in settings()}
    given = {known[key]: value for key, value in zip(words[::2], words[1::2], strict=True)}
    AROConfig(**given)  # type: ignore[arg-type]
    return given


def gradients(shape: tuple[int, int], count: int, drift: float = 1.0) -> list[np.ndarray]:
    """`drift` 1 draws each anew; 0 repeats the first."""
    generator = np.random.default_rng(0)
    first = generator.standard_normal(shape)
    return [first + drift * generator.standard_normal(shape) for _ in range(count)]


def momenta(of: list[np.ndarray]) -> Iterator[np.ndarray]:
    m = np.zeros_like(of[0])
    for g in of:
        m = BETA * m + (1 - BETA) * g
        yield m


def updates(of: list[np.ndarray], name: str, **more: int) -> list[np.ndarray]:
    """What ARO with a row's flags takes off the weights in each step, over lr."""
    w = torch.nn.Parameter(torch.zeros(of[0].shape, dtype=torch.float64))
    optimizer = ARO([w], lr=LR, momentum=BETA, weight_decay=0.0, **named(name), **more)  # type: ignore[arg-type]
    found = []
    for g in of:
        before, w.grad = w.detach().clone(), torch.from_numpy(g)
        optimizer.step()
        found.append(((before - w.detach()) / LR).numpy())
    return found


def scaled(d: np.ndarray) -> np.ndarray:
    return 0.2 * np.sqrt(d.size) * d / np.linalg.norm(d)


def polar(m: np.ndarray) -> np.ndarray:
    u, _, vt = np.linalg.svd(m, full_matrices=False)
    return u @ vt


def signum(of: list[np.ndarray]) -> Iterator[np.ndarray]:
    return (np.sign(m) for m in momenta(of))


def rows(of: list[np.ndarray]) -> Iterator[np.ndarray]:
    return (m / np.linalg.norm(m, axis=1, keepdims=True) for m in momenta(of))


def adam(of: list[np.ndarray]) -> Iterator[np.ndarray]:
    v = np.zeros_like(of[0])
    for m in momenta(of):
        v = BETA2 * v + (1 - BETA2) * m * m
        yield m / (np.sqrt(v) + 1e-8)


def soap(of: list[np.ndarray]) -> Iterator[np.ndarray]:
    k = min(of[0].shape)
    r, v = np.eye(len(of[0]))[:, :k], np.zeros((k, of[0].shape[1]))
    for m in momenta(of):
        r = np.linalg.qr(m @ m.T @ r)[0]
        x = r.T @ m
        v = BETA2 * v + (1 - BETA2) * x * x
        yield r @ (x / (np.sqrt(v) + 1e-8))


def eigen_rows(of: list[np.ndarray]) -> Iterator[np.ndarray]:
    r = np.eye(len(of[0]))[:, : min(of[0].shape)]
    for m in momenta(of):
        r = np.linalg.qr(m @ m.T @ r)[0]
        x = r.T @ m
        yield r @ (x / np.linalg.norm(x, axis=1, keepdims=True))


EXACT = {
    "one-sided SOAP of the momentum": soap,
    "Adam of the momentum": adam,
    "Signum (sign descent with momentum)": signum,
    "row-normalised descent": rows,
    "ARO with rownorm": eigen_rows,
    "Muon": eigen_rows,
    "one-sided Shampoo of the momentum": eigen_rows,
}
LIMITS = {"Muon", "one-sided Shampoo of the momentum"}
SHAPES = [(6, 15), (9, 9), (14, 6)]


def test_every_row_is_tested() -> None:
    """The table has no method that nothing here defines."""
    assert {*EXACT, *LIMITS, "Sinkhorn-normalised descent"} == ROWS.keys()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", EXACT)
def test_each_step_is_the_definitions(name: str, shape: tuple[int, int]) -> None:
    """Eight steps on changing gradients; 1e-9 is rounding times the condition of M Mᵀ, some 1e3."""
    of = gradients(shape, 8)
    for step, (update, expected) in enumerate(zip(updates(of, name), EXACT[name](of), strict=True)):
        np.testing.assert_allclose(update, scaled(expected), rtol=0, atol=1e-9, err_msg=f"{step}")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", sorted(LIMITS))
def test_the_frame_converges_to_the_singular_vectors(name: str, shape: tuple[int, int]) -> None:
    """While the gradient stays, updates tend to Muon's (and Shampoo's, which are alike).

    A power iteration shrinks what is left by the squared ratio of neighbouring singular values: 0.7
    of them here, so that 60 leave 1e-9. The scale is that of spectral Muon times 0.2.
    """
    m, n = shape
    u, _, vt = np.linalg.svd(gradients(shape, 1)[0], full_matrices=False)
    g = u @ np.diag(0.7 ** np.arange(min(shape))) @ vt
    update = updates([g] * 60, name)[-1]
    muon = 0.2 * np.sqrt(max(m, n)) * polar(g)
    np.testing.assert_allclose(update, muon, rtol=0, atol=1e-8)
    if m <= n:
        values, vectors = np.linalg.eigh(g @ g.T)
        shampoo = vectors @ np.diag(values**-0.5) @ vectors.T @ g
        np.testing.assert_allclose(update, scaled(shampoo), rtol=0, atol=1e-8)


def test_the_frame_follows_a_changing_momentum() -> None:
    """With noise as large as the signal, updates stay near U Vᵀ of each step's momentum.

    A fixed frame, row normalisation alone, is far from it: that is what the comparison is with.
    """
    of = gradients((24, 24), 80)
    m = list(momenta(of))[-1]
    cosine = [
        float(np.vdot(updates(of, name)[-1], scaled(polar(m))) / (0.2**2 * m.size))
        for name in ("Muon", "row-normalised descent")
    ]
    assert cosine[0] > 0.98 > 0.95 > cosine[1], cosine


@pytest.mark.parametrize("shape", SHAPES)
def test_sinkhorn_tends_to_equal_rows_and_columns(shape: tuple[int, int]) -> None:
    """D1 M D2 is found here by normalising rows and columns in turn until nothing changes.

    5 simultaneous iterations are near it; 200 are it (positive squares: convergence is geometric).
    """
    name = "Sinkhorn-normalised descent"
    (g,) = gradients(shape, 1)
    x = g.copy()
    for _ in range(2000):
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        x /= np.linalg.norm(x, axis=0, keepdims=True)
    (near,), (limit,) = updates([g], name), updates([g], name, sinkhorn_iters=200)
    np.testing.assert_allclose(limit, scaled(x), rtol=0, atol=1e-9)
    assert np.vdot(near, limit) / (np.linalg.norm(near) * np.linalg.norm(limit)) > 0.99
