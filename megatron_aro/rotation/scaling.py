"""Exact rescaling and the spec's rules for what counts as zero.

Shapes: b matrices in a batch, each k x n or m x n.
"""

from __future__ import annotations

import torch
from torch import Tensor

# dtype -> (integer of the same width, bits of the mantissa, bias of the exponent)
_LAYOUT = {
    torch.float32: (torch.int32, 23, 127),
    torch.float64: (torch.int64, 52, 1023),
}
DTYPES = tuple(_LAYOUT)

# Columns of f's input below this share of the whole count as zero (spec, projections).
ZERO_COLUMN = 1e-7


def reciprocal_power_of_two(largest: Tensor) -> Tensor:
    """The power of two s that brings ``largest`` near one: 1 <= s * largest < 4.

    ``largest`` holds finite values >= 0 of any shape, float32 or float64. Made from the exponent
    bits, so that s is exact, and so is every product with it. For denormals s is the greatest
    power of two, for zero it is harmless.
    """
    integer, mantissa, bias = _LAYOUT[largest.dtype]
    exponent = largest.view(integer) >> mantissa
    return ((2 * bias - exponent).clamp_(min=1) << mantissa).view(largest.dtype)


def largest_entry(x_bmn: Tensor) -> Tensor:
    """max |x| of each matrix, [b, 1, 1]; NaN or Inf exactly where the matrix is not finite."""
    return torch.linalg.vector_norm(x_bmn, float("inf"), dim=(1, 2), keepdim=True)


def to_unit_scale(x_bmn: Tensor) -> Tensor:
    """``x`` times an exact power of two per matrix, so that squares and products are in range."""
    return x_bmn * reciprocal_power_of_two(largest_entry(x_bmn))


def zero_small_rows(x_bkn: Tensor, threshold_b11: Tensor) -> Tensor:
    """Rows with an L2 norm below the threshold become exact zeros."""
    norms = torch.linalg.vector_norm(x_bkn, dim=2, keepdim=True)
    return x_bkn.masked_fill(norms < threshold_b11, 0.0)


def zero_small_columns(x_bkn: Tensor) -> Tensor:
    """Columns with an L2 norm below ZERO_COLUMN of the whole become exact zeros."""
    norms = torch.linalg.vector_norm(x_bkn, dim=1, keepdim=True)
    whole = torch.linalg.vector_norm(norms, dim=2, keepdim=True)
    return x_bkn.masked_fill(norms < ZERO_COLUMN * whole, 0.0)


def reciprocal_or_zero(b: Tensor) -> Tensor:
    """``1 / b`` for b >= 0, and 0 where b is zero or denormal, whose reciprocal may overflow."""
    return b.reciprocal().masked_fill_(b < torch.finfo(b.dtype).tiny, 0.0)


def squared_scale(b: Tensor) -> Tensor:
    """Sinkhorn's ``1 / b``, 0 for 0, and never so large that sums and reciprocals leave the dtype:
    where the iterations do not converge scales grow without end, f does not."""
    return reciprocal_or_zero(b).clamp_(max=1e-8 * torch.finfo(b.dtype).max)
