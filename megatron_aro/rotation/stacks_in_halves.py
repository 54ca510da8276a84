"""The step of `stacks` in products of float16 halves, as `fast` has that of whole matrices.

X is written once and never again: what counts as zero and what f does are scales of its rows and
columns, which go into the halves that the next product reads. Shapes as in `stacks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_aro.config import AROConfig
from megatron_aro.rotation import fast, in_frame
from megatron_aro.rotation.pieces import (
    Look,
    Pieces,
    Stack,
    Total,
    column_factors,
    member_squares,
    momentum,
    row_floor,
    side_by_side,
    sinkhorn_scales,
    take_new_columns,
)
from megatron_aro.rotation.precision import product
from megatron_aro.rotation.scaling import ZERO_COLUMN, reciprocal_or_zero


@dataclass
class _Framed:
    """X = R^T M with what counts as zero still in it."""

    x_kw: Tensor
    squares_kw: Tensor
    """Of X's entries."""
    rows_k1: Tensor
    """1, and 0 for rows that count as zero."""
    columns_1w: Tensor
    """The same of columns."""


def covers(stacks: Sequence[Stack], config: AROConfig) -> bool:
    """Whether `look_ahead` is for these stacks, of which a scaling is looked ahead to."""
    return config.qr == "scqr2" and any(fast.covers(config, stack.rotation) for stack in stacks)


def covers_update(stack: Stack, config: AROConfig) -> bool:
    """Whether `updates` is for it: f is a scaling, and R f has the norm of f.

    Thin R is as orthonormal as the ladder asks for, 1e-2, which is not enough for that.
    """
    return fast.covers_update(config, stack.rotation) and in_frame.covers(
        config, stack.rotation[None]
    )


def look_ahead(
    stacks: Sequence[Stack], looks: Sequence[Look], config: AROConfig, total: Total
) -> None:
    """`stacks.look_ahead`, into the targets."""
    framed = _into_frames(stacks, looks, config, total)
    f = "eigen" if config.rotation == "eigen" else config.projection
    ps, qs = _scales(f, framed, config, total)
    for stack, look, x, p2, q2 in zip(stacks, looks, framed, ps, qs, strict=True):
        if not stack.pieces:
            continue
        q = q2.sqrt()
        if in_frame.covers(config, stack.rotation[None]):
            squares = (x.squares_kw @ q.mT) * x.rows_k1
            look.target += fast.gram_of_rows(x.x_kw, squares[:, 0], q.sqrt()[0])
        else:
            of_x = x.x_kw.mul_(p2.sqrt()).mul_(q)
            look.target += product(momentum(stack, look), of_x.mT, config.precision)
            take_new_columns(stack, look, x.rows_k1)


def updates(
    stacks: Sequence[Stack], looks: Sequence[Look], config: AROConfig, total: Total
) -> Pieces:
    """`stacks.updates`."""
    framed = _into_frames(stacks, looks, config, total)
    ps, qs = _scales(config.projection, framed, config, total)
    norms2 = [
        member_squares(stack, (q2 * (p2.mT @ x.squares_kw))[0])
        for stack, x, p2, q2 in zip(stacks, framed, ps, qs, strict=True)
    ]
    found: Pieces = []
    for stack, x, p2, q2, norm2 in zip(stacks, framed, ps, qs, total(norms2, "sum"), strict=True):
        del x.squares_kw
        if not stack.pieces:
            found.append([])
            continue
        # Of RMS one no entry is larger than the root of a member's elements.
        p, q = p2.sqrt()[:, 0], q2.sqrt()[0] * column_factors(stack, norm2, 1.0)
        d_mw = fast.out_of_frame(stack.rotation, x.x_kw, p, q, config.update_rms)
        found.append(list(d_mw.split(stack.widths, dim=1)))
    return found


def _into_frames(
    stacks: Sequence[Stack], looks: Sequence[Look], config: AROConfig, total: Total
) -> list[_Framed]:
    xs, sums = [], []
    for stack, look in zip(stacks, looks, strict=True):
        r = stack.rotation
        x, whole2 = r.new_zeros(r.shape[1], 0), r.new_zeros(())
        if stack.pieces:
            factor = look.scale.masked_fill(~look.active, 0.0)
            x, whole2 = fast.into_frame(r, side_by_side(stack), factor, config)
        xs.append(x)
        row2 = torch.linalg.vector_norm(x, dim=1, keepdim=True).square()
        sums.append(torch.cat([row2, whole2.view(1, 1)]))
    framed = []
    for stack, x, of_all in zip(stacks, xs, total(sums, "sum"), strict=True):
        row2, whole2 = of_all[:-1], of_all[-1:]
        rows = (row2 > 0) & (row2 >= row_floor(stack, whole2, config))
        rows_k1 = rows.to(x)
        squares = x.square()
        columns = rows_k1.mT @ squares >= ZERO_COLUMN**2 * (rows_k1 * row2).sum()
        framed.append(_Framed(x, squares, rows_k1, columns.to(x)))
    return framed


def _scales(
    f: str, framed: list[_Framed], config: AROConfig, total: Total
) -> tuple[list[Tensor], list[Tensor]]:
    """The squares of p [k, 1] and q [1, w] with f(X) = diag(p) X diag(q)."""
    ps, qs = [x.rows_k1 for x in framed], [x.columns_1w for x in framed]
    if f == "eigen":
        return ps, [torch.ones_like(q) for q in qs]
    squares = [x.squares_kw for x in framed]
    if f == "sinkhorn":
        return sinkhorn_scales(squares, ps, qs, config.sinkhorn_iters, total)
    sums = total([s @ q.mT for s, q in zip(squares, qs, strict=True)], "sum")
    return [reciprocal_or_zero(row2) * p for row2, p in zip(sums, ps, strict=True)], qs
