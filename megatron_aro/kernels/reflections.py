"""Householder's QR of many small matrices at once.

The library goes matrix by matrix (or, batched, loses orthonormality on matrices of low rank), and
a layer of experts can have a hundred matrices that need it in one step. Here a program turns the
columns of one panel of its matrix, all in registers, into reflections; what these do to the other
columns, and at the end to the identity, is left to batched products.

Shapes: A and Q are [b, m, k] with m >= k. A panel of c columns from j on is the reflection
I - V T V^T of the rows from j on, V [b, m - j, c] and T [b, c, c] upper triangular (compact WY;
Schreiber and Van Loan 1989).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_aro.kernels.support import tl, triton, use_triton

WIDTH, MOST_ROWS = 32, 1024  # of a panel, which a program holds,
ENTRIES = 64  # and of which a thread holds so many
# Squared norm below the diagonal at which a column whose largest entry was 1 stays as it is.
NOTHING = 1e-30


def covers(a_bmk: Tensor) -> bool:
    """Whether the kernel takes these matrices, whatever their number is: Q of a matrix of low rank
    is arbitrary in part, and no other matrix may change it."""
    small = a_bmk.dtype == torch.float32 and a_bmk.shape[1] <= MOST_ROWS
    return small and use_triton(a_bmk)


def orthonormal_columns(a_bmk: Tensor) -> Tensor:
    """Q of A = Q R, of any rank; NaN and Inf stay in their matrix.

    Args:
        a_bmk: any strides; what `covers` leaves out (float64, say) is the library's. Products are
            as exact as the caller's setting of TF32.
    """
    if not covers(a_bmk):
        return torch.linalg.qr(a_bmk).Q
    b, m, k = a_bmk.shape
    largest = a_bmk.abs().amax(dim=1, keepdim=True).clamp_(min=torch.finfo(a_bmk.dtype).tiny)
    rest = (a_bmk / largest).contiguous()
    rows, width = triton.next_power_of_2(m), min(WIDTH, triton.next_power_of_2(k))
    reflections = []
    for j in range(0, k, width):
        v = rest.new_empty(b, m - j, width)
        t = rest.new_empty(b, width, width)
        _panel[(b,)](
            rest, v, t, j, m, k, NOTHING, rows, width,
            num_warps=max(1, rows * width // (32 * ENTRIES)),
        )  # fmt: skip
        reflections.append((v, t))
        if j + width < k:
            _reflect(rest[:, j:, j + width :], v, t.mT)
    q = torch.eye(m, k, dtype=rest.dtype, device=rest.device).repeat(b, 1, 1)
    for j, (v, t) in zip(reversed(range(0, k, width)), reversed(reflections), strict=True):
        _reflect(q[:, j:, j:], v, t)
    return q


def _reflect(x: Tensor, v: Tensor, t: Tensor) -> None:
    """x <- (I - V T V^T) x."""
    x.baddbmm_(v, t @ (v.mT @ x), alpha=-1.0)


@triton.jit(do_not_specialize=["j", "m", "k"])
def _panel(
    a, v, t, j, m, k, NOTHING: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    matrix = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, C)
    inside = (rows < m - j)[:, None] & (cols < k - j)[None, :]
    at = (j + rows)[:, None] * k + (j + cols)[None, :]
    x = tl.load(a + matrix * m * k + at, mask=inside, other=0.0)
    side = tl.arange(0, C)
    wy = tl.zeros([C, C], dtype=tl.float32)
    for c in range(C):
        here = (cols == c)[None, :]
        column = tl.sum(tl.where(here, x, 0.0), axis=1)
        below = tl.where(rows > c, column, 0.0)
        top = tl.sum(tl.where(rows == c, column, 0.0), axis=0)
        square = tl.sum(below * below, axis=0)
        norm = tl.sqrt(square + top * top)
        signed = tl.where(top < 0, norm, -norm)
        pivot = top - signed
        nothing = square <= NOTHING  # not for NaN
        tau = tl.where(nothing, 0.0, -pivot / signed)
        vector = tl.where(rows == c, 1.0, below * tl.where(nothing, 0.0, 1.0 / pivot))
        # With the vectors before this one, which the columns on the left hold, and with the columns
        # on the right.
        along = tl.sum(vector[:, None] * x, axis=0)
        x -= vector[:, None] * tl.where(cols > c, tau * along, 0.0)[None, :]
        x = tl.where(here, vector[:, None], x)
        above = tl.sum(wy * tl.where(cols < c, along, 0.0)[None, :], axis=1)
        wy = tl.where(here, tl.where(side == c, tau, -tau * above)[:, None], wy)
    out = rows[:, None] * C + cols[None, :]
    tl.store(v + matrix * (m - j) * C + out, x, mask=(rows < m - j)[:, None])
    tl.store(t + matrix * C * C + side[:, None] * C + cols[None, :], wy)
