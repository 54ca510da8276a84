"""The step in products of float16 halves: rotation aro with sinkhorn or rownorm, or eigen; float32.

There A = M (P X Q)^T with X = R^T M, P and Q diagonal, positive (eigen: both are the identity).
Square R is turned from within the old frame, orth(A) = orth(R N): `in_frame` has the derivation.
Rows of X that count as zero leave their column of R in place.

For thin R (m > n) the range of M moves, and R N would stay in the old one. There Z = P X Q^1/2 has
the LQ factorisation Z = L V^T, and orth(A) = orth(M Q^1/2 V) for the same reason.

Shapes: b matrices, m rows, n columns, k = min(m, n).
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_aro.config import AROConfig
from megatron_aro.kernels.cholesky import Factor, factor, largest_inverse
from megatron_aro.kernels.halves import Halves, halves
from megatron_aro.kernels.products import add_product, gram, product, set_product
from megatron_aro.kernels.sinkhorn import Scales, sinkhorn_scales
from megatron_aro.rotation.in_frame import SHIFT
from megatron_aro.rotation.orthonormal import Orthonormal
from megatron_aro.rotation.precision import ROUNDOFF
from megatron_aro.rotation.scaling import ZERO_COLUMN, largest_entry

# Added to the unit diagonal of the Gram matrix of the last pass, whose share it is of the result's
# error; there it does no more than keep the factor finite.
LAST_SHIFT = 1e-10
# A last pass in which the inverse of the Gram matrix has a larger entry lost orthonormality, as its
# error is rounding times that: up to 8e-6 of it in products of 22 bits of 1024 rows.
LARGEST_INVERSE = 100.0
# Beyond this L itself is rounding, and what was made of it has lost A's columns: no pass mends it.
MENDABLE_INVERSE = 1e5
# In place of a norm that is zero, so that N has one on the diagonal there.
ALMOST_ZERO = 1e-30
# Powers of two that use float16's range: entries of R are at most 1, of the scaled momentum 4.
RANGE = 2.0**12


def covers(config: AROConfig, momentum: Tensor) -> bool:
    """Whether this file has the rotation that is asked for, and the device gains from it."""
    return config.in_halves and momentum.is_cuda and momentum.dtype == torch.float32


def covers_update(config: AROConfig, momentum: Tensor) -> bool:
    """Whether it has the update too: f is a scaling of rows and columns."""
    return covers(config, momentum) and config.projection in ("sinkhorn", "rownorm")


def attempt(r_bmk: Tensor, m_bmn: Tensor, scale_b: Tensor, config: AROConfig) -> Orthonormal:
    """Steps 2 and 3: the new R, and which matrices must climb the ladder.

    ``m_bmn`` times ``scale_b`` has its largest entry in [1, 4). Where ``scale_b`` is 0 the
    momentum counts as zero, whatever it holds, and R comes back as it is, to rounding.
    """
    split = config.precision == "fp16x3"
    m = _momentum(m_bmn, scale_b, split)
    r = halves(r_bmk, split=split, factor=RANGE)[0]
    f = "eigen" if config.rotation == "eigen" else config.projection
    x, scales = _projected(r, m, f, config)
    if config.qr == "scqr":
        return _one_pass(m, x, scales, config, split)
    square = r_bmk.shape[1] == r_bmk.shape[2]
    if not square:
        del r
    z, squares = halves(
        x,
        split=split and not square,
        rows_br=scales.p_root,
        columns_bc=scales.q_root,
        squares="rows",
    )
    assert squares is not None
    del x
    if square:
        del m
        norms = _inverse_or_zero(scales.p_root * _root_inverse(squares))
        a = _from_frame(r, product(z, z.mT, form="symmetric"), squares, norms, split)
        del r
    else:
        a = _from_momentum(m, z, squares, scales, split)
        del m
    del z
    return _last_pass(*a)


def extra_pass(r_bmk: Tensor, m_bmn: Tensor, scale_b: Tensor, config: AROConfig) -> Orthonormal:
    """scqr2's `attempt` and one more pass."""
    return one_more(attempt(r_bmk, m_bmn, scale_b, config))


