"""Batched Cholesky factor and its inverse in one launch.

L and W of C = D S D + shift I, W the inverses of L's diagonal blocks, [b, k, k] float32, D a diagonal. The matrix is cut in tiles
of TILE; one program computes one tile of L or W and waits, by flags in memory, for the tiles that
it needs. These all belong to programs of smaller index, which the device starts earlier, so the
programs never wait for each other in a circle however few of them fit on the device. What a launch
for each block column would cost (two hundred launches at 4096) is saved, and the tiles that are not
on the critical path, the chain of diagonal tiles, are computed in its shadow. The sums have a fixed
order: results repeat to the bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_aro.kernels.flags import announce, wait
from megatron_aro.kernels.support import use_triton

TILE, CHUNK, WARPS = 32, 16, 1


class Factor(NamedTuple):
    """C = L L^T, [b, k, k], and the inverses of its diagonal blocks in the places of these blocks;
    both are defined on and below the diagonal only."""

    l_bkk: Tensor
    w_bkk: Tensor | None
    blocks: list[slice]
    """The rows of each block that W inverts."""
    smallest_pivot_b: Tensor
    """The smallest Schur complement met on the diagonal, before it was raised; may be NaN."""


def factor(
    s_bkk: Tensor, squares_bk: Tensor, shift_b: Tensor, *, inverse: bool, unit: bool = True
) -> Factor:
    """Factor C = D S D + shift I; only the lower triangle of S is read.

    A pivot is at least the shift but for rounding, and is raised to it.

    Args:
        s_bkk: [b, k, k], contiguous float32 (float64 too, by the twin).
        squares_bk: D^-2; where it is 0, D is 0.
        shift_b: added to the diagonal of C.
        inverse: compute W too, else it is None.
        unit: ``squares_bk`` is the diagonal of S, and more exact than what S holds, so that C has
            ones there. A product on tensor cores truncates: the sums of squares on its diagonal
            come out too small by 1e-5, which would make a nearly singular C indefinite.
    """
    if not use_triton(s_bkk):
        return factor_twin(s_bkk, squares_bk, shift_b, inverse=inverse, unit=unit)
    b, k, _ = s_bkk.shape
    blocks = triton.cdiv(k, TILE)
    l_bkk = torch.empty_like(s_bkk)
    w_bkk = torch.empty_like(l_bkk)
    pivots = torch.empty(b, blocks, dtype=s_bkk.dtype, device=s_bkk.device)
    # For each matrix: tiles of L done in each block row, then tiles of W done in each block column.
    done = torch.zeros(b, 2, blocks, dtype=torch.int32, device=s_bkk.device)
    scratch = torch.empty(b * blocks * TILE * TILE, dtype=s_bkk.dtype, device=s_bkk.device)
    inverted = _inverted(b, k)
    band = triton.cdiv(inverted[0].stop, TILE)
    tiles = blocks * (blocks + 1) // 2
    if inverse:
        tiles += sum(g % band for g in range(blocks))
    _factor[(tiles * b,)](
        s_bkk, squares_bk, shift_b, l_bkk, w_bkk, pivots, done, scratch, k, b, blocks, band,
        INVERSE=inverse, T=TILE, C=min(TILE, CHUNK), UNIT=unit, num_warps=WARPS,
    )  # fmt: skip
    return Factor(l_bkk, w_bkk if inverse else None, inverted, pivots.amin(dim=1))


def _inverted(b: int, k: int) -> list[slice]:
    """W costs as much as L within a block, products of other kernels beyond: more or less by b."""
    size = 2048 if b == 1 else 1024
    return [slice(start, min(start + size, k)) for start in range(0, k, size)]


def factor_twin(
    s_bkk: Tensor, squares_bk: Tensor, shift_b: Tensor, *, inverse: bool, unit: bool
) -> Factor:
    """The same by torch; a matrix that is not positive definite has L = I and pivot 0."""
    d = squares_bk.rsqrt().masked_fill_(squares_bk == 0, 0.0)
    c = torch.tril(d[:, :, None] * s_bkk * d[:, None, :])
    diagonal = c.diagonal(dim1=1, dim2=2)
    if unit:
        diagonal.copy_(squares_bk > 0)
    diagonal.add_(shift_b[:, None])
    l_bkk, info = torch.linalg.cholesky_ex(c, check_errors=False)
    smallest = l_bkk.diagonal(dim1=1, dim2=2).square().amin(dim=1)
    smallest = torch.where(info == 0, smallest, 0.0)
    eye = torch.eye(c.shape[1], dtype=c.dtype, device=c.device).expand_as(c)
    l_bkk = torch.where((info == 0)[:, None, None], l_bkk, eye)
    w_bkk = torch.zeros_like(l_bkk) if inverse else None
    inverted = _inverted(*c.shape[:2])
    for rows in inverted if w_bkk is not None else []:
        block = l_bkk[:, rows, rows]
        w_bkk[:, rows, rows] = torch.linalg.solve_triangular(
            block, eye[:, rows, rows], upper=False
        )
    return Factor(l_bkk, w_bkk, inverted, smallest)


@triton.jit
def _tile(base, i, j, k, T: tl.constexpr):
    """Tile (i, j) of a contiguous [k, k] matrix; zeros outside."""
    rows = i * T + tl.arange(0, T)
    cols = j * T + tl.arange(0, T)
    inside = (rows < k)[:, None] & (cols < k)[None, :]
    # .cg: past the first cache, which does not see what other programs wrote.
    return tl.load(
        base + rows[:, None].to(tl.int64) * k + cols[None, :], mask=inside, other=0.0,
        cache_modifier=".cg",
    )  # fmt: skip


@triton.jit
def _part(base, i, j, k, c, T: tl.constexpr, C: tl.constexpr):
    """Columns c to c + C of tile (i, j), [T, C]."""
    rows = i * T + tl.arange(0, T)
    cols = j * T + c + tl.arange(0, C)
    inside = (rows < k)[:, None] & (cols < k)[None, :]
    return tl.load(
        base + rows[:, None].to(tl.int64) * k + cols[None, :], mask=inside, other=0.0,
        cache_modifier=".cg",
    )  # fmt: skip


@triton.jit
def _put(base, i, j, k, value, T: tl.constexpr):
    rows = i * T + tl.arange(0, T)
    cols = j * T + tl.arange(0, T)
    inside = (rows < k)[:, None] & (cols < k)[None, :]
    tl.store(base + rows[:, None].to(tl.int64) * k + cols[None, :], value, mask=inside)


@triton.jit
def _factor_tile(a_ptr, l_ptr, w_ptr, k, size, floor, T: tl.constexpr):
    """L and L^-1 of one symmetric tile by elimination; returns the smallest pivot.

    Step c reads row c (column c by symmetry) and takes its multiple from the rows below, in the
    tile and in what becomes the inverse. A thread holds a whole column of both, so that with the
    loop unrolled a row is a register and all masks are known to the compiler: the sums below have
    one term each (-0.0 is what it may drop from a sum).
    """
    rows = tl.arange(0, T)
    cols = tl.arange(0, T)
    a = tl.load(a_ptr + rows[:, None] * T + cols[None, :], cache_modifier=".cg")
    w = tl.where(rows[:, None] == cols[None, :], 1.0, 0.0).to(a.dtype)
    smallest = tl.full([T], float("inf"), dtype=a.dtype)
    for c in tl.static_range(T):
        here = rows[:, None] == c
        row = tl.sum(tl.where(here, a, -0.0), axis=0)
        w_row = tl.sum(tl.where(here, w, -0.0), axis=0)
        column = tl.broadcast_to(row[:, None], (T, T))
        pivot = tl.sum(tl.where(here, column, -0.0), axis=0)
        least = tl.minimum(smallest, pivot, propagate_nan=tl.PropagateNan.ALL)
        smallest = tl.where(c < size, least, smallest)
        root = tl.rsqrt(tl.maximum(pivot, floor))
        inv = root * root
        below = rows[:, None] > c
        a = tl.where(below, a - column * (row * inv)[None, :], a)
        w = tl.where(below, w - column * (w_row * inv)[None, :], w)
        a = tl.where(here, (row * root)[None, :], a)
        w = tl.where(here, (w_row * root)[None, :], w)
    inside = (rows < size)[:, None] & (cols < size)[None, :]
    upper = rows[:, None] <= cols[None, :]
    tl.store(l_ptr + cols[None, :] * k + rows[:, None], a, mask=inside & upper)
    tl.store(w_ptr + rows[:, None] * k + cols[None, :], w, mask=inside)
    return tl.min(smallest, axis=0)


@triton.jit
def _scaled(s, squares, shift, i, j, k, T: tl.constexpr, UNIT: tl.constexpr):
    """Tile (i, j) of C, i >= j; the identity where it ends. Read from S's lower triangle alone."""
    rows = i * T + tl.arange(0, T)
    cols = j * T + tl.arange(0, T)
    inside = (rows < k)[:, None] & (cols < k)[None, :]
    first = tl.maximum(rows[:, None], cols[None, :])
    second = tl.minimum(rows[:, None], cols[None, :])
    value = tl.load(s + first.to(tl.int64) * k + second, mask=inside, other=0.0)
    row_squares = tl.load(squares + rows, mask=rows < k, other=0.0)
    column_squares = tl.load(squares + cols, mask=cols < k, other=0.0)
    row_scale = tl.where(row_squares > 0, tl.rsqrt(row_squares), 0.0)
    column_scale = tl.where(column_squares > 0, tl.rsqrt(column_squares), 0.0)
    value = value * row_scale[:, None] * column_scale[None, :]
    diagonal = rows[:, None] == cols[None, :]
    if UNIT:
        value = tl.where(diagonal, tl.where(row_squares > 0, 1.0, 0.0)[:, None], value)
    value += tl.where(diagonal, tl.load(shift), 0.0)
    return tl.where(diagonal & (rows >= k)[:, None], 1.0, value)


