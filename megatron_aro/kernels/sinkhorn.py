"""Sinkhorn normalisation by row and column scales: X is read once an iteration, never written.

f(X) = diag(p) X diag(q). With S = X*X an iteration is p^2 <- 1 / S q^2 and q^2 <- 1 / S^T p^2,
both from the old scales, so that one read of X gives both sums. Sums have a fixed order: each
program adds a block of X, a second launch adds the blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_aro.kernels.support import use_triton

ROWS = 128  # of X in one program of the sums
STRIP = 16  # of them at a time
COLUMNS = 256
VECTOR = 256


class Scales(NamedTuple):
    """p [b, k] and q [b, n] with f(X) = diag(p) X diag(q), of root mean square near one; and
    the scales of Z = diag(p_root) X diag(q_root), q_root the square root of q up to a factor, of
    the same size. Zero where a row or column counts as zero."""

    p: Tensor
    q: Tensor
    p_root: Tensor
    q_root: Tensor


def sinkhorn_scales(
    x_bkn: Tensor, iterations: int, row_floor_b: Tensor, column_floor_b: Tensor
) -> Scales:
    """The scales after that many iterations.

    Args:
        x_bkn: [b, k, n], contiguous float32 (float64 too, by the twin); its squares must be in
            range.
        row_floor_b: rows with a smaller sum of squares count as zero.
        column_floor_b: the same for columns.
    """
    if not use_triton(x_bkn):
        return sinkhorn_scales_twin(x_bkn, iterations, row_floor_b, column_floor_b)
    b, k, n = x_bkn.shape
    row_blocks, column_blocks = triton.cdiv(k, ROWS), triton.cdiv(n, COLUMNS)
    new = x_bkn.new_empty
    u, v = new(b, column_blocks, k), new(b, row_blocks, n)
    p, q = [new(b, k), new(b, k)], [new(b, n), new(b, n)]
    for i in range(iterations):
        old, now = i % 2, (i + 1) % 2
        _sums[(column_blocks, row_blocks, b)](
            x_bkn, p[old], q[old], u, v, k, n, row_blocks, column_blocks,
            FIRST=i == 0, ROWS=ROWS, R=STRIP, C=COLUMNS, num_warps=4,
        )  # fmt: skip
        _invert[(triton.cdiv(k, VECTOR) + triton.cdiv(n, VECTOR), b)](
            u, v, p[old], q[old], p[now], q[now], row_floor_b, column_floor_b,
            k, n, row_blocks, column_blocks, FIRST=i == 0, V=VECTOR, num_warps=4,
        )  # fmt: skip
    old, now = (iterations - 1) % 2, iterations % 2
    scales = Scales(new(b, k), new(b, n), new(b, k), new(b, n))
    _roots[(b,)](p[old], p[now], q[now], *scales, k, n, FIRST=iterations == 1, V=1024, num_warps=4)
    return scales


def sinkhorn_scales_twin(
    x_bkn: Tensor, iterations: int, row_floor_b: Tensor, column_floor_b: Tensor
) -> Scales:
    """The same by torch."""
    squares = x_bkn.square()
    p, q = torch.ones_like(x_bkn[:, :, 0]), torch.ones_like(x_bkn[:, 0, :])
    before = p
    for i in range(iterations):
        u = (squares @ q[:, :, None])[:, :, 0]
        v = (p[:, None, :] @ squares)[:, 0, :]
        if i == 0:
            no_row, no_column = u < row_floor_b[:, None], v < column_floor_b[:, None]
        u, v = u.masked_fill(no_row, 0.0), v.masked_fill(no_column, 0.0)
        before, p, q = p, _inverse(u), _inverse(v)
    total = (before * _inverse(p)).sum(dim=1, keepdim=True)
    n, q = q.shape[1], q.sqrt()
    ratio = n * _inverse(_inverse(q).sum(dim=1, keepdim=True))
    root = (total * p).sqrt()
    return Scales(root, q, root * ratio.sqrt(), q.sqrt())


def _inverse(x: Tensor) -> Tensor:
    return (1.0 / x).masked_fill_(x == 0, 0.0)


@triton.jit
def _reciprocal(x):
    return tl.where(x > 0, 1.0 / x, 0.0)


@triton.jit
def _sums(
    x, p, q, u, v, k, n, row_blocks, column_blocks,
    FIRST: tl.constexpr, ROWS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """u[b, column block, row] = sum of x^2 q^2 over the block; v likewise over a row block."""
    column_block = tl.program_id(0)
    row_block = tl.program_id(1)
    matrix = tl.program_id(2).to(tl.int64)
    cols = column_block * C + tl.arange(0, C)
    x += matrix * k * n
    in_cols = cols < n
    if not FIRST:
        q_cols = tl.load(q + matrix * n + cols, mask=in_cols, other=0.0)
    down = tl.zeros([C], dtype=tl.float32)
    for start in range(0, ROWS, R):
        rows = row_block * ROWS + start + tl.arange(0, R)
        in_rows = rows < k
        mask = in_rows[:, None] & in_cols[None, :]
        value = tl.load(x + rows[:, None].to(tl.int64) * n + cols[None, :], mask=mask, other=0.0)
        value = value * value
        if FIRST:
            down += tl.sum(value, axis=0)
            across = tl.sum(value, axis=1)
        else:
            p_rows = tl.load(p + matrix * k + rows, mask=in_rows, other=0.0)
            down += tl.sum(value * p_rows[:, None], axis=0)
            across = tl.sum(value * q_cols[None, :], axis=1)
        tl.store(u + (matrix * column_blocks + column_block) * k + rows, across, mask=in_rows)
    tl.store(v + (matrix * row_blocks + row_block) * n + cols, down, mask=in_cols)


@triton.jit
def _invert(
    u, v, p_old, q_old, p, q, row_floor, column_floor, k, n, row_blocks, column_blocks,
    FIRST: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """p = 1 / (sum of u over its blocks), q = 1 / (sum of v); zero below the floor, for good."""
    block = tl.program_id(0)
    matrix = tl.program_id(1).to(tl.int64)
    row_programs = tl.cdiv(k, V)
    if block < row_programs:
        size, parts, source, old, out, floor = k, column_blocks, u, p_old, p, row_floor
    else:
        size, parts, source, old, out, floor = n, row_blocks, v, q_old, q, column_floor
        block -= row_programs
    at = block * V + tl.arange(0, V)
    inside = at < size
    source += matrix * parts * size
    total = tl.zeros([V], dtype=tl.float32)
    part = 0
    while part < parts:
        total += tl.load(source + part * size + at, mask=inside, other=0.0)
        part += 1
    result = _reciprocal(total)
    if FIRST:
        result = tl.where(total < tl.load(floor + matrix), 0.0, result)
    else:
        before = tl.load(old + matrix * size + at, mask=inside, other=0.0)
        result = tl.where(before == 0, 0.0, result)
    tl.store(out + matrix * size + at, result, mask=inside)


@triton.jit
def _roots(before, p, q, p_out, q_out, p_root, q_root, k, n, FIRST: tl.constexpr, V: tl.constexpr):
    """Scales from squared scales: see Scales. One program a matrix."""
    matrix = tl.program_id(0).to(tl.int64)
    total = tl.zeros([V], dtype=tl.float32)
    start = 0
    while start < k:
        at = start + tl.arange(0, V)
        new = tl.load(p + matrix * k + at, mask=at < k, other=0.0)
        if FIRST:
            total += _reciprocal(new)
        else:
            total += tl.load(before + matrix * k + at, mask=at < k, other=0.0) * _reciprocal(new)
        start += V
    size = tl.sum(total)
    inverse = tl.zeros([V], dtype=tl.float32)
    start = 0
    while start < n:
        at = start + tl.arange(0, V)
        root = tl.sqrt(tl.load(q + matrix * n + at, mask=at < n, other=0.0))
        inverse += _reciprocal(root)
        tl.store(q_out + matrix * n + at, root, mask=at < n)
        tl.store(q_root + matrix * n + at, tl.sqrt(root), mask=at < n)
        start += V
    ratio = tl.sqrt(n * _reciprocal(tl.sum(inverse)))
    start = 0
    while start < k:
        at = start + tl.arange(0, V)
        root = tl.sqrt(size * tl.load(p + matrix * k + at, mask=at < k, other=0.0))
        tl.store(p_out + matrix * k + at, root, mask=at < k)
        tl.store(p_root + matrix * k + at, root * ratio, mask=at < k)
        start += V
