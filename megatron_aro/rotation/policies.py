"""Rotation policies: the matrix whose orthonormal factor becomes the new rotation (spec, step 2).

Shapes: b matrices, m rows (the rotated side), n columns, k = min(m, n).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_aro.config import AROConfig
from megatron_aro.rotation.orthonormal import cholesky_pass
from megatron_aro.rotation.precision import product, unit_roundoff
from megatron_aro.rotation.scaling import reciprocal_or_zero, to_unit_scale, zero_small_rows

RGD_STEPS = 10


def target(
    r_bmk: Tensor, m_bmn: Tensor, f: Callable[[Tensor], Tensor], config: AROConfig
) -> Tensor:
    """A [b, m, k] of step 2; ``f`` looks ahead and keeps no state.

    aro is A = M f(X)^T (arXiv 2602.09006), eigen A = M X^T = M M^T R, one power iteration.
    polar replaces aro's A by its polar factor, which orthonormalisation then leaves as it is.
    rgd climbs from the old rotation, and its last retraction is the orthonormalisation.

    A thin R (m > n) may have nothing of M in its span, X = 0: any R would answer A = 0, and the old
    one would for ever. There A = M, whose span the new R has.
    """
    x_bkn = into_frame(r_bmk, m_bmn, config)
    if config.rotation == "rgd":
        a_bmk = ascend(r_bmk, m_bmn, f, config)
    else:
        f_bkn = x_bkn if config.rotation == "eigen" else f(x_bkn)
        a_bmk = product(m_bmn, f_bkn.mT, config.precision)
    if m_bmn.shape[1] > m_bmn.shape[2]:
        found = torch.linalg.vector_norm(x_bkn, dim=(1, 2), keepdim=True) > 0
        torch.where(found, a_bmk, m_bmn, out=a_bmk)
    return polar_factor(a_bmk, r_bmk) if config.rotation == "polar" else a_bmk


def into_frame(r_bmk: Tensor, m_bmn: Tensor, config: AROConfig) -> Tensor:
    """R^T M, rows that are nothing but the rounding of this product set to zero (spec, orth)."""
    u = unit_roundoff(m_bmn, config.precision)
    norm = torch.linalg.vector_norm(m_bmn, dim=(1, 2), keepdim=True)
    threshold = norm * (2.0 * u / math.sqrt(m_bmn.shape[1]))
    return zero_small_rows(product(r_bmk.mT, m_bmn, config.precision), threshold)


def ascend(
    r_bmk: Tensor, m_bmn: Tensor, f: Callable[[Tensor], Tensor], config: AROConfig
) -> Tensor:
    """Riemannian gradient ascent on J(R) = <M, R f(R^T M)> (spec, rgd), [b, m, k].

    What comes back is not retracted yet: its orthonormal factor is the rotation after RGD_STEPS.

    The spec leaves gradient and step size open. The gradient here holds f, as aro does: it is aro's
    A = M f(X)^T, exact where f is the gradient of a norm (sign, rownorm). (What the derivative of
    sinkhorn adds grows as one over the smallest row of X: ascent along it follows noise.) Its
    tangent part at R is T = A - R (R^T A + A^T R) / 2, and the step is T / ||A^T A||_F^1/2. The
    divisor is at least ||A||_2, with which J rises wherever it is convex in R^T M, since then
    J(R') >= J(R) + <A, R' - R>. The scale of M has no effect.

    R + step has the Gram matrix I + step^T step, of condition at most 2, for which one pass of
    Cholesky QR without a shift is exact to rounding.
    """
    for _ in range(RGD_STEPS - 1):
        r_bmk = cholesky_pass(_step_up(r_bmk, m_bmn, f, config), 0.0).q_bmk
    return _step_up(r_bmk, m_bmn, f, config)


def _step_up(
    r_bmk: Tensor, m_bmn: Tensor, f: Callable[[Tensor], Tensor], config: AROConfig
) -> Tensor:
    x_bkn = into_frame(r_bmk, m_bmn, config)
    a = to_unit_scale(product(m_bmn, f(x_bkn).mT, config.precision))
    size = torch.linalg.vector_norm(a.mT @ a, dim=(1, 2), keepdim=True).sqrt()
    a *= reciprocal_or_zero(size)
    h = r_bmk.mT @ a
    return r_bmk + a - r_bmk @ (0.5 * (h + h.mT))


def polar_factor(a_bmk: Tensor, r_bmk: Tensor) -> Tensor:
    """U V^T of A = U S V^T, [b, m, k], by a scaled Newton-Schulz iteration.

    Matrix products only, so nothing waits for the device as an SVD does. The factors follow
    Chen and Chow (2014): with all singular values in [l, 1] the step X <- X (3 - a^2 X^T X) a / 2
    with a^2 = 3 / (1 + l + l^2) maps them into [l', 1] with the largest l'. At a^2 near 3 that
    would map 1 to 0 and leave rounding in its place, hence the bound of 2.5.

    A singular A leaves directions open. A trace of the old rotation R, as small as the rounding
    of A, closes them: they go where R has them.
    """
    norm = torch.linalg.vector_norm(a_bmk, dim=(1, 2), keepdim=True)
    eps = torch.finfo(a_bmk.dtype).eps
    x = a_bmk * reciprocal_or_zero(norm) + 16.0 * eps * r_bmk
    low = eps / 16.0
    while 1.0 - low > 4.0 * eps:
        a2 = min(2.5, 3.0 / (1.0 + low + low * low))
        low = min(a2**0.5 * end * (3.0 - a2 * end * end) / 2.0 for end in (low, 1.0))
        x = torch.baddbmm(x, x, x.mT @ x, beta=1.5 * a2**0.5, alpha=-0.5 * a2**1.5)
    return x
