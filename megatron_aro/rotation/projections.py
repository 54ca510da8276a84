"""The base optimizers f that act in the rotated frame (spec, "Projections f").

Shapes: X is [b, k, n], the rotated momentum (rows = rotated side). Every f commutes with sign
flips of rows and permutations of columns. Only the direction of f's result matters, because the
update is brought to a fixed RMS: each f is defined up to a positive factor per matrix.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_aro.config import AROConfig
from megatron_aro.rotation.scaling import (
    reciprocal_or_zero,
    squared_scale,
    to_unit_scale,
    zero_small_columns,
)

ADAM_EPS = 1e-8


def project(
    x_bkn: Tensor, config: AROConfig, second_moment: Tensor | None, scale_b11: Tensor
) -> tuple[Tensor, Tensor | None]:
    """f(X) and the second moment that results; nothing is changed in place.

    Args:
        x_bkn: the rotated momentum times ``scale_b11``.
        second_moment: [b, k, n], projection "adam" only: V of the unscaled X.
        scale_b11: power of two that the momentum was multiplied by. Only adam, whose epsilon
            and V have a scale, looks at it.

    Returns:
        f(X) [b, k, n], and V advanced with X (None except for adam).
    """
    x_bkn = zero_small_columns(x_bkn)
    if config.projection == "sinkhorn":
        return sinkhorn(x_bkn, config.sinkhorn_iters), None
    if config.projection == "rownorm":
        return rownorm(x_bkn), None
    if config.projection == "sign":
        return x_bkn.sign(), None
    assert second_moment is not None, "compute_updates checks that adam has a second moment"
    return adam(x_bkn / scale_b11, second_moment, config.beta2)


def sinkhorn(x_bkn: Tensor, iterations: int) -> Tensor:
    """Repeat X <- diag(r)^-1 X diag(c)^-1, r and c the row and column norms of the same X."""
    p2, q2 = sinkhorn_scales(x_bkn, iterations)
    return x_bkn * p2.sqrt() * q2.sqrt()


def sinkhorn_scales(x_bkn: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """p^2 [b, k, 1] and q^2 [b, 1, n] of `sinkhorn`'s result diag(p) X diag(q).

    With S = X*X the squared norms of an iteration are r^2 = p^2 * S q^2 and c^2 = q^2 * S^T p^2,
    so that p^2 <- 1 / S q^2 and q^2 <- 1 / S^T p^2: X is squared once, and an iteration is two
    matrix-vector products.
    """
    squares = x_bkn.square()
    p2 = torch.ones_like(x_bkn[:, :, :1])
    q2 = torch.ones_like(x_bkn[:, :1, :])
    for _ in range(iterations):
        p2, q2 = (
            squared_scale(squares @ q2.mT),
            squared_scale(p2.mT @ squares),
        )
    return p2, q2


def rownorm(x_bkn: Tensor) -> Tensor:
    """sqrt(n) X_i / ||X_i||, and 0 for a zero row."""
    norms = torch.linalg.vector_norm(x_bkn, dim=2, keepdim=True)
    return x_bkn * reciprocal_or_zero(norms / math.sqrt(x_bkn.shape[2]))


def adam(x_bkn: Tensor, second_moment: Tensor, beta2: float) -> tuple[Tensor, Tensor]:
    """f = X / (sqrt(V) + 1e-8) and the V that results, no bias correction.

    X has its true scale here. f comes back times a power of two.
    """
    v = second_moment_after(x_bkn, second_moment, beta2)
    return to_unit_scale(x_bkn / (v.sqrt() + ADAM_EPS)), v


def second_moment_after(x: Tensor, second_moment: Tensor, beta2: float) -> Tensor:
    """V <- beta2 V + (1 - beta2) X*X, not in place.

    V saturates at the largest finite number instead of turning Inf, which would hold its element
    at zero for ever.
    """
    v = torch.lerp(second_moment, x.square(), 1.0 - beta2)
    return v.clamp_(max=torch.finfo(v.dtype).max)
