"""Identities of the spec, through ARO or compute_updates."""

import numpy as np
import pytest
import torch
from aro_cases import PROJECTIONS, ROTATIONS

from megatron_aro.config import AROConfig
from megatron_aro.optimizer import ARO
from megatron_aro.rotation import (
    MatrixBatch,
    compute_updates,
    initial_rotation,
    new_fallback_counts,
    second_moment_shape,
)
from megatron_aro.rotation.projections import sinkhorn

TURNING = [rotation for rotation in ROTATIONS if rotation != "none"]
SHAPES = [(6, 15), (9, 9), (14, 6)]


# sign(X) of square and tall matrices is often singular; trailing columns of R are then arbitrary.
CASES = [(p, s) for p in PROJECTIONS for s in SHAPES if p != "sign" or s[0] < s[1]]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def train(w0: torch.Tensor, gradients: torch.Tensor, **settings) -> torch.Tensor:
    """The weights after all gradients."""
    w = torch.nn.Parameter(w0.clone())
    optimizer = ARO([w], lr=1e-2, **settings)
    for g in gradients:
        w.grad = g.clone()
        optimizer.step()
    return w.detach()


def one_step(momentum: torch.Tensor, r: torch.Tensor, **settings):
    """U and the new R of one call."""
    config = AROConfig(**settings)
    moment = second_moment_shape(config, *momentum.shape[1:])
    second = momentum.new_ones(len(momentum), *moment) * 0.1 if moment else None
    batch = MatrixBatch(momentum, r.clone(), new_fallback_counts(len(momentum), "cpu"), second)
    (update,) = compute_updates([batch], config)
    return update, batch.rotation


@pytest.mark.parametrize("shape", SHAPES)
def test_rownorm_aro_is_eigen(shape):
    """With rownorm, A of aro is A of eigen with its columns scaled: the same Q by exact QR."""
    w0, gradients = random(*shape), random(5, *shape, seed=1)
    aro, eigen = (
        train(w0, gradients, projection="rownorm", qr="qr", rotation=rotation)
        for rotation in ("aro", "eigen")
    )
    # Rounding times the condition number of A, some 1e3, over five steps.
    torch.testing.assert_close(aro, eigen, rtol=0, atol=1e-11)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("qr", ["qr", "scqr2"])
def test_converged_eigen_rownorm_orthogonalises(shape, qr):
    """With one gradient over and over, R converges to the left singular vectors and D to U V^T.

    Neighbouring singular values differ by 0.7, so 60 power iterations leave 0.7^120 = 1e-19; for
    scqr2 its own second shift, 1e-7, remains.
    """
    u, _, vt = np.linalg.svd(random(*shape).numpy(), full_matrices=False)
    k = min(shape)
    g = torch.tensor(u * 0.7 ** np.arange(k) @ vt)[None]
    r = initial_rotation(1, *shape, dtype=g.dtype, device="cpu")
    for _ in range(60):
        update, r = one_step(g, r, projection="rownorm", rotation="eigen", qr=qr)
    expected = u @ vt * 0.2 * np.sqrt(g[0].numel() / k)
    np.testing.assert_allclose(update[0], expected, rtol=0, atol={"qr": 1e-12, "scqr2": 1e-6}[qr])


