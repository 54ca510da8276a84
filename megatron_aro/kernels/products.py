"""Products of matrices in float16 halves, summed in float32.

The library takes three calls for one product of ``hi + lo``, of which each reads and writes the
result, and knows neither triangles nor symmetry. The kernel here takes one, and leaves out the
tiles that are not asked for or are zero. Its sums end as the library's do: the small products come
first, while the sum is small, since tensor cores truncate what they add by the size of the sum.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import Tensor

from megatron_aro.kernels.halves import Halves
from megatron_aro.kernels.support import INTERPRETED, tl, triton, use_triton

LONGEST = 1024  # sum on tensor cores where rounding matters
# full; of a symmetric result the lower triangle alone, and what is left of its tiles; with a second
# factor that is lower or upper triangular.
Form = Literal["full", "symmetric", "lower", "upper"]
# Rows, columns and depth of a tile, warps, stages: the fastest of six on an H200.
TILES: dict[str, tuple[int, int, int, int, int]] = {
    "full": (128, 256, 32, 8, 3),
    "symmetric": (128, 128, 64, 8, 3),
    "lower": (128, 128, 64, 4, 3),
    "upper": (128, 128, 64, 4, 3),
}
TOGETHER = 8  # rows of tiles whose columns are taken in turns, so that both stay in the cache


def product(a: Halves, b: Halves, alpha: float = 1.0, form: Form = "full") -> Tensor:
    """``alpha * a @ b`` in float32: one product of halves, or all but lo x lo."""
    out = torch.empty(*a.hi.shape[:2], b.hi.shape[2], dtype=torch.float32, device=a.hi.device)
    set_product(out, a, b, alpha, form)
    return out


def set_product(out: Tensor, a: Halves, b: Halves, alpha: float = 1.0, form: Form = "full") -> None:
    """``out = alpha * a @ b``, whatever it held; its rows may lie apart."""
    _into(out, a, b, False, alpha, form)


def add_product(out: Tensor, a: Halves, b: Halves, alpha: float = 1.0, form: Form = "full") -> None:
    """``out += alpha * a @ b``."""
    _into(out, a, b, True, alpha, form)


def gram(a: Halves) -> Tensor:
    """The lower triangle of ``a^T a``; tensor cores truncate, so the sum of many squares is cut."""
    k = a.hi.shape[2]
    out = torch.empty(len(a.hi), k, k, dtype=torch.float32, device=a.hi.device)
    if _covers(out, a.mT, a, "symmetric"):
        _launch(out, a.mT, a, False, 1.0, "symmetric", LONGEST)
        return out
    for start in range(0, a.hi.shape[1], LONGEST):
        part = a.hi[:, start : start + LONGEST]
        _mm(out, part.mT, part, float(start > 0), 1.0)
    _add_low(out, a.mT, a, 1.0)
    return out


def _into(out: Tensor, a: Halves, b: Halves, add: bool, alpha: float, form: Form) -> None:
    if _covers(out, a, b, form):
        _launch(out, a, b, add, alpha, form, 0)
        return
    _mm(out, a.hi, b.hi, float(add), alpha)
    _add_low(out, a, b, alpha)


def _covers(out: Tensor, a: Halves, b: Halves, form: Form) -> bool:
    """Whether the kernel runs, and is the faster one."""
    if not use_triton(out) or not (INTERPRETED or _is_hopper(out.device)):
        return False
    if (a.lo is None) != (b.lo is None):
        return False
    # One call of the library is as good as the kernel. With a second factor of which a column is in
    # a row three are better: with the kernel for A, scqr at 4096x24576 took 20.1 ms, before 19.4.
    if form == "full" and (a.lo is None or b.hi.stride(2) != 1):
        return False
    # What it reads at a time lies in one of the matrices, aligned.
    sizes = (*out.shape[1:], *a.hi.stride(), *b.hi.stride())
    whole = a.hi.shape[2] % TILES[form][2] == 0 and all(x == 1 or x % 16 == 0 for x in sizes)
    return whole and 1 in a.hi.stride() and 1 in b.hi.stride() and out.stride(2) == 1


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def _launch(
    out: Tensor, a: Halves, b: Halves, add: bool, alpha: float, form: Form, longest: int
) -> None:
    m, n = out.shape[1:]
    rows, columns, depth, warps, stages = TILES[form]
    split = a.lo is not None
    _product[(triton.cdiv(m, rows) * triton.cdiv(n, columns), len(out))](
        a.hi, a.lo if split else a.hi, b.hi, b.lo if split else b.hi, out,
        m, n, a.hi.shape[2], *a.hi.stride(), *b.hi.stride(), *out.stride()[:2], alpha,
        SPLIT=split, ADD=add, FORM=form, LONGEST=longest,
        M=rows, N=columns, K=depth, TOGETHER=TOGETHER, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _add_low(out: Tensor, a: Halves, b: Halves, alpha: float) -> None:
    if b.lo is not None:
        _mm(out, a.hi, b.lo, 1.0, alpha)
    if a.lo is not None:
        _mm(out, a.lo, b.hi, 1.0, alpha)


def _mm(out: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float) -> None:
    """``out = beta * out + alpha * a @ b``."""
    if not a.is_cuda:
        torch.baddbmm(out, a.float(), b.float(), beta=beta, alpha=alpha, out=out)
    elif len(a) == 1:
        torch.addmm(out[0], a[0], b[0], out_dtype=torch.float32, beta=beta, alpha=alpha, out=out[0])
    else:
        torch.baddbmm(out, a, b, out_dtype=torch.float32, beta=beta, alpha=alpha, out=out)


@triton.jit
def _sum(acc, a, b, c, d, a_k, b_k, start, stop, BOTH: tl.constexpr, K: tl.constexpr):
    """acc + a b, or acc + a b + c d, over k from start to stop; pointers are to k = 0."""
    a += start * a_k
    b += start * b_k
    c += start * a_k
    d += start * b_k
    for _ in range(start, stop, K):  # a while loop would not be pipelined
        acc = tl.dot(tl.load(a), tl.load(b), acc)
        a += K * a_k
        b += K * b_k
        if BOTH:
            acc = tl.dot(tl.load(c), tl.load(d), acc)
            c += K * a_k
            d += K * b_k
    return acc


@triton.jit
def _product(
    a, a_low, b, b_low, out, m, n, k, a_b, a_m, a_k, b_b, b_k, b_n, o_b, o_m, alpha,
    SPLIT: tl.constexpr, ADD: tl.constexpr, FORM: tl.constexpr, LONGEST: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """One tile of out (+)= alpha (a + a_low)(b + b_low); sums of a b of LONGEST, or whole for 0."""
    pid = tl.program_id(0)
    matrix = tl.program_id(1).to(tl.int64)
    columns = tl.cdiv(n, N)
    first = pid // (TOGETHER * columns) * TOGETHER
    together = tl.minimum(tl.cdiv(m, M) - first, TOGETHER)
    i = first + pid % (TOGETHER * columns) % together
    j = pid % (TOGETHER * columns) // together
    if FORM == "symmetric":  # noqa: SIM102 - known to the compiler, the other is not
        if j * N >= (i + 1) * M:
            return
    start = 0
    stop = k
    if FORM == "lower":
        start = j * N  # a multiple of K
    if FORM == "upper":
        stop = tl.minimum(k, (j + 1) * N)
    rows = i * M + tl.arange(0, M)
    cols = j * N + tl.arange(0, N)
    # Beyond the end the first ones again: no mask, and runs of 16 stay runs of 16.
    own_rows = tl.max_contiguous(tl.multiple_of(rows % m, 16), 16).to(tl.int64)
    own_cols = tl.max_contiguous(tl.multiple_of(cols % n, 16), 16).to(tl.int64)
    depth = tl.arange(0, K)
    a_at = matrix * a_b + own_rows[:, None] * a_m + depth[None, :] * a_k
    b_at = matrix * b_b + depth[:, None].to(tl.int64) * b_k + own_cols[None, :] * b_n
    a += a_at
    b += b_at
    acc = tl.zeros([M, N], dtype=tl.float32)
    if SPLIT:
        acc = _sum(acc, a, b_low + b_at, a_low + a_at, b, a_k, b_k, start, stop, True, K)
    if LONGEST == 0:
        acc = _sum(acc, a, b, a, b, a_k, b_k, start, stop, False, K)
    else:
        for at in range(start, stop, LONGEST):
            end = tl.minimum(at + LONGEST, stop)
            acc += _sum(tl.zeros_like(acc), a, b, a, b, a_k, b_k, at, end, False, K)
    acc *= alpha
    to = out + matrix * o_b + rows[:, None].to(tl.int64) * o_m + cols[None, :]
    mask = (rows < m)[:, None] & (cols < n)[None, :]
    if ADD:
        acc += tl.load(to, mask=mask)
    tl.store(to, acc, mask=mask)
