"""Batched Cholesky factor and its inverse in one launch.

C = D S D + shift I = L L^T, [b, k, k] float32, D a diagonal; W holds the inverses of L's diagonal
blocks. The matrix is cut in tiles of TILE; one program computes one tile of L or W and waits, by
flags in memory, for the tiles that it needs. These all belong to programs of smaller index, which
the device starts earlier, so the programs never wait for each other in a circle however few of them
fit on the device. What a launch for each block column would cost (two hundred launches at 4096) is
saved, and the tiles that are not on the critical path, the chain of diagonal tiles, are computed in
its shadow. The sums have a fixed order: results repeat to the bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_aro.kernels.flags import announce, wait
from megatron_aro.kernels.halves import Halves, halves
from megatron_aro.kernels.products import add_product, product
from megatron_aro.kernels.support import require_contiguous, tl, triton, use_triton

TILE, CHUNK, WARPS = 32, 16, 1


class Factor(NamedTuple):
    """C = L L^T, [b, k, k], and W, the inverses of L's diagonal blocks in the places of these
    blocks; both are defined on and below the diagonal only."""

    l_bkk: Tensor
    w_bkk: Tensor | None
    blocks: list[slice]
    """The rows of each block that W inverts."""
    smallest_pivot_b: Tensor
    """The smallest Schur complement met on the diagonal, before it was raised; may be NaN."""
    w_squares_bk: Tensor | None
    """The squares of W's columns."""


