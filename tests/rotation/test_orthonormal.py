"""Orthonormalisation: what each kind gives, and the ladder that failed elements climb."""

import numpy as np
import pytest
import torch
from aro_cases import counts_by_rung, make_batch

from megatron_aro.config import AROConfig
from megatron_aro.rotation import MatrixBatch, compute_updates, in_frame, initial_rotation
from megatron_aro.rotation.orthonormal import extra_pass, first_attempt, householder
from megatron_aro.rotation.policies import polar_factor

SHAPES = [(1, 1), (5, 1), (8, 8), (33, 7)]


def with_singular_values(values: torch.Tensor, m: int, b: int, dtype, seed: int = 0):
    """Random matrices [b, m, k] with these k singular values."""
    generator = torch.Generator().manual_seed(seed)
    k = len(values)
    u = torch.linalg.qr(torch.randn(b, m, k, dtype=torch.float64, generator=generator)).Q
    v = torch.linalg.qr(torch.randn(b, k, k, dtype=torch.float64, generator=generator)).Q
    return (u * values.double() @ v.mT).to(dtype)


def error(q: torch.Tensor) -> float:
    """max |Q^T Q - I|, in float64."""
    q = q.double()
    return (q.mT @ q - torch.eye(q.shape[2], dtype=q.dtype)).abs().max().item()


