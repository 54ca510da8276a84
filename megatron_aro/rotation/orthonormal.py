"""Orthonormalisation with the fall-back ladder (spec, "orth").

Shapes: A and Q are [b, m, k] with m >= k. A pass with shift s is P = A^T A + s I, P = L L^T,
Q = A L^-T. Nothing here waits for the device: failures are masks [b], never exceptions.

All products are IEEE, also when ARO's others are TF32: the second pass resolves directions of
relative size 1e-7, and with a TF32 Gram matrix half of the second passes fail (spec).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_aro.config import AROConfig
from megatron_aro.kernels import reflections
from megatron_aro.rotation.precision import product
from megatron_aro.rotation.scaling import to_unit_scale

# Largest entry of |Q^T Q - I| that scqr2 accepts (spec).
ORTHONORMAL = 1e-2


class Orthonormal(NamedTuple):
    """A result and which of its elements cannot be used."""

    q_bmk: Tensor
    failed_b: Tensor


def first_attempt(a_bmk: Tensor, config: AROConfig) -> Orthonormal:
    """The everyday answer of ``config.qr``."""
    if config.qr == "qr":
        return householder(a_bmk)
    q, failed = cholesky_pass(to_unit_scale(a_bmk), config.scqr_eps)
    if config.qr == "scqr":
        return Orthonormal(q, failed | ~_finite(q))
    q, failed_again = cholesky_pass(q, config.scqr_eps / a_bmk.shape[2])
    return Orthonormal(q, failed | failed_again | ~is_orthonormal(q))


def extra_pass(a_bmk: Tensor, config: AROConfig) -> Orthonormal:
    """The ladder's first rung, for elements whose first attempt by scqr2 failed.

    Its second pass again with the shift of the first, and one more pass after it.
    """
    q, failed = cholesky_pass(to_unit_scale(a_bmk), config.scqr_eps)
    for shift in (config.scqr_eps, config.scqr_eps / a_bmk.shape[2]):
        q, failed_again = cholesky_pass(q, shift)
        failed = failed | failed_again
    return Orthonormal(q, failed | ~is_orthonormal(q))


def cholesky_pass(a_bmk: Tensor, shift: float) -> Orthonormal:
    """One pass of shifted Cholesky QR; the shift is relative to trace(A^T A).

    Cholesky reads one triangle of P, so P is symmetric by construction. An element fails where
    Cholesky does.
    """
    p = a_bmk.mT @ a_bmk
    diagonal = p.diagonal(dim1=1, dim2=2)
    diagonal.add_(shift * diagonal.sum(dim=1, keepdim=True))
    factor, info = torch.linalg.cholesky_ex(p, check_errors=False)
    q = torch.linalg.solve_triangular(factor.mT, a_bmk, upper=True, left=False)
    return Orthonormal(q, info != 0)


def householder(a_bmk: Tensor) -> Orthonormal:
    """Exact QR: finite and orthonormal for every finite A, of any rank."""
    usable = _finite(a_bmk)  # where the NaN is alone in its column Q does not show it
    q = reflections.orthonormal_columns(a_bmk)
    if q.is_cuda and not reflections.covers(a_bmk):
        # cuBLAS's batched QR left |Q^T Q - I| at 0.05 to 0.2 on matrices of rank 1 (H100, CUDA
        # 13.0). Such a Q is well-conditioned, so one pass without a shift makes it orthonormal to
        # rounding.
        q, failed = cholesky_pass(q, 0.0)
        usable &= ~failed
    return Orthonormal(q, ~(usable & _finite(q)))


def _finite(q_bmk: Tensor) -> Tensor:
    return torch.linalg.vector_norm(q_bmk, float("inf"), dim=(1, 2)).isfinite()


def is_orthonormal(q_bmk: Tensor) -> Tensor:
    """Which Q are orthonormal to the tolerance of scqr2; NaN is not."""
    # TF32 resolves 1e-3 here, a tenth of what is asked, at an eighth of the cost.
    error = product(q_bmk.mT, q_bmk, "tf32")
    error.diagonal(dim1=1, dim2=2).sub_(1.0)
    return torch.linalg.vector_norm(error, float("inf"), dim=(1, 2)) <= ORTHONORMAL
