"""Sinkhorn normalisation by row and column scales: X is read once an iteration, never written.

f(X) = diag(p) X diag(q). With S = X*X an iteration is p^2 <- 1 / S q^2 and q^2 <- 1 / S^T p^2,
both from the old scales, so that one read of X gives both sums. Sums have a fixed order: each
program adds a block of X, others add the blocks. One launch does all iterations.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_aro.kernels.flags import count, wait
from megatron_aro.kernels.support import require_contiguous, tl, triton, use_triton

ROWS = 128  # of X in one program of the sums
STRIP = 16  # of them at a time
COLUMNS = 256
VECTOR = 256
# Numbers in a matrix that counts as small, and in all that are worked on at a time.
SMALL, CACHED = 2**21, 2**23
TINY = 1.1754944e-38  # the smallest normal number: reciprocals of smaller ones overflow
# Of a squared scale, which grows without end where the iterations do not converge, and of a ratio
# of two: far beyond those of rows that count, and near enough for sums and reciprocals in range.
MOST = 1e22


class Scales(NamedTuple):
    """p [b, k] and q [b, n] with f(X) = diag(p) X diag(q); and the scales of
    Z = diag(p_root) X diag(q_root), q_root the square root of q up to a factor. Zero where a row or
    column counts as zero.

    The root mean square of f(X) is one where the iterations have converged, and at most sqrt(k),
    whatever X is. With p' the scales before the last iteration, the squares in a column of p' X q
    add up to 1, so that those of f(X) do to at most max(p^2 / p'^2) in each. Divided by the mean of
    that, entries do not leave float16's range."""

    p: Tensor
    q: Tensor
    p_root: Tensor
    q_root: Tensor


def sinkhorn_scales(
    x_bkn: Tensor, iterations: int, squares_b: Tensor, row_share: float, column_share: float
) -> Scales:
    """The scales after that many iterations.

    Args:
        x_bkn: [b, k, n], contiguous float32 (float64 too, by the twin); its squares must be in
            range.
        squares_b: [b], a sum of squares that those of rows and columns are compared with.
        row_share: rows with a smaller share of it count as zero.
        column_share: the same for columns.
    """
    require_contiguous(x_bkn)
    if not use_triton(x_bkn):
        return sinkhorn_scales_twin(x_bkn, iterations, squares_b, row_share, column_share)
    b, k, n = x_bkn.shape
    # As many small matrices at a time as stay in the cache through all iterations.
    size = max(1, CACHED // (k * n)) if k * n <= SMALL else b
    parts = [
        _launch(x_bkn[i : i + size], iterations, squares_b[i : i + size], row_share, column_share)
        for i in range(0, b, size)
    ]
    return parts[0] if len(parts) == 1 else Scales(*map(torch.cat, zip(*parts, strict=True)))


def _launch(
    x_bkn: Tensor, iterations: int, squares_b: Tensor, row_share: float, column_share: float
) -> Scales:
    b, k, n = x_bkn.shape
    row_blocks, column_blocks = triton.cdiv(k, ROWS), triton.cdiv(n, COLUMNS)
    sums, inverts = row_blocks * column_blocks, triton.cdiv(k, VECTOR) + triton.cdiv(n, VECTOR)
    # One buffer: u and v by block, p^2 and q^2 before and after, the four results.
    blocks, vectors = b * (column_blocks * k + row_blocks * n), b * (k + n)
    buffer = x_bkn.new_empty(blocks + 4 * vectors)
    done = torch.zeros(b, iterations, 2, dtype=torch.int32, device=x_bkn.device)
    _scales[(b * (iterations * (sums + inverts) + 1),)](
        x_bkn, buffer, done, squares_b, row_share, column_share, b, k, n, iterations,
        ROWS=ROWS, R=STRIP, C=COLUMNS, V=VECTOR, MOST=MOST, num_warps=4,
    )  # fmt: skip
    shapes = [(b, k), (b, n), (b, k), (b, n)]
    ends = buffer[blocks + 2 * vectors :].split([i * j for i, j in shapes])
    return Scales(*(part.view(shape) for part, shape in zip(ends, shapes, strict=True)))


def sinkhorn_scales_twin(
    x_bkn: Tensor, iterations: int, squares_b: Tensor, row_share: float, column_share: float
) -> Scales:
    """The same by torch."""
    squares = x_bkn.square()
    p, q = torch.ones_like(x_bkn[:, :, 0]), torch.ones_like(x_bkn[:, 0, :])
    before = p
    for i in range(iterations):
        u = (squares @ q[:, :, None])[:, :, 0]
        v = (p[:, None, :] @ squares)[:, 0, :]
        if i == 0:
            whole = squares_b[:, None]
            no_row, no_column = u < row_share * whole, v < column_share * whole
        u, v = u.masked_fill(no_row, 0.0), v.masked_fill(no_column, 0.0)
        before, p, q = p, _inverse(u).clamp(max=MOST), _inverse(v).clamp(max=MOST)
    ratios = (p * _inverse(before)).clamp(max=MOST)
    (k, n), q = x_bkn.shape[1:], q.sqrt()
    ratio = n * _inverse(_inverse(q).sum(dim=1, keepdim=True))
    root = k * (p * _inverse(ratios.sum(dim=1, keepdim=True))).sqrt()
    return Scales(root, q, root * ratio.sqrt(), q.sqrt())


def _inverse(x: Tensor) -> Tensor:
    return (1.0 / x).masked_fill_(x < TINY, 0.0)


@triton.jit
def _reciprocal(x):
    return tl.where(x >= 1.1754944e-38, 1.0 / x, 0.0)  # TINY


@triton.jit(do_not_specialize=["b", "iterations"])
def _scales(
    x, buffer, done, squares, row_share, column_share, b, k, n, iterations,
    ROWS: tl.constexpr, R: tl.constexpr, C: tl.constexpr, V: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """For each iteration the programs that sum over blocks of X, then those that add and invert;
    in the end one for each matrix."""
    row_blocks = tl.cdiv(k, ROWS)
    column_blocks = tl.cdiv(n, C)
    sums = row_blocks * column_blocks
    inverts = tl.cdiv(k, V) + tl.cdiv(n, V)
    pid = tl.program_id(0)
    iteration = pid // (b * (sums + inverts))
    item = pid % (b * (sums + inverts))
    wide = b.to(tl.int64)
    u = buffer
    v = u + wide * column_blocks * k
    end = v + wide * row_blocks * n
    # p^2 and q^2 are written to one place and read from the other, in turns.
    here = (iteration % 2) * wide * (k + n)
    there = ((iteration + 1) % 2) * wide * (k + n)
    if iteration == iterations:
        matrix = item.to(tl.int64)
        wait(done + (matrix * iterations + iteration - 1) * 2 + 1, inverts)
        out = end + 2 * wide * (k + n)
        _roots(
            end + there + matrix * k, end + here + matrix * k, end + here + wide * k + matrix * n,
            out + matrix * k, out + wide * k + matrix * n,
            out + wide * (k + n) + matrix * k, out + wide * (2 * k + n) + matrix * n,
            k, n, iterations == 1, MOST, V,
        )  # fmt: skip
    elif item < b * sums:
        matrix = (item // sums).to(tl.int64)
        block = item % sums
        if iteration > 0:
            wait(done + (matrix * iterations + iteration - 1) * 2 + 1, inverts)
        _sum_block(
            x + matrix * k * n, end + here + matrix * k, end + here + wide * k + matrix * n,
            u + (matrix * column_blocks + block % column_blocks) * k,
            v + (matrix * row_blocks + block // column_blocks) * n,
            block // column_blocks, block % column_blocks, k, n, iteration == 0, ROWS, R, C,
        )  # fmt: skip
        count(done + (matrix * iterations + iteration) * 2)
    else:
        item -= b * sums
        matrix = (item // inverts).to(tl.int64)
        block = item % inverts
        wait(done + (matrix * iterations + iteration) * 2, sums)
        if block < tl.cdiv(k, V):
            _invert(
                u + matrix * column_blocks * k, column_blocks, end + here + matrix * k,
                end + there + matrix * k, row_share * tl.load(squares + matrix), block, k,
                iteration == 0, MOST, V,
            )  # fmt: skip
        else:
            _invert(
                v + matrix * row_blocks * n, row_blocks, end + here + wide * k + matrix * n,
                end + there + wide * k + matrix * n, column_share * tl.load(squares + matrix),
                block - tl.cdiv(k, V), n, iteration == 0, MOST, V,
            )  # fmt: skip
        count(done + (matrix * iterations + iteration) * 2 + 1)


@triton.jit
def _sum_block(
    x, p, q, u, v, row_block, column_block, k, n, first,
    ROWS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """u[row] = sum of x^2 q^2 over a block of columns, v[column] likewise over a block of rows."""
    cols = column_block * C + tl.arange(0, C)
    in_cols = cols < n
    q_cols = tl.load(q + cols, mask=in_cols, other=0.0, cache_modifier=".cg")
    q_cols = tl.where(first, 1.0, q_cols)
    down = tl.zeros([C], dtype=tl.float32)
    for start in range(0, ROWS, R):
        rows = row_block * ROWS + start + tl.arange(0, R)
        in_rows = rows < k
        mask = in_rows[:, None] & in_cols[None, :]
        value = tl.load(x + rows[:, None].to(tl.int64) * n + cols[None, :], mask=mask, other=0.0)
        value = value * value
        p_rows = tl.load(p + rows, mask=in_rows, other=0.0, cache_modifier=".cg")
        p_rows = tl.where(first, 1.0, p_rows)
        down += tl.sum(value * p_rows[:, None], axis=0)
        tl.store(u + rows, tl.sum(value * q_cols[None, :], axis=1), mask=in_rows)
    tl.store(v + cols, down, mask=in_cols)


@triton.jit
def _invert(
    source, parts, old, new, floor, block, size, first,
    MOST: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """1 / (sum of the parts); zero below the floor, and for good."""
    at = block * V + tl.arange(0, V)
    inside = at < size
    total = tl.zeros([V], dtype=tl.float32)
    part = 0
    while part < parts:
        total += tl.load(source + part * size + at, mask=inside, other=0.0, cache_modifier=".cg")
        part += 1
    before = tl.load(old + at, mask=inside, other=0.0, cache_modifier=".cg")
    zero = tl.where(first, total < floor, before == 0)
    inverse = tl.minimum(_reciprocal(total), MOST)
    tl.store(new + at, tl.where(zero, 0.0, inverse), mask=inside)


@triton.jit
def _roots(
    before, p, q, p_out, q_out, p_root, q_root, k, n, first,
    MOST: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Scales from squared scales: see Scales."""
    total = tl.zeros([V], dtype=tl.float32)
    start = 0
    while start < k:
        at = start + tl.arange(0, V)
        new = tl.load(p + at, mask=at < k, other=0.0, cache_modifier=".cg")
        old = tl.load(before + at, mask=at < k, other=0.0, cache_modifier=".cg")
        total += tl.minimum(tl.where(first, new, new * _reciprocal(old)), MOST)
        start += V
    inverse_total = _reciprocal(tl.sum(total))
    inverse = tl.zeros([V], dtype=tl.float32)
    start = 0
    while start < n:
        at = start + tl.arange(0, V)
        root = tl.sqrt(tl.load(q + at, mask=at < n, other=0.0, cache_modifier=".cg"))
        inverse += _reciprocal(root)
        tl.store(q_out + at, root, mask=at < n)
        tl.store(q_root + at, tl.sqrt(root), mask=at < n)
        start += V
    ratio = tl.sqrt(n * _reciprocal(tl.sum(inverse)))
    start = 0
    while start < k:
        at = start + tl.arange(0, V)
        new = tl.load(p + at, mask=at < k, other=0.0, cache_modifier=".cg")
        root = k * tl.sqrt(new * inverse_total)
        tl.store(p_out + at, root, mask=at < k)
        tl.store(p_root + at, root * ratio, mask=at < k)
        start += V