@pytest.mark.parametrize("m, k", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_everyday(m, k, dtype):
    """Well-conditioned A: Q is orthonormal and A = Q T with T upper triangular.

    float64 scqr2 carries its own second shift, 1e-7 relative, and scqr k times that; in float32
    rounding has the same size. Householder has rounding only.
    """
    a = with_singular_values(torch.linspace(1, 3, k), m, 4, dtype)
    rounding = 20 * k * torch.finfo(dtype).eps
    for qr, tolerance in ("qr", 0.0), ("scqr2", 2e-7), ("scqr", 1e-6 * k):
        q, failed = first_attempt(a, AROConfig(qr=qr))
        assert not failed.any() and error(q) <= tolerance + rounding
        below = torch.tril(q.mT @ a, diagonal=-1)
        assert below.abs().max() <= 3 * (tolerance + rounding)


def test_scqr2_repairs_scqr():
    """Singular values i^-1, float32: one pass is far from orthonormal, the second is at rounding.

    This is why scqr2 is the default (spec: 0.9 and 7e-6 at size 4096).
    """
    a = with_singular_values(torch.arange(1, 129) ** -1.0, 128, 2, torch.float32)
    assert error(first_attempt(a, AROConfig(qr="scqr")).q_bmk) > 1e-3
    assert error(first_attempt(a, AROConfig(qr="scqr2")).q_bmk) < 2e-6


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scale(scale):
    """A's scale makes no difference: 1e30 squared is beyond float32."""
    a = with_singular_values(torch.linspace(1, 3, 6), 9, 2, torch.float32)
    q, failed = first_attempt(a * scale, AROConfig())
    # The scaled A is rounded anew, which moves Q by the unit round-off times the condition.
    torch.testing.assert_close(q, first_attempt(a, AROConfig()).q_bmk, rtol=0, atol=2e-6)
    assert not failed.any()


# Singular values whose scqr2 (float32, k = 16) ends on each rung; found by trial.
EVERYDAY = torch.linspace(1, 3, 16)
EXTRA_PASS = (torch.arange(16) < 8) + 1e-6
HOUSEHOLDER = (torch.arange(16) < 3) + 1e-11


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_rung(dtype):
    """Moderately singular A is saved by the extra pass, a singular one by Householder."""
    config = AROConfig()
    for values, rescued in ((EXTRA_PASS, True), (HOUSEHOLDER.where(HOUSEHOLDER > 1, 0), False)):
        a = with_singular_values(values, 24, 5, torch.float64).to(dtype)
        if not rescued:
            a[:, :, -1] = 0
        assert first_attempt(a, config).failed_b.all()
        result = extra_pass(a, config)
        if rescued or dtype == torch.float64:
            # In float32 the rounding of a singular A can be as good as a direction.
            assert result.failed_b.tolist() == [not rescued] * 5
        q = result.q_bmk.where(~result.failed_b[:, None, None], householder(a).q_bmk)
        assert error(q) < 1e-2


def test_failed_first_pass_goes_to_householder():
    """A shift below the rounding of the Gram matrix: Cholesky fails, Householder answers."""
    a = with_singular_values(HOUSEHOLDER, 24, 6, torch.float32)
    for qr in "scqr", "scqr2":
        config = AROConfig(qr=qr, scqr_eps=1e-12)
        assert first_attempt(a, config).failed_b.all()
        assert extra_pass(a, config).failed_b.all()
        assert not householder(a).failed_b.any()


def test_not_finite():
    """What is not finite even by Householder is reported, never raised, and stays alone."""
    a = with_singular_values(EVERYDAY, 24, 3, torch.float32)
    a[1, 3, 3] = float("nan")
    for qr in "qr", "scqr", "scqr2":
        assert first_attempt(a, AROConfig(qr=qr)).failed_b.tolist() == [False, True, False]
    assert extra_pass(a, AROConfig()).failed_b.tolist() == [False, True, False]
    assert householder(a).failed_b.tolist() == [False, True, False]


def counts_of(batches: list[MatrixBatch], config: AROConfig) -> tuple[list, dict[str, int]]:
    updates = compute_updates(batches, config)
    return updates, counts_by_rung(batches)


def test_only_the_bad_element_climbs(monkeypatch):
    """One bad momentum in one of two batches: the rest has the bits of a run without it.

    eigen from the identity makes A = M M_k^T with k the square part: M's own singular values.
    (Turned from within the frame it would not climb.)
    """
    monkeypatch.setattr(in_frame, "covers", lambda config, rotation: False)
    config = AROConfig(rotation="eigen")
    good = with_singular_values(EVERYDAY, 16, 4, torch.float32)
    other = with_singular_values(torch.linspace(1, 2, 5), 9, 3, torch.float32, seed=1)
    for values, rung in ((EXTRA_PASS.sqrt(), "extra_pass"), (HOUSEHOLDER, "householder")):
        bad = good.clone()
        bad[2] = with_singular_values(values, 16, 1, torch.float32)[0]
        if rung == "householder":
            bad[2, 1:] = 0  # rank one, exactly
        runs = [[make_batch(y.clone(), config) for y in (x, other)] for x in (good, bad)]
        (expected, everyday), (updates, counts) = (counts_of(run, config) for run in runs)
        assert everyday == {"factorizations": 7, "extra_pass": 0, "householder": 0, "kept": 0}
        assert counts == {**everyday, rung: 1}
        rest = torch.tensor([0, 1, 3])
        for got, wanted in (
            (updates[0][rest], expected[0][rest]),
            (updates[1], expected[1]),
            (runs[1][0].rotation[rest], runs[0][0].rotation[rest]),
            (runs[1][1].rotation, runs[0][1].rotation),
        ):
            assert torch.equal(got, wanted)
        assert error(runs[1][0].rotation[2:3]) < 1e-2 and updates[0][2].isfinite().all()


def test_kept():
    """A second moment that is not finite leaves nothing to orthonormalise: R stays, counted."""
    config = AROConfig(projection="adam")
    batch = make_batch(with_singular_values(EVERYDAY, 16, 3, torch.float32), config)
    batch.second_moment[:] = 1.0
    batch.second_moment[1] = float("nan")
    before = batch.rotation.clone()
    (update,), counts = counts_of([batch], config)
    assert counts["kept"] == counts["householder"] == 1
    assert torch.equal(batch.rotation[1], before[1]) and (update[1] == 0).all()
    assert (update[0] != 0).any() and not torch.equal(batch.rotation[0], before[0])


@pytest.mark.parametrize("m, k", SHAPES)
def test_polar_factor(m, k):
    """The SVD's U V^T in float64; 1e-9 is the rounding of A over its smallest singular value."""
    a = with_singular_values(10.0 ** torch.linspace(0, -5, k), m, 3, torch.float64)
    u, _, vt = torch.linalg.svd(a, full_matrices=False)
    r = initial_rotation(3, m, k, dtype=a.dtype, device="cpu")
    torch.testing.assert_close(polar_factor(a, r), u @ vt, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_polar_factor_of_singular_a(dtype):
    """Rank 3 of 8: orthonormal, U V^T on A's own directions, and R where A is zero.

    1e-3 and 1e-11: the trace of R that closes the open directions, 16 eps, over the smallest
    singular value 1e-2, with a factor for the size.
    """
    tolerance = {torch.float32: 1e-3, torch.float64: 1e-11}[dtype]
    values = torch.tensor([1.0, 0.1, 1e-2, 0, 0, 0, 0, 0])
    a = with_singular_values(values, 12, 4, dtype)
    r = with_singular_values(torch.ones(8), 12, 4, dtype, seed=1)
    q = polar_factor(a, r)
    assert error(q) < tolerance
    u, _, vt = torch.linalg.svd(a.double(), full_matrices=False)
    expected = (u[..., :3] @ vt[:, :3]).to(dtype)
    along = (vt[:, :3].mT @ vt[:, :3]).to(dtype)
    torch.testing.assert_close(q @ along, expected, rtol=0, atol=tolerance)
    assert np.isclose(error(polar_factor(torch.zeros_like(r), r)), 0, atol=tolerance)
    torch.testing.assert_close(polar_factor(torch.zeros_like(r), r), r, rtol=0, atol=tolerance)
