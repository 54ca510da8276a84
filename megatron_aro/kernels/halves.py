"""float32 matrices as one or two float16 ones, for products at the rate of the latter.

float16 has TF32's 11 bits at twice its rate; what it lacks is range, which exact powers of two or
the scales of rows and columns that a step needs anyway supply: after them an entry 2^-24 of the
largest still has its 11 bits. ``hi + lo`` has 22 bits, and three products of halves (all but
lo x lo) are as good as a float32 one at several times its rate: `products`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron_aro.kernels.support import tl, triton, use_triton

LARGEST = 65504.0  # float16's
BLOCK_ROWS, BLOCK_COLUMNS = 32, 128


class Halves(NamedTuple):
    """[b, r, c] as ``hi``, or ``hi + lo``, both float16."""

    hi: Tensor
    lo: Tensor | None = None

    @property
    def mT(self) -> Halves:
        return Halves(self.hi.mT, None if self.lo is None else self.lo.mT)

    def columns(self, part: slice) -> Halves:
        return Halves(self.hi[:, :, part], None if self.lo is None else self.lo[:, :, part])


def halves(
    x_brc: Tensor,
    *,
    split: bool,
    scale_b: Tensor | None = None,
    rows_br: Tensor | None = None,
    columns_bc: Tensor | None = None,
    factor: float = 1.0,
    lower: bool = False,
    squares: Literal["rows", "columns", "all"] | None = None,
) -> tuple[Halves, Tensor | None]:
    """``factor * scale * diag(rows) x diag(columns)``; entries beyond float16 become its largest.

    Args:
        x_brc: [b, r, c] of any strides.
        split: ``hi + lo`` instead of ``hi`` alone.
        scale_b: where it is 0 the result is 0, whatever x holds.
        lower: zeros above the diagonal.
        squares: also return the sums of squares of the result's rows [b, r], columns [b, c] or
            all entries [b], of what the halves hold, in float32.
    """
    if not use_triton(x_brc):
        return _halves_twin(x_brc, split, scale_b, rows_br, columns_bc, factor, lower, squares)
    b, r, c = x_brc.shape
    vectors = [x_brc if v is None else v.contiguous() for v in (scale_b, rows_br, columns_bc)]
    hi = torch.empty(b, r, c, dtype=torch.float16, device=x_brc.device)
    lo = torch.empty_like(hi) if split else hi
    grid = triton.cdiv(c, BLOCK_COLUMNS), triton.cdiv(r, BLOCK_ROWS), b
    sums = x_brc
    if squares:
        sums = x_brc.new_empty(b, *((grid[1], c) if squares == "columns" else (grid[0], r)))
    _halves[grid](
        x_brc, hi, lo, *vectors, sums,
        r, c, *x_brc.stride(), factor, split, scale_b is not None, rows_br is not None,
        columns_bc is not None, lower, squares in ("rows", "all"), squares == "columns",
        BLOCK_ROWS, BLOCK_COLUMNS, LARGEST, num_warps=4,
    )  # fmt: skip
    if squares is None:
        return Halves(hi, lo if split else None), None
    dims = [1, 2] if squares == "all" else [1]
    return Halves(hi, lo if split else None), sums.sum(dim=dims)


def _halves_twin(
    x: Tensor, split: bool, scale: Tensor | None, rows: Tensor | None, columns: Tensor | None,
    factor: float, lower: bool, squares: str | None,
) -> tuple[Halves, Tensor | None]:  # fmt: skip
    """The same by torch."""
    if scale is not None:
        x = torch.where(scale[:, None, None] == 0, 0.0, x * scale[:, None, None])
    if rows is not None:
        x = x * rows[:, :, None]
    if columns is not None:
        x = x * columns[:, None, :]
    x = x * factor
    if lower:
        x = torch.tril(x)
    x = x.clamp(-LARGEST, LARGEST)
    hi = x.half()
    lo = (x - hi).half() if split else None
    if squares is None:
        return Halves(hi, lo), None
    kept = hi.float() if lo is None else hi.float() + lo.float()
    dims = {"rows": [2], "columns": [1], "all": [1, 2]}[squares]
    return Halves(hi, lo), kept.square().sum(dim=dims)


@triton.jit
def _halves(
    x, hi, lo, scale, row_scale, column_scale, sums, r, c, x_b, x_r, x_c, factor,
    SPLIT: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    LOWER: tl.constexpr, ROW_SUMS: tl.constexpr, COLUMN_SUMS: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(1) * R + tl.arange(0, R)
    cols = tl.program_id(0) * C + tl.arange(0, C)
    mask = (rows < r)[:, None] & (cols < c)[None, :]
    inside = mask
    if LOWER:
        inside = mask & (rows[:, None] >= cols[None, :])
    at = matrix * x_b + rows[:, None].to(tl.int64) * x_r + cols[None, :].to(tl.int64) * x_c
    value = tl.load(x + at, mask=inside, other=0.0)
    if SCALE:
        s = tl.load(scale + matrix)
        value = tl.where(s == 0, 0.0, value * s)
    if ROWS:
        value = value * tl.load(row_scale + matrix * r + rows, mask=rows < r, other=0.0)[:, None]
    if COLUMNS:
        value = value * tl.load(column_scale + matrix * c + cols, mask=cols < c, other=0.0)[None, :]
    value = value * factor
    value = tl.where(mask, value, 0.0)
    value = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
    high = value.to(tl.float16)
    out = matrix * r * c + rows[:, None].to(tl.int64) * c + cols[None, :]
    tl.store(hi + out, high, mask=mask)
    kept = high.to(tl.float32)
    if SPLIT:
        low = (value - kept).to(tl.float16)
        tl.store(lo + out, low, mask=mask)
        kept += low.to(tl.float32)
    if ROW_SUMS:
        at = (matrix * tl.num_programs(0) + tl.program_id(0)) * r + rows
        tl.store(sums + at, tl.sum(kept * kept, axis=1), mask=rows < r)
    if COLUMN_SUMS:
        at = (matrix * tl.num_programs(1) + tl.program_id(1)) * c + cols
        tl.store(sums + at, tl.sum(kept * kept, axis=0), mask=cols < c)
