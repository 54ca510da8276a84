"""Stacks of matrices whose columns lie in pieces on several processes: what of them is where.

`stacks` says what a stack is for, and the shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_aro.config import AROConfig
from megatron_aro.rotation.precision import unit_roundoff
from megatron_aro.rotation.scaling import (
    largest_entry,
    reciprocal_power_of_two,
    squared_scale,
)

Total = Callable[[list[Tensor], str], list[Tensor]]
"""Elementwise "sum" or "max" over processes, of tensors that have the same shapes on each."""

Pieces = list[list[Tensor]]
"""A tensor for each piece of each stack."""


@dataclass
class Piece:
    """Some columns of one member of a stack."""

    momentum: Tensor
    """[m, n_i], float32 or float64, already advanced by step 1; read only, any strides."""
    member: int = 0
    column: int = 0
    """The first of these columns in the stack."""
    second_moment: Tensor | None = None
    """[k, n_i] ([m, n_i] for rotation "none"), projection "adam" only; overwritten in place."""


@dataclass
class Stack:
    """What this process has of a stack."""

    rotation: Tensor
    """[m, k], on every process that has pieces; on others anything of that shape, expanded say."""
    columns: tuple[int, ...]
    """Of each member, over all processes."""
    pieces: list[Piece]

    @property
    def widths(self) -> list[int]:
        return [piece.momentum.shape[1] for piece in self.pieces]


@dataclass
class Look:
    """A stack between its look ahead and its updates; all but the target alike on all processes."""

    target: Tensor
    """[m, k], this process's share of what is to be orthonormalised: A, or where `in_frame` covers
    the stack S = X Q X^T. Its sum over processes is what `turn` needs. Zeros in the memory of one
    where the process has no pieces."""
    scale: Tensor
    """[], the power of two by which the momentum is multiplied."""
    finite: Tensor
    """bool []"""
    active: Tensor
    """bool []: finite and not zero, nor denormal throughout."""


def frames(stacks: Sequence[Stack], total: Total) -> list[Look]:
    """As `step._Frame`, of whole stacks."""
    largest = []
    for stack in stacks:
        entries = [largest_entry(piece.momentum[None]).view(()) for piece in stack.pieces]
        most = torch.stack([stack.rotation.new_zeros(()), *entries]).amax()
        # What a maximum over ranks would make of NaN is the library's choice.
        largest.append(most.nan_to_num(nan=math.inf, posinf=math.inf))
    looks = []
    for stack, most in zip(stacks, total(largest, "max"), strict=True):
        finite = most.isfinite()
        active = finite & (most >= torch.finfo(most.dtype).tiny)
        # Without pieces here a share of nothing, which takes no memory.
        share = stack.rotation.new_zeros(()).expand(stack.rotation.shape)
        if stack.pieces:
            share = share.clone(memory_format=torch.contiguous_format)
        looks.append(Look(share, reciprocal_power_of_two(most), finite, active))
    return looks


def side_by_side(stack: Stack) -> Tensor:
    """M [m, w], of the pieces of a stack that has some here; not to be written to."""
    if len(stack.pieces) == 1:
        return stack.pieces[0].momentum
    return torch.cat([piece.momentum for piece in stack.pieces], dim=1)


def momentum(stack: Stack, look: Look) -> Tensor:
    """M [m, w], scaled."""
    if not stack.pieces:
        return stack.rotation.new_zeros(stack.rotation.shape[0], 0)
    return (side_by_side(stack) * look.scale).masked_fill_(~look.active, 0.0)


def row_floor(stack: Stack, whole2: Tensor, config: AROConfig) -> Tensor:
    """The squared norm below which rows of X count as zero, as `policies.into_frame` has it.

    Args:
        whole2: M's, of the whole stack.
    """
    u = unit_roundoff(stack.rotation, config.precision)
    return whole2 * (4.0 * u * u / stack.rotation.shape[0])


def sinkhorn_scales(
    squares: list[Tensor], ps: list[Tensor], qs: list[Tensor], iterations: int, total: Total
) -> tuple[list[Tensor], list[Tensor]]:
    """p^2 of whole rows and q^2 of X's columns, as `projections.sinkhorn_scales`.

    Args:
        squares: of X's entries.
        ps: [k, 1], 1, or 0 for rows that are to count as zero; qs: [1, w], the same of columns.
    """
    rows, columns = ps, qs
    for _ in range(iterations):
        sums = [s @ q2.mT for s, q2 in zip(squares, qs, strict=True)]
        qs = [
            squared_scale(p2.mT @ s) * own for p2, s, own in zip(ps, squares, columns, strict=True)
        ]
        ps = [squared_scale(row2) * own for row2, own in zip(total(sums, "sum"), rows, strict=True)]
    return ps, qs


def take_new_columns(stack: Stack, look: Look, row2: Tensor) -> None:
    """Where a thin R has nothing of M in its span, A = M, as in `policies.target`."""
    m, k = stack.rotation.shape
    if m == k:
        return
    found = row2.sum() > 0
    look.target.masked_fill_(~found, 0.0)
    momenta = momentum(stack, look).masked_fill_(found, 0.0).split(stack.widths, dim=1)
    for piece, m_mn in zip(stack.pieces, momenta, strict=True):
        look.target[:, piece.column : piece.column + m_mn.shape[1]] += m_mn


def member_squares(stack: Stack, columns2_w: Tensor) -> Tensor:
    """This process's share of the sum of squares of each member, from that of its columns."""
    norm2 = columns2_w.new_zeros(len(stack.columns))
    for piece, of_piece in zip(stack.pieces, columns2_w.split(stack.widths), strict=True):
        norm2[piece.member] += of_piece.sum()
    return norm2


def column_factors(stack: Stack, norm2: Tensor, rms: float) -> Tensor:
    """By which each column [w] is to be multiplied, so that its member has this RMS; 0 where the
    member has no size.

    Args:
        norm2: of whole members.
    """
    good = (norm2 > 0) & norm2.isfinite()
    inverse = torch.where(good, norm2.sqrt().reciprocal(), 0.0)
    factors = [norm2[:0]]
    for piece, width in zip(stack.pieces, stack.widths, strict=True):
        # A tensor of all members' sizes would be copied to the device, for which the host waits.
        size = rms * math.sqrt(stack.rotation.shape[0] * stack.columns[piece.member])
        factors.append((size * inverse[piece.member]).expand(width))
    return torch.cat(factors)