def update(r_bmk: Tensor, m_bmn: Tensor, scale_b: Tensor, config: AROConfig) -> Tensor:
    """Steps 4 and 5: U [b, m, n] in the frame R; arguments as for `attempt`."""
    split = config.precision == "fp16x3"
    m = _momentum(m_bmn, scale_b, split)
    r = halves(r_bmk, split=split, factor=RANGE)[0]
    y, scales = _projected(r, m, config.projection, config)
    del r
    del m
    f, squares = halves(y, split=False, rows_br=scales.p, columns_bc=scales.q, squares="all")
    assert squares is not None
    del y
    size = math.sqrt(m_bmn.shape[1] * m_bmn.shape[2])
    if config.qr == "scqr":  # R is far from orthonormal
        d = product(halves(r_bmk, split=False, factor=RANGE)[0], f)
        norm = torch.linalg.vector_norm(d, dim=(1, 2))
        return d.mul_(_size_over(config.update_rms * size, norm)[:, None, None])
    # R f has the norm of f, which scales R beforehand.
    r = halves(r_bmk, split=False, scale_b=_size_over(size, squares.sqrt()))[0]
    return product(r, f, config.update_rms)


class _Momentum(NamedTuple):
    halves: Halves
    squares_b: Tensor


def _momentum(m_bmn: Tensor, scale_b: Tensor, split: bool) -> _Momentum:
    m, squares = halves(m_bmn, split=split, scale_b=scale_b, factor=RANGE, squares="all")
    assert squares is not None
    return _Momentum(m, squares)


def _projected(r: Halves, m: _Momentum, f: str, config: AROConfig) -> tuple[Tensor, Scales]:
    """X = R^T M [b, k, n], as large as M is given, and f's scales of it; eigen's leave it alone."""
    x = product(r.mT, m.halves, 1.0 / RANGE)
    row = (2.0 * ROUNDOFF[config.precision]) ** 2 / r.hi.shape[1]
    if f == "sinkhorn":
        return x, sinkhorn_scales(x, config.sinkhorn_iters, m.squares_b, row, ZERO_COLUMN**2)
    return x, _row_scales(x, m.squares_b, row, f == "rownorm")


def _row_scales(x_bkn: Tensor, squares_b: Tensor, row_share: float, rownorm: bool) -> Scales:
    """rownorm's, after zeroing X's columns that count as zero, or eigen's."""
    _, k, n = x_bkn.shape
    whole_b1 = squares_b.sqrt()[:, None]
    if rownorm:
        columns_bn = torch.linalg.vector_norm(x_bkn, dim=1)
        x_bkn.masked_fill_((columns_bn < ZERO_COLUMN * whole_b1)[:, None, :], 0.0)
    rows_bk = torch.linalg.vector_norm(x_bkn, dim=2)
    rows_bk.masked_fill_(rows_bk < math.sqrt(row_share) * whole_b1, 0.0)
    root = math.sqrt(n) * _inverse_or_zero(rows_bk)
    q = torch.ones_like(x_bkn[:, 0])
    if rownorm:
        return Scales(root, q, root, q)
    # One scale for all of X, as scqr's shift sees it; rows alike for Z, where it does not show.
    p = math.sqrt(k * n) * _inverse_or_zero(whole_b1) * (root > 0)
    return Scales(p, q, root, q)


def from_gram(r_bmm: Tensor, s_bmm: Tensor, norms_bm1: Tensor, config: AROConfig) -> Orthonormal:
    """As `in_frame.from_gram`, which names the arguments."""
    split = config.precision == "fp16x3"
    r, _ = halves(r_bmm, split=split, factor=RANGE)
    norms = norms_bm1[:, :, 0]
    return _last_pass(*_from_frame(r, s_bmm, (norms > 0).to(norms), norms, split))


def one_more(first: Orthonormal) -> Orthonormal:
    """A last pass again, which mends one that lost orthonormality; it fails where Q holds NaN."""
    q, failed = _last_pass(*_of_columns(first.q_bmk, True))
    return Orthonormal(q, failed | ~largest_entry(first.q_bmk).isfinite().flatten())