@pytest.mark.parametrize("projection, shape", CASES)
@pytest.mark.parametrize("rotation", ROTATIONS)
def test_column_permutation(projection, rotation, shape):
    """The order of columns never matters (1e-10: other order of sums, times the condition)."""
    w0, gradients = random(*shape, seed=2), random(4, *shape, seed=3)
    order = torch.randperm(shape[1], generator=torch.Generator().manual_seed(4))
    names = {"projection": projection, "rotation": rotation}
    permuted = train(w0[:, order], gradients[:, :, order], **names)
    expected = train(w0, gradients, **names)[:, order]
    torch.testing.assert_close(permuted, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("rotation", TURNING)
@pytest.mark.parametrize("shape", SHAPES)
def test_sign_convention_of_rotation(projection, rotation, shape):
    """Sign flips of R's columns are sign flips of X's rows, and leave the update alone."""
    k = min(shape)
    momentum = random(3, *shape, seed=5)
    r = torch.linalg.qr(random(3, shape[0], k, seed=6)).Q
    signs = torch.where(random(k, seed=7) > 0, 1.0, -1.0).double()
    names = {"projection": projection, "rotation": rotation}
    expected, _ = one_step(momentum, r, **names)
    update, _ = one_step(momentum, r * signs, **names)
    torch.testing.assert_close(update, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("projection, shape", CASES)
@pytest.mark.parametrize("rotation", TURNING)
def test_one_sided_rotation(projection, rotation, shape):
    """ARO rotates rows: in a frame turned by O everything turns with it (1e-10: rounding)."""
    momentum = random(2, *shape, seed=8)
    r = torch.linalg.qr(random(2, shape[0], min(shape), seed=9)).Q
    o = torch.linalg.qr(random(shape[0], shape[0], seed=10)).Q
    names = {"projection": projection, "rotation": rotation}
    expected, new = one_step(momentum, r, **names)
    update, turned = one_step(o @ momentum, o @ r, **names)
    torch.testing.assert_close(update, o @ expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(turned, o @ new, rtol=0, atol=1e-10)


@pytest.mark.parametrize("projection", ["sinkhorn", "rownorm", "sign"])
@pytest.mark.parametrize("qr", ["qr", "scqr2"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rgd_climbs(projection, qr, shape):
    """On one momentum J(R) = <M, R f(R^T M)> rises and does not fall again.

    For sign and rownorm, whose J is a norm of R^T M, whatever the momentum: here its columns differ
    by 1e3 in size. For sinkhorn the gradient holds f, and J (of an f of length one, as in the
    update) rises on momenta whose columns are alike, and stays there to 1e-3.
    """
    momentum = random(3, *shape, seed=15)
    if projection != "sinkhorn":
        momentum *= torch.logspace(0, -3, shape[1], dtype=momentum.dtype)
    r = initial_rotation(3, *shape, dtype=momentum.dtype, device="cpu")

    def height() -> torch.Tensor:
        x = r.mT @ momentum
        if projection == "sign":
            return x.abs().sum((1, 2))
        if projection == "rownorm":
            return shape[1] ** 0.5 * torch.linalg.vector_norm(x, dim=2).sum(1)
        f = sinkhorn(x, 5)
        return (x * f).sum((1, 2)) / torch.linalg.vector_norm(f, dim=(1, 2))

    heights = [height()]
    for _ in range(4):
        _, r = one_step(momentum, r, projection=projection, rotation="rgd", qr=qr)
        heights.append(height())
    rises = torch.stack(heights).diff(dim=0) / heights[0]
    assert (rises[0] > 1e-3).all()
    assert (rises > (-1e-3 if projection == "sinkhorn" else -1e-9)).all()


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("projection", ["sinkhorn", "rownorm", "sign"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradient_scale(projection, rotation, shape):
    """float32: gradients times 1e-8..1e8 give the same weights; powers of two to the last bit.

    Other factors round the gradients anew: 6e-8, times the condition number of A (up to 1e3) and
    lr * RMS * steps = 1e-2. sign jumps where rounding turns an entry, so it is left to the powers.
    """
    w0, gradients = random(*shape, seed=11).float(), random(5, *shape, seed=12).float()
    names = {"projection": projection, "rotation": rotation}
    expected = train(w0, gradients, **names)
    for exponent in (-27, -1, 13, 27):
        assert torch.equal(train(w0, gradients * 2.0**exponent, **names), expected)
    if projection != "sign":
        for scale in (1e-8, 1e-3, 1e8):
            got = train(w0, gradients * scale, **names)
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_orientation(shape):
    """right is left of the transposed matrix; min-side is the one of the two with fewer rows."""
    w0, gradients = random(*shape, seed=13), random(4, *shape, seed=14)
    left = train(w0, gradients, orientation="left")
    right = train(w0, gradients, orientation="right")
    turned = train(w0.mT.contiguous(), gradients.mT.contiguous(), orientation="left")
    # A transposed view may be multiplied in another order.
    torch.testing.assert_close(right, turned.mT, rtol=0, atol=1e-12)
    smaller = left if shape[0] <= shape[1] else right
    assert torch.equal(train(w0, gradients, orientation="min-side"), smaller)
