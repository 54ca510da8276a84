"""Rotation policies: the matrix whose orthonormal factor becomes the new rotation (spec, step 2).

Shapes: b matrices, m rows (the rotated side), n columns, k = min(m, n).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_aro.config import AROConfig
from megatron_aro.rotation.precision import product
from megatron_aro.rotation.scaling import divide_or_zero


def target(r_bmk: Tensor, m_bmn: Tensor, x_bkn: Tensor, f_bkn: Tensor, config: AROConfig) -> Tensor:
    """A [b, m, k] of step 2: ``aro`` and ``polar`` look ahead through f, ``eigen`` does not.

    aro is A = M f(X)^T (arXiv 2602.09006), eigen A = M X^T = M M^T R, one power iteration.
    polar replaces aro's A by its polar factor, which orthonormalisation then leaves as it is.
    """
    if config.rotation == "eigen":
        return product(m_bmn, x_bkn.mT, config.precision)
    a_bmk = product(m_bmn, f_bkn.mT, config.precision)
    return polar_factor(a_bmk, r_bmk) if config.rotation == "polar" else a_bmk


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
    x = a_bmk * divide_or_zero(1.0, norm) + 16.0 * eps * r_bmk
    low = eps / 16.0
    while 1.0 - low > 4.0 * eps:
        a2 = min(2.5, 3.0 / (1.0 + low + low * low))
        low = min(a2**0.5 * end * (3.0 - a2 * end * end) / 2.0 for end in (low, 1.0))
        x = torch.baddbmm(x, x, x.mT @ x, beta=1.5 * a2**0.5, alpha=-0.5 * a2**1.5)
    return x