def into_frame(
    r_mk: Tensor, m_mw: Tensor, scale: Tensor, config: AROConfig
) -> tuple[Tensor, Tensor]:
    """X = R^T M [k, w] and the sum of M's squares; M times ``scale`` [], whatever it holds if 0."""
    split = config.precision == "fp16x3"
    m = _momentum(m_mw[None], scale.view(1), split)
    r, _ = halves(r_mk[None], split=split, factor=RANGE)
    return product(r.mT, m.halves, RANGE**-2)[0], m.squares_b[0] * RANGE**-2


def gram_of_rows(x_kw: Tensor, squares_k: Tensor, q_w: Tensor) -> Tensor:
    """Z Z^T [k, k] of Z = X diag(q) in one half; the diagonal is as exact as `factor` wants it.

    Args:
        squares_k: of the rows of Z, which count as zero where it is.
    """
    scale = (squares_k / x_kw.shape[1]).sqrt()
    inverse = _inverse_or_zero(scale)[None]
    h, squares = halves(
        x_kw[None], split=False, rows_br=inverse, columns_bc=q_w[None], squares="rows"
    )
    assert squares is not None
    s = product(h, h.mT)
    s.diagonal(dim1=1, dim2=2).copy_(squares)
    return s[0].mul_(scale[:, None]).mul_(scale)


def out_of_frame(r_mk: Tensor, x_kw: Tensor, p_k: Tensor, q_w: Tensor, factor: float) -> Tensor:
    """``factor * R diag(p) X diag(q)``, [m, w], in one half: entries of diag(p) X diag(q) beyond
    float16 become its largest."""
    r, _ = halves(r_mk[None], split=False, factor=RANGE)
    f, _ = halves(x_kw[None], split=False, rows_br=p_k[None], columns_bc=q_w[None])
    return product(r, f, factor / RANGE)[0]


def _from_frame(
    r: Halves, s_bmm: Tensor, squares_bm: Tensor, norms_bm: Tensor, split: bool
) -> tuple[Halves, Tensor | None]:
    """R N [b, m, m], and the sums of squares of its columns.

    Args:
        s_bmm: S with rows and columns times any scales; its lower triangle is read, all is lost.
        squares_bm: its diagonal.
        norms_bm: the root of S's diagonal, up to a factor.
    """
    lower = factor(s_bmm, squares_bm, _constant(SHIFT, squares_bm), inverse=False).l_bkk
    # L of S is that of C, which has a unit diagonal, with rows times norms. A small row before
    # large ones makes a column of N as large as their ratio, beyond float16; no entry of L is
    # larger than one, so that the norms from there on say by how much at most.
    norms = norms_bm.masked_fill(norms_bm == 0, ALMOST_ZERO)
    largest = norms_bm.flip(1).cummax(dim=1).values.flip(1)
    diagonal = lower.diagonal(dim1=1, dim2=2)
    n, _ = halves(
        lower, split=split, rows_br=norms, factor=RANGE, lower=True,
        columns_bc=torch.where(norms_bm == 0, 1.0 / (norms * diagonal), 1.0 / largest),
    )  # fmt: skip
    del lower
    a = product(r, n, RANGE**-2, "lower")
    del n
    return _of_columns(a, split)


def _from_momentum(
    m: _Momentum, z: Halves, squares_bk: Tensor, scales: Scales, split: bool
) -> tuple[Halves, Tensor | None]:
    """M Q^1/2 V [b, m, n], and the sums of squares of its columns."""
    factors = factor(gram(z.mT), squares_bk, _constant(SHIFT, squares_bk), inverse=True)
    v = _solved(z.mT, factors, squares_bk, split)
    root = scales.q_root / scales.q_root.amax(dim=1, keepdim=True)
    del factors
    q1 = product(m.halves, halves(v, split=split, rows_br=root.nan_to_num(0.0))[0])
    del v
    return _of_columns(q1, split)


def _of_columns(a_brk: Tensor, split: bool) -> tuple[Halves, Tensor | None]:
    """A with columns of norm 64, or zero, and their sums of squares."""
    inverse = _inverse_or_zero(torch.linalg.vector_norm(a_brk, dim=1))
    return halves(a_brk, split=split, columns_bc=inverse, factor=64.0, squares="columns")


