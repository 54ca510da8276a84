"""One ARO step on stacks, whose columns lie in pieces on several processes.

A stack is a matrix that no process holds whole, or several matrices side by side that share a
rotation (spec, "Rotation sharing"). Of other pieces a piece needs the sums of rows only, and the
matrix to be orthonormalised is a sum over pieces, m x k: nothing as long as the columns travels.
Where all pieces are in one process the result is that of `step` on the whole.

A step is `look_ahead`, then on one process of each stack `turn` with the sum of what all processes
looked ahead to, then `updates` on each with the new rotation. All processes name all stacks, in
the same order, those that they have no pieces of too.

Shapes: m rows (the rotated side), n columns over all processes, k = min(m, n). A piece has n_i of
the columns, M [m, n_i]; X and Y are R^T M [k, n_i]. Row sums are [k, 1].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_aro.config import AROConfig
from megatron_aro.rotation import in_frame
from megatron_aro.rotation.orthonormal import Orthonormal, extra_pass, first_attempt, householder
from megatron_aro.rotation.policies import polar_factor
from megatron_aro.rotation.precision import ieee_products, product, unit_roundoff
from megatron_aro.rotation.projections import ADAM_EPS, second_moment_after
from megatron_aro.rotation.scaling import (
    ZERO_COLUMN,
    largest_entry,
    reciprocal_or_zero,
    reciprocal_power_of_two,
)

Total = Callable[[list[Tensor], str], list[Tensor]]
"""Elementwise "sum" or "max" over processes, of tensors that have the same shapes on each."""

Pieces = list[list[Tensor]]  # a tensor for each piece of each stack


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


def covers(config: AROConfig) -> bool:
    """Whether stacks can be stepped so: rgd would need a sum over processes in each ascent."""
    return config.rotation != "rgd"


@torch.no_grad()
def look_ahead(stacks: Sequence[Stack], config: AROConfig, total: Total) -> list[Look]:
    """Steps 2 and 3 as far as each process goes alone; nothing waits for the device.

    The state of f is not advanced. With rotation "none" there is nothing to turn.
    """
    looks = _frames(stacks, total)
    if config.rotation == "none":
        return looks
    with _own_precision(looks):
        xs, rows2 = _into_frames(stacks, looks, config, total)
        within = [in_frame.covers(config, stack.rotation[None]) for stack in stacks]
        fs = xs
        if config.rotation != "eigen":
            _zero_small_columns(xs, rows2)
            fs, _ = _project(stacks, xs, looks, config, total, within)
        for stack, look, x, f, row2, is_within in zip(
            stacks, looks, xs, fs, rows2, within, strict=True
        ):
            for piece, x_kn, f_kn in zip(stack.pieces, x, f, strict=True):
                left = x_kn if is_within else _momentum(piece, look)
                look.target += product(left, f_kn.mT, config.precision)
            if stack.pieces and not is_within:
                _take_new_columns(stack, look, row2)
    return looks


@torch.no_grad()
def turn(rotation_bmk: Tensor, looks: Sequence[Look], fallbacks: Tensor, config: AROConfig) -> None:
    """Step 3 on the process that answers for these stacks of one shape; rotations in place.

    Waits for the device once, and again for each rung of the ladder that some must climb.

    Args:
        rotation_bmk: of the stacks; one that fails, or whose momentum is zero, stays as it is.
        looks: with targets summed over processes.
        fallbacks: int64 [b, len(FALLBACK_RUNGS)]; increased in place.
    """
    target = torch.stack([look.target for look in looks])
    active_b = torch.stack([look.active for look in looks])
    within = in_frame.covers(config, rotation_bmk)
    if within:  # S, with rows and columns divided by what its diagonal says
        norms_bm1 = target.diagonal(dim1=1, dim2=2).sqrt()[:, :, None]
        target *= reciprocal_or_zero(norms_bm1)
        target *= reciprocal_or_zero(norms_bm1).mT

    def first(i: Tensor) -> Orthonormal:
        if within:
            return in_frame.from_gram(rotation_bmk[i], target[i], norms_bm1[i], config)
        return first_attempt(target[i], config)

    def extra(i: Tensor) -> Orthonormal:
        return in_frame.one_more(first(i), config) if within else extra_pass(target[i], config)

    def last(i: Tensor) -> Orthonormal:
        return householder(rotation_bmk[i] @ (norms_bm1[i] * target[i]) if within else target[i])

    with _own_precision(looks):
        if config.rotation == "polar":
            target = polar_factor(target, rotation_bmk)
        fallbacks[:, 0] += active_b
        everyone = torch.arange(len(looks), device=target.device)
        failed = everyone[_failures(rotation_bmk, everyone, first(everyone), active_b)]
        if len(failed) and config.qr == "scqr2":
            tried = failed
            failed = failed[_failures(rotation_bmk, failed, extra(failed))]
            fallbacks[tried, 1] += 1
            fallbacks[failed, 1] -= 1
        if len(failed) and config.qr != "qr":
            fallbacks[failed, 2] += 1
            failed = failed[_failures(rotation_bmk, failed, last(failed))]
        fallbacks[failed, 3] += 1


def _failures(
    rotation_bmk: Tensor, index: Tensor, answer: Orthonormal, active_b: Tensor | None = None
) -> Tensor:
    """Which of these matrices still want a rotation; the others, if active, take their answer."""
    failed_b = answer.failed_b
    keep_b = failed_b
    if active_b is not None:
        failed_b, keep_b = failed_b & active_b, failed_b | ~active_b
    rotation_bmk[index] = torch.where(keep_b[:, None, None], rotation_bmk[index], answer.q_bmk)
    return failed_b


@torch.no_grad()
def updates(
    stacks: Sequence[Stack], looks: Sequence[Look], config: AROConfig, total: Total
) -> Pieces:
    """Steps 4 and 5 for each piece, U [m, n_i], in the frame that the rotations now hold.

    The RMS is ``config.update_rms`` over each whole member. Second moments advance in place.
    """
    with _own_precision(looks):
        ys, rows2 = _into_frames(stacks, looks, config, total)
        _zero_small_columns(ys, rows2)
        ds, moments = _project(stacks, ys, looks, config, total)
        norms2 = []
        for stack, look, d_pieces, of_stack in zip(stacks, looks, ds, moments, strict=True):
            norm2 = look.scale.new_zeros(len(stack.columns))
            for i, piece in enumerate(stack.pieces):
                if piece.second_moment is not None:
                    piece.second_moment.copy_(
                        torch.where(look.finite, of_stack[i], piece.second_moment)
                    )
                if config.rotation != "none":
                    d_pieces[i] = product(stack.rotation, d_pieces[i], config.precision)
                norm2[piece.member] += d_pieces[i].square().sum()
            norms2.append(norm2)
        for stack, d_pieces, norm2 in zip(stacks, ds, total(norms2, "sum"), strict=True):
            good = (norm2 > 0) & norm2.isfinite()
            for piece, d_mn in zip(stack.pieces, d_pieces, strict=True):
                numel = d_mn.shape[0] * stack.columns[piece.member]
                d_mn *= config.update_rms * math.sqrt(numel) / norm2[piece.member].sqrt()
                d_mn.masked_fill_(~good[piece.member], 0.0)
    return ds


@contextmanager
def _own_precision(looks: Sequence[Look]) -> Iterator[None]:
    devices = {look.target.device.type for look in looks} or {"cpu"}
    with torch.autocast(devices.pop(), enabled=False), ieee_products():
        yield


def _frames(stacks: Sequence[Stack], total: Total) -> list[Look]:
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


def _momentum(piece: Piece, look: Look) -> Tensor:
    return (piece.momentum * look.scale).masked_fill_(~look.active, 0.0)


def _into_frames(
    stacks: Sequence[Stack], looks: Sequence[Look], config: AROConfig, total: Total
) -> tuple[Pieces, list[Tensor]]:
    """R^T M and the squared norms of its whole rows, as `policies.into_frame`.

    With rotation "none" M itself, with all of its rows.
    """
    xs, sums = [], []
    for stack, look in zip(stacks, looks, strict=True):
        momenta = [_momentum(piece, look) for piece in stack.pieces]
        whole2 = sum((m.square().sum() for m in momenta), look.scale.new_zeros(()))
        if config.rotation != "none":
            momenta = [product(stack.rotation.mT, m, config.precision) for m in momenta]
        rows = _sum_of(stack, [_squares(x) for x in momenta], config)
        sums.append(torch.cat([rows, whole2.view(1, 1)]))
        xs.append(momenta)
    rows2 = []
    for stack, x, of_all in zip(stacks, xs, total(sums, "sum"), strict=True):
        row2, whole2 = of_all[:-1], of_all[-1:]
        if config.rotation != "none":
            u = unit_roundoff(stack.rotation, config.precision)
            small = row2 < whole2 * (4.0 * u * u / stack.rotation.shape[0])
            row2 = row2.masked_fill(small, 0.0)
            for x_kn in x:
                x_kn.masked_fill_(small, 0.0)
        rows2.append(row2)
    return xs, rows2


def _squares(x_kn: Tensor) -> Tensor:
    return x_kn.square().sum(dim=1, keepdim=True)


def _sum_of(stack: Stack, rows: list[Tensor], config: AROConfig) -> Tensor:
    m, k = stack.rotation.shape
    return sum(rows, stack.rotation.new_zeros(m if config.rotation == "none" else k, 1))


def _take_new_columns(stack: Stack, look: Look, row2: Tensor) -> None:
    """Where a thin R has nothing of M in its span, A = M, as in `policies.target`."""
    m, k = stack.rotation.shape
    if m == k:
        return
    found = row2.sum() > 0
    look.target.masked_fill_(~found, 0.0)
    for piece in stack.pieces:
        stop = piece.column + piece.momentum.shape[1]
        look.target[:, piece.column : stop] += _momentum(piece, look).masked_fill_(found, 0.0)


def _zero_small_columns(xs: Pieces, rows2: list[Tensor]) -> None:
    """As `scaling.zero_small_columns`, in place: the whole is known from its rows."""
    for x, row2 in zip(xs, rows2, strict=True):
        whole = row2.sum().sqrt()
        for x_kn in x:
            norms = torch.linalg.vector_norm(x_kn, dim=0, keepdim=True)
            x_kn.masked_fill_(norms < ZERO_COLUMN * whole, 0.0)


def _project(
    stacks: Sequence[Stack],
    xs: Pieces,
    looks: Sequence[Look],
    config: AROConfig,
    total: Total,
    without_rows: Sequence[bool] = (),
) -> tuple[Pieces, list[list[Tensor]]]:
    """f and the second moments that result, as `projections.project` without its zero rule.

    Args:
        without_rows: stacks for which columns alone are to be scaled, by sinkhorn's Q and not by P.
    """
    none: list[list[Tensor]] = [[] for _ in stacks]
    if config.projection == "sign":
        return [[x_kn.sign() for x_kn in x] for x in xs], none
    if config.projection == "rownorm":
        sums = [
            _sum_of(stack, [_squares(x_kn) for x_kn in x], config)
            for stack, x in zip(stacks, xs, strict=True)
        ]
        rows = [reciprocal_or_zero(row2).sqrt() for row2 in total(sums, "sum")]
        return [
            x if any(without_rows[i : i + 1]) else [x_kn * row for x_kn in x]
            for i, (x, row) in enumerate(zip(xs, rows, strict=True))
        ], none
    if config.projection == "sinkhorn":
        ps, qs = _sinkhorn_scales(stacks, xs, config, total)
        fs = []
        for i, (x, p2, q) in enumerate(zip(xs, ps, qs, strict=True)):
            f = [x_kn * q2.sqrt() for x_kn, q2 in zip(x, q, strict=True)]
            if not any(without_rows[i : i + 1]):
                f = [f_kn * p2.sqrt() for f_kn in f]
            fs.append(f)
        return fs, none
    return _adam(stacks, xs, looks, config, total)


def _sinkhorn_scales(
    stacks: Sequence[Stack], xs: Pieces, config: AROConfig, total: Total
) -> tuple[list[Tensor], Pieces]:
    """p^2 of whole rows and q^2 of the pieces' columns, as `projections.sinkhorn_scales`."""
    squares = [[x_kn.square() for x_kn in x] for x in xs]
    ps = [torch.ones_like(_sum_of(stack, [], config)) for stack in stacks]
    qs = [[torch.ones_like(s[:1]) for s in of_stack] for of_stack in squares]
    for _ in range(config.sinkhorn_iters):
        sums = [
            _sum_of(stack, [s @ q2.mT for s, q2 in zip(of_stack, q, strict=True)], config)
            for stack, of_stack, q in zip(stacks, squares, qs, strict=True)
        ]
        qs = [
            [reciprocal_or_zero(p2.mT @ s) for s in of_stack]
            for p2, of_stack in zip(ps, squares, strict=True)
        ]
        ps = [reciprocal_or_zero(rows) for rows in total(sums, "sum")]
    return ps, qs


def _adam(
    stacks: Sequence[Stack],
    xs: Pieces,
    looks: Sequence[Look],
    config: AROConfig,
    total: Total,
) -> tuple[Pieces, list[list[Tensor]]]:
    """As `projections.adam`, brought to one scale over all pieces of a stack."""
    fs, moments, largest = [], [], []
    for stack, x, look in zip(stacks, xs, looks, strict=True):
        f, of_stack = [], []
        for piece, x_kn in zip(stack.pieces, x, strict=True):
            assert piece.second_moment is not None, "adam has a second moment for each piece"
            x_kn = x_kn / look.scale
            v = second_moment_after(x_kn, piece.second_moment, config.beta2)
            f.append(x_kn / (v.sqrt() + ADAM_EPS))
            of_stack.append(v)
        fs.append(f)
        moments.append(of_stack)
        entries = [largest_entry(f_kn[None]).view(()) for f_kn in f]
        largest.append(torch.stack([look.scale.new_zeros(()), *entries]).amax())
    factors = [reciprocal_power_of_two(most) for most in total(largest, "max")]
    return [[f_kn * factor for f_kn in f] for f, factor in zip(fs, factors, strict=True)], moments