@triton.jit
def _subtract(acc, l, l_done, i, j, stop, k, T: tl.constexpr, C: tl.constexpr):
    """acc - sum over t below stop of L_it L_jt^T."""
    ready = 0
    t = 0
    while t < stop:
        if t >= ready:
            ready = wait(l_done + i, t + 1)
            if i != j:
                ready = tl.minimum(ready, wait(l_done + j, t + 1))
        for c in tl.static_range(0, T, C):
            left = _part(l, i, t, k, c, T, C)
            right = _part(l, j, t, k, c, T, C)
            acc -= tl.dot(left, tl.trans(right), input_precision="tf32x3")
        t += 1
    return acc


# Each variant takes seconds to compile.
@triton.jit(do_not_specialize=["b", "blocks", "band"])
def _factor(
    s, d, shift, l, w, pivots, done, scratch, k, b, blocks, band,
    INVERSE: tl.constexpr, T: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    matrix = pid % b
    tile = pid // b
    # Group g holds the tiles of column g of L from the diagonal down, then row g of W.
    g = 0
    size = blocks
    while tile >= size:
        tile -= size
        g += 1
        size = blocks - g + (g % band if INVERSE else 0)
    offset = matrix.to(tl.int64) * k * k
    l += offset
    w += offset
    s += offset
    d += matrix * k
    l_done = done + matrix * 2 * blocks
    w_done = l_done + blocks
    if tile < blocks - g:
        i = g + tile
        acc = _scaled(s, d, shift + matrix, i, g, k, T, UNIT)
        acc = _subtract(acc, l, l_done, i, g, g, k, T, C)
        if tile == 0:
            here = scratch + (matrix * blocks + g) * T * T
            inner = tl.arange(0, T)
            tl.store(here + inner[:, None] * T + inner[None, :], acc)
            tl.debug_barrier()
            corner = (g * T).to(tl.int64) * (k + 1)
            size = k - g * T
            floor = tl.maximum(tl.load(shift + matrix), 1e-12)
            smallest = _factor_tile(here, l + corner, w + corner, k, size, floor, T)
            tl.store(pivots + matrix * blocks + g, smallest)
        else:
            wait(l_done + g, g + 1)
            inverse = _tile(w, g, g, k, T)
            _put(l, i, g, k, tl.dot(acc, tl.trans(inverse), input_precision="tf32x3"), T)
        announce(l_done + i, g + 1)
    else:
        # W_gj = -W_gg sum over t of L_gt W_tj, t from j to g - 1
        j = g // band * band + tile - (blocks - g)
        acc = tl.zeros([T, T], dtype=tl.float32)
        wait(l_done + g, g + 1)
        ready = j
        t = j
        while t < g:
            if t > ready:
                ready = wait(w_done + j, t)
            acc += tl.dot(_tile(l, g, t, k, T), _tile(w, t, j, k, T), input_precision="tf32x3")
            t += 1
        inverse = _tile(w, g, g, k, T)
        _put(w, g, j, k, -tl.dot(inverse, acc, input_precision="tf32x3"), T)
        announce(w_done + j, g)