def _last_pass(a: Halves, squares_bk: Tensor | None) -> Orthonormal:
    """Cholesky QR of A; it fails where Q is not orthonormal, which has NaN where no pass helps."""
    assert squares_bk is not None
    shift = _constant(LAST_SHIFT, squares_bk)
    result = factor(gram(a), squares_bk, shift, inverse=True)
    q = _solved(a, result, squares_bk, True)
    inverse = largest_inverse(result)
    q[:, 0, 0].masked_fill_(~(inverse < MENDABLE_INVERSE), torch.nan)
    return Orthonormal(q, ~(inverse < LARGEST_INVERSE))  # NaN is less than nothing


def _solved(a: Halves, of: Factor, squares_bk: Tensor, split: bool) -> Tensor:
    """A D L^-T [b, r, k], where D^-2 is the ``squares`` of `factor`.

    Block by block: Q_j = A_j D_j W_jj^T - sum over i < j of Q_i (W_jj L_ji)^T.
    """
    assert of.w_bkk is not None
    d = _root_inverse(squares_bk)
    q_brk = torch.empty(a.hi.shape, dtype=torch.float32, device=a.hi.device)
    past = Halves(torch.empty_like(a.hi), torch.empty_like(a.hi) if split else None)
    for j in of.blocks:
        w, _ = halves(of.w_bkk[:, j, j], split=split, columns_bc=d[:, j], factor=RANGE, lower=True)
        q = q_brk[:, :, j]
        set_product(q, a.columns(j), w.mT, 1.0 / RANGE, "upper")
        if j.start:
            before = slice(0, j.start)
            w, _ = halves(of.w_bkk[:, j, j], split=split, factor=16.0, lower=True)
            left, _ = halves(of.l_bkk[:, j, before], split=split, factor=RANGE)
            lw, _ = halves(product(left.mT, w.mT, form="upper"), split=split, factor=-1.0 / RANGE)
            add_product(q, past.columns(before), lw, 1.0 / RANGE)
        if j is not of.blocks[-1]:
            now, _ = halves(q, split=split, factor=RANGE / 16.0)
            past.hi[:, :, j] = now.hi
            if past.lo is not None and now.lo is not None:
                past.lo[:, :, j] = now.lo
    return q_brk


def _one_pass(
    m: _Momentum, x: Tensor, scales: Scales, config: AROConfig, split: bool
) -> Orthonormal:
    """The paper's single pass on A = M f(X)^T with the shift relative to trace(A^T A)."""
    f, _ = halves(x, split=split, rows_br=scales.p, columns_bc=scales.q)
    a = product(m.halves, f.mT)
    largest = torch.linalg.vector_norm(a, float("inf"), dim=(1, 2))
    h, _ = halves(a, split=split, scale_b=_inverse_or_zero(largest), factor=256.0)
    p = gram(h)
    diagonal = p.diagonal(dim1=1, dim2=2)
    top = diagonal.amax(dim=1)
    shift = config.scqr_eps * diagonal.sum(dim=1) * _inverse_or_zero(top)
    tops = top[:, None].expand_as(diagonal).contiguous()
    result = factor(p, tops, shift, inverse=True, unit=False)
    failed = ~(result.smallest_pivot_b > 0.5 * shift)
    return Orthonormal(_solved(h, result, tops, True), failed)


@cache
def _shift(value: float, b: int, device: torch.device) -> Tensor:
    return torch.full((b,), value, device=device)


def _constant(value: float, like: Tensor) -> Tensor:
    return _shift(value, len(like), like.device)


def _root_inverse(squares: Tensor) -> Tensor:
    return squares.rsqrt().nan_to_num_(posinf=0.0)


def _inverse_or_zero(x: Tensor) -> Tensor:
    return x.reciprocal().nan_to_num_(posinf=0.0)


def _size_over(size: float, norm_b: Tensor) -> Tensor:
    return (size / norm_b).nan_to_num_(0.0, 0.0)