def factor(
    s_bkk: Tensor, squares_bk: Tensor, shift_b: Tensor, *, inverse: bool, unit: bool = True
) -> Factor:
    """Factor C = D S D + shift I; only the lower triangle of S is read.

    A pivot is at least the shift but for rounding, and is raised to it.

    Args:
        s_bkk: [b, k, k], contiguous float32 (float64 too, by the twin); overwritten.
        squares_bk: D^-2, 0 (then D is 0) or of a size that float16 can square, 1e-6 to 1e9.
        shift_b: added to the diagonal of C.
        inverse: compute W too, else it and its squares are None.
        unit: ``squares_bk`` is the diagonal of S, and more exact than what S holds, so that C has
            ones there. A product on tensor cores truncates: the sums of squares on its diagonal
            come out too small by 1e-5, which would make a nearly singular C indefinite.
    """
    require_contiguous(s_bkk)
    if not use_triton(s_bkk):
        return factor_twin(s_bkk, squares_bk, shift_b, inverse=inverse, unit=unit)
    b, k, _ = s_bkk.shape
    # L and W are padded to whole tiles (of the identity): nothing is masked, and all sizes take
    # the same compiled kernel.
    pitch = triton.cdiv(k, TILE) * TILE
    l_bkk, w_bkk = (s_bkk.new_empty(b, pitch, pitch)[:, :k, :k] for _ in range(2))
    pivots = s_bkk.new_empty(b, triton.cdiv(k, TILE))
    # Of the columns of the tiles of W, sums of squares.
    squares = s_bkk.new_zeros(b, triton.cdiv(k, TILE), pitch if inverse else 0)
    if unit:
        s_bkk.diagonal(dim1=1, dim2=2).copy_(squares_bk)
    blocks = diagonal_blocks(b, k)
    for block in blocks:
        start, rest = block.start, slice(block.stop, k)
        rows = triton.cdiv(k - start, TILE)
        columns = triton.cdiv(block.stop - start, TILE)
        tiles = columns * rows - (0 if inverse else columns * (columns - 1) // 2)
        # Tiles of L done in each row of tiles, then tiles of W done in each column of them.
        done = torch.zeros(b, 2, rows, dtype=torch.int32, device=s_bkk.device)
        _factor[(tiles * b,)](
            s_bkk[:, start:, start:], squares_bk[:, start:], shift_b, l_bkk[:, start:, start:],
            w_bkk[:, start:, start:], pivots[:, start // TILE :],
            squares[:, start // TILE :, start:], done,
            k - start, k, pitch, b, rows, INVERSE=inverse, T=TILE, C=CHUNK, num_warps=WARPS,
        )  # fmt: skip
        if rest.start < k:  # what these columns take from the rest, in products
            root = squares_bk[:, rest].sqrt()
            lower, _ = halves(l_bkk[:, rest, block], split=True, rows_br=root)
            add_product(s_bkk[:, rest, rest], lower, lower.mT, -1.0, "symmetric")
    smallest = pivots.amin(dim=1)
    if not inverse:
        return Factor(l_bkk, None, blocks, smallest, None)
    return Factor(l_bkk, w_bkk, blocks, smallest, squares.sum(dim=1)[:, :k])


def largest_inverse(of: Factor) -> Tensor:
    """The largest entry on the diagonal of C^-1, [b]; no less than the reciprocal of the smallest
    pivot, if that was not raised; may be NaN.

    It is the largest square of a column of L^-1, whose rows of block j are W_jj and before that
    -W_jj L_j L^-1, of L's rows and the rows of L^-1 above. For these 11 bits are enough.
    """
    assert of.w_bkk is not None and of.w_squares_bk is not None
    if len(of.blocks) == 1:
        return of.w_squares_bk.amax(dim=1)
    squares_bk = of.w_squares_bk.clone()
    last = of.blocks[-1]
    above = of.l_bkk.new_zeros(len(squares_bk), last.start, last.start, dtype=torch.float16)
    for j in of.blocks:
        w, _ = halves(of.w_bkk[:, j, j], split=False, lower=True)
        if j is not last:
            above[:, j, j] = w.hi
        if j.start:
            before = slice(0, j.start)
            rows, _ = halves(of.l_bkk[:, j, before], split=False)
            rows, _ = halves(product(rows, Halves(above[:, before, before])), split=False)
            below = product(w, rows, -1.0)
            squares_bk[:, before] += below.square().sum(dim=1)
            if j is not last:
                above[:, j, before] = halves(below, split=False)[0].hi
    return squares_bk.amax(dim=1)


def diagonal_blocks(b: int, k: int) -> list[slice]:
    """The columns of one launch, by what was fastest: products of other kernels do what one block
    takes from the next at a higher rate, but each costs launches."""
    size = 2048 if b == 1 else 1024 if k > 1024 else 512
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
    w_bkk = torch.zeros_like(l_bkk)
    blocks = diagonal_blocks(*c.shape[:2])
    for rows in blocks if inverse else []:
        block = l_bkk[:, rows, rows]
        w_bkk[:, rows, rows] = torch.linalg.solve_triangular(block, eye[:, rows, rows], upper=False)
    if not inverse:
        return Factor(l_bkk, None, blocks, smallest, None)
    squares_bk = w_bkk.square().sum(dim=1).masked_fill_((info != 0)[:, None], torch.inf)
    return Factor(l_bkk, w_bkk, blocks, smallest, squares_bk)


@triton.jit
def _part(base, i, j, ld, c, T: tl.constexpr, C: tl.constexpr):
    """Columns c to c + C of tile (i, j), [T, C]."""
    rows = i * T + tl.arange(0, T)
    cols = j * T + c + tl.arange(0, C)
    # .cg: past the first cache, which does not see what other programs wrote.
    return tl.load(base + rows[:, None].to(tl.int64) * ld + cols[None, :], cache_modifier=".cg")


@triton.jit
def _tile(base, i, j, ld, T: tl.constexpr):
    return _part(base, i, j, ld, 0, T, T)


@triton.jit
def _put(base, i, j, ld, value, T: tl.constexpr):
    rows = i * T + tl.arange(0, T)
    cols = j * T + tl.arange(0, T)
    tl.store(base + rows[:, None].to(tl.int64) * ld + cols[None, :], value)


@triton.jit
def _factor_tile(acc, l_ptr, w_ptr, ld, size, floor, T: tl.constexpr):
    """L and L^-1 of one symmetric tile by elimination; returns the smallest pivot and L^-1.

    Step c reads row c (column c by symmetry) and takes its multiple from the rows below, in the
    tile and in what becomes the inverse. A thread holds a whole column of both, so that with the
    loop unrolled a row is a register and all masks are known to the compiler: the sums below have
    one term each (-0.0 is what it may drop from a sum). Gathers along rows are what keeps the
    compiler to that layout: it makes each one of shuffles between the 32 threads of a row. The
    first gather moves no element; without it the tile would stay as the tensor cores left it.
    """
    rows = tl.arange(0, T)
    cols = tl.arange(0, T)
    row_of = tl.broadcast_to(rows[:, None], (T, T))
    a = tl.gather(acc, tl.broadcast_to(cols[None, :], (T, T)), axis=1)
    w = tl.where(rows[:, None] == cols[None, :], 1.0, 0.0).to(a.dtype)
    smallest = tl.full([T], float("inf"), dtype=a.dtype)
    for c in tl.static_range(T):
        here = rows[:, None] == c
        row = tl.sum(tl.where(here, a, -0.0), axis=0)
        w_row = tl.sum(tl.where(here, w, -0.0), axis=0)
        column = tl.gather(tl.broadcast_to(row[None, :], (T, T)), row_of, axis=1)
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
    upper = rows[:, None] <= cols[None, :]
    tl.store(l_ptr + cols[None, :] * ld + rows[:, None], a, mask=upper)
    tl.store(w_ptr + rows[:, None] * ld + cols[None, :], w)
    return tl.min(smallest, axis=0), w


@triton.jit
def _put_squares(squares, matrix, i, j, ld, blocks, value, T: tl.constexpr):
    """The columns' sums of squares of tile (i, j)."""
    cols = j * T + tl.arange(0, T)
    tl.store(squares + (matrix * blocks + i) * ld + cols, tl.sum(value * value, axis=0))


@triton.jit
def _scaled(s, squares, shift, i, j, k, size, T: tl.constexpr):
    """Tile (i, j) of C, i >= j; the identity where it ends. Read from S's lower triangle alone."""
    rows = i * T + tl.arange(0, T)
    cols = j * T + tl.arange(0, T)
    inside = (rows < k)[:, None] & (cols < k)[None, :]
    first = tl.maximum(rows[:, None], cols[None, :])
    second = tl.minimum(rows[:, None], cols[None, :])
    value = tl.load(s + first.to(tl.int64) * size + second, mask=inside, other=0.0)
    row_squares = tl.load(squares + rows, mask=rows < k, other=0.0)
    column_squares = tl.load(squares + cols, mask=cols < k, other=0.0)
    row_scale = tl.where(row_squares > 0, tl.rsqrt(row_squares), 0.0)
    column_scale = tl.where(column_squares > 0, tl.rsqrt(column_squares), 0.0)
    value = value * row_scale[:, None] * column_scale[None, :]
    diagonal = rows[:, None] == cols[None, :]
    value += tl.where(diagonal, tl.load(shift), 0.0)
    return tl.where(diagonal & (rows >= k)[:, None], 1.0, value)


@triton.jit
def _subtract(acc, lower, l_done, i, j, stop, ld, T: tl.constexpr, C: tl.constexpr):
    """acc - sum over t below stop of L_it L_jt^T."""
    t = 0
    while t < stop:
        ready = wait(l_done + i, t + 1)
        if i != j:
            ready = tl.minimum(ready, wait(l_done + j, t + 1))
        ready = tl.minimum(ready, stop)
        # A for loop is pipelined, a while loop is not: loads are under way turns before their use.
        for c in tl.range(t * T, ready * T, C, num_stages=4):
            left = _part(lower, i, 0, ld, c, T, C)
            right = _part(lower, j, 0, ld, c, T, C)
            acc -= tl.dot(left, tl.trans(right), input_precision="tf32x3")
        t = ready
    return acc


# Each variant takes seconds to compile.
@triton.jit(
    do_not_specialize=["k", "size", "b", "blocks"],
    do_not_specialize_on_alignment=["s", "d", "shift", "pivots", "squares"],
)
def _factor(
    s, d, shift, lower, w, pivots, squares, done, k, size, ld, b, blocks,
    INVERSE: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The first columns of the [k, k] last parts of [size, size] matrices, L's and W's in rows of
    ld; all pointers are to the corners of these parts."""
    pid = tl.program_id(0)
    matrix = pid % b
    tile = pid // b
    # Group g holds the tiles of column g of L from the diagonal down, then row g of W.
    g = 0
    tiles = blocks
    while tile >= tiles:
        tile -= tiles
        g += 1
        tiles = blocks if INVERSE else blocks - g
    wide = matrix.to(tl.int64)
    lower += wide * ld * ld
    w += wide * ld * ld
    s += wide * size * size
    d += wide * size
    l_done = done + matrix * 2 * blocks
    w_done = l_done + blocks
    if tile < blocks - g:
        i = g + tile
        acc = _scaled(s, d, shift + matrix, i, g, k, size, T)
        acc = _subtract(acc, lower, l_done, i, g, g, ld, T, C)
        if tile == 0:
            corner = (g * T).to(tl.int64) * (ld + 1)
            floor = tl.maximum(tl.load(shift + matrix), 1e-12)
            smallest, inverse = _factor_tile(
                acc, lower + corner, w + corner, ld, k - g * T, floor, T
            )
            tl.store(pivots + matrix * tl.cdiv(size, T) + g, smallest)
            if INVERSE:
                _put_squares(squares, wide, g, g, ld, tl.cdiv(size, T), inverse, T)
        else:
            wait(l_done + g, g + 1)
            inverse = _tile(w, g, g, ld, T)
            _put(lower, i, g, ld, tl.dot(acc, tl.trans(inverse), input_precision="tf32x3"), T)
        announce(l_done + i, g + 1)
    else:
        # W_gj = -W_gg sum over t of L_gt W_tj, t from j to g - 1
        j = tile - (blocks - g)
        acc = tl.zeros([T, T], dtype=tl.float32)
        wait(l_done + g, g + 1)
        t = j
        ready = j + 1  # W_jj is there
        while t < g:
            for u in tl.range(t, ready, num_stages=3):
                left = _tile(lower, g, u, ld, T)
                acc += tl.dot(left, _tile(w, u, j, ld, T), input_precision="tf32x3")
            t = ready
            if t < g:
                ready = tl.minimum(wait(w_done + j, t) + 1, g)
        inverse = _tile(w, g, g, ld, T)
        value = -tl.dot(inverse, acc, input_precision="tf32x3")
        _put(w, g, j, ld, value, T)
        _put_squares(squares, wide, g, j, ld, tl.cdiv(size, T), value, T)
        announce(w_done + j, g)
