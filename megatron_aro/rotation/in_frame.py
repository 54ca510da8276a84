"""The new rotation from within the old frame: QR without squaring the condition of A.

For square R the spec's A = M f(X)^T, with X = R^T M and f(X) = P X Q (P, Q diagonal, positive), is
A = R S P with S = X Q X^T symmetric; rownorm has Q = I, and eigen's A = M X^T has P = I too. QR
does not see positive scales of columns nor upper triangular factors from the right, so with
S = L L^T and N = L diag(L)^-1, unit lower triangular, the rotation that A asks for is
orth(R S) = orth(R L) = orth(R N). S has the condition of A, not its square. N has the root of that
at most, and less in practice: R sorts the rows of X by size, and grading cancels in N. On momenta
of real runs (Sinkhorn) cond(A) was 1e2 to 1e13, beyond what Cholesky QR of A resolves in float32 in
any number of passes, and cond(N) 2 to 230, for which one pass does.

Shapes: b matrices, m rows, n >= m columns; R and S are [b, m, m], X is [b, m, n].
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_aro.config import AROConfig
from megatron_aro.rotation.orthonormal import Orthonormal, cholesky_pass, is_orthonormal
from megatron_aro.rotation.projections import sinkhorn_scales
from megatron_aro.rotation.scaling import reciprocal_or_zero, zero_small_columns

# Added to the unit diagonal of the scaled S: above the rounding of its float32 sums, so that a
# singular one has a factor too.
SHIFT = 1e-6


def covers(config: AROConfig, r_bmk: Tensor) -> bool:
    """Whether `attempt` answers for these settings; float64 resolves enough without it."""
    return (
        config.scales
        and config.qr == "scqr2"
        and r_bmk.dtype == torch.float32
        and r_bmk.shape[1] == r_bmk.shape[2]
    )


def attempt(r_bmm: Tensor, x_bmn: Tensor, config: AROConfig) -> Orthonormal:
    """The everyday answer where `covers` says so.

    A row of X that is zero leaves its column of R in place, as far as the others let it.
    """
    if config.rotation == "aro":
        x_bmn = zero_small_columns(x_bmn)
        if config.projection == "sinkhorn":
            _, q2 = sinkhorn_scales(x_bmn, config.sinkhorn_iters)
            x_bmn *= q2.sqrt().sqrt()
    norms_bm1 = torch.linalg.vector_norm(x_bmn, dim=2, keepdim=True)
    x_bmn *= reciprocal_or_zero(norms_bm1)
    return from_gram(r_bmm, x_bmn @ x_bmn.mT, norms_bm1, config)


def from_gram(r_bmm: Tensor, s_bmm: Tensor, norms_bm1: Tensor, config: AROConfig) -> Orthonormal:
    """The same from S, which is used up: X Q X^T with rows and columns divided by its rows' norms.

    Args:
        norms_bm1: the norms of the rows of X Q^1/2, whose squares S has lost.
    """
    inverse = reciprocal_or_zero(norms_bm1)
    s_bmm.diagonal(dim1=1, dim2=2).fill_(1.0 + SHIFT)
    factor, info = torch.linalg.cholesky_ex(s_bmm, check_errors=False)
    del s_bmm
    columns = inverse.mT / factor.diagonal(dim1=1, dim2=2)[:, None]
    n_bmm = factor.mul_(norms_bm1).mul_(columns)
    n_bmm.diagonal(dim1=1, dim2=2).fill_(1.0)
    a = r_bmm @ n_bmm
    del factor, n_bmm
    a *= reciprocal_or_zero(torch.linalg.vector_norm(a, dim=1, keepdim=True))
    q, failed = cholesky_pass(a, config.scqr_eps / a.shape[2])
    # Without a factor of S there is no N, and what was taken for it can be orthonormalised well.
    q.masked_fill_((info != 0)[:, None, None], torch.nan)
    return Orthonormal(q, failed | ~is_orthonormal(q))


def extra_pass(r_bmm: Tensor, x_bmn: Tensor, config: AROConfig) -> Orthonormal:
    """`attempt` and one more pass, which mends a Q that is not orthonormal enough."""
    return one_more(attempt(r_bmm, x_bmn, config), config)


def one_more(first: Orthonormal, config: AROConfig) -> Orthonormal:
    """A Cholesky pass on what was not orthonormal enough."""
    q, failed = cholesky_pass(first.q_bmk, config.scqr_eps / first.q_bmk.shape[2])
    return Orthonormal(q, failed | ~is_orthonormal(q))
