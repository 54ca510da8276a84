"""One ARO step on stacks, whose columns lie in pieces on several processes.

A stack is a matrix that no process holds whole, or several matrices side by side that share a
rotation (spec, "Rotation sharing"). Of other pieces a piece needs the sums of rows only, and the
matrix to be orthonormalised is a sum over pieces, m x k: nothing as long as the columns travels.
Where all pieces are in one process the result is that of `step` on the whole.

A step is `look_ahead`, then on one process of each stack `turn` with the sum of what all processes
looked ahead to, then `updates` on each with the new rotation. All processes name all stacks, in
the same order, those that they have no pieces of too.

Shapes: m rows (the rotated side), n columns over all processes, k = min(m, n). A piece has n_i of
the columns, [m, n_i]; M [m, w], X and Y = R^T M [k, w] are of all pieces that a process has of a
stack side by side, of no columns where it has none. Row sums are [k, 1].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_aro.config import AROConfig
from megatron_aro.rotation import fast, in_frame, stacks_in_halves
from megatron_aro.rotation.orthonormal import Orthonormal, extra_pass, first_attempt, householder
from megatron_aro.rotation.pieces import (
    Look,
    Pieces,
    Stack,
    Total,
    column_factors,
    frames,
    member_squares,
    momentum,
    row_floor,
    sinkhorn_scales,
    take_new_columns,
)
from megatron_aro.rotation.policies import polar_factor
from megatron_aro.rotation.precision import ieee_products, product
from megatron_aro.rotation.projections import ADAM_EPS, second_moment_after
from megatron_aro.rotation.scaling import (
    ZERO_COLUMN,
    largest_entry,
    reciprocal_or_zero,
    reciprocal_power_of_two,
)


def covers(config: AROConfig) -> bool:
    """Whether stacks can be stepped so: rgd would need a sum over processes in each ascent."""
    return config.rotation != "rgd"


@torch.no_grad()
def look_ahead(stacks: Sequence[Stack], config: AROConfig, total: Total) -> list[Look]:
    """Steps 2 and 3 as far as each process goes alone; nothing waits for the device.

    The state of f is not advanced. With rotation "none" there is nothing to turn.
    """
    looks = frames(stacks, total)
    if config.rotation == "none":
        return looks
    with _own_precision(looks):
        if stacks_in_halves.covers(stacks, config):
            stacks_in_halves.look_ahead(stacks, looks, config, total)
            return looks
        xs, rows2 = _into_frames(stacks, looks, config, total)
        within = [in_frame.covers(config, stack.rotation[None]) for stack in stacks]
        fs = xs
        if config.rotation != "eigen":
            _zero_small_columns(xs, rows2)
            fs, _ = _project(stacks, xs, looks, config, total, within)
        for stack, look, f, row2, is_within in zip(stacks, looks, fs, rows2, within, strict=True):
            if not stack.pieces:
                continue
            if is_within:
                look.target += f @ f.mT
            else:
                look.target += product(momentum(stack, look), f.mT, config.precision)
                take_new_columns(stack, look, row2)
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
    halved = fast.covers(config, rotation_bmk)
    if within:  # S, with rows and columns divided by what its diagonal says
        norms_bm1 = target.diagonal(dim1=1, dim2=2).sqrt()[:, :, None]
        target *= reciprocal_or_zero(norms_bm1)
        target *= reciprocal_or_zero(norms_bm1).mT

    def first(i: Tensor) -> Orthonormal:
        if not within:
            return first_attempt(target[i], config)
        from_gram = fast.from_gram if halved else in_frame.from_gram
        return from_gram(rotation_bmk[i], target[i], norms_bm1[i], config)

    def extra(i: Tensor) -> Orthonormal:
        if not within:
            return extra_pass(target[i], config)
        return fast.one_more(first(i)) if halved else in_frame.one_more(first(i), config)

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
    covered = [stacks_in_halves.covers_update(stack, config) for stack in stacks]
    if any(covered) and not all(covered):  # each kind by itself, on all processes alike
        of_kind: dict[int, list[Tensor]] = {}
        for kind in (True, False):
            own = [i for i, of_stack in enumerate(covered) if of_stack is kind]
            found = updates([stacks[i] for i in own], [looks[i] for i in own], config, total)
            of_kind.update(zip(own, found, strict=True))
        return [of_kind[i] for i in range(len(stacks))]
    with _own_precision(looks):
        if any(covered):
            return stacks_in_halves.updates(stacks, looks, config, total)
        ys, rows2 = _into_frames(stacks, looks, config, total)
        _zero_small_columns(ys, rows2)
        ds, moments = _project(stacks, ys, looks, config, total)
        norms2 = []
        for i, (stack, look) in enumerate(zip(stacks, looks, strict=True)):
            if config.projection == "adam":
                _keep(stack, look, moments[i])
            if config.rotation != "none":
                ds[i] = product(stack.rotation, ds[i], config.precision)
            columns2 = torch.linalg.vector_norm(ds[i], dim=0).square()
            norms2.append(member_squares(stack, columns2))
        for stack, d_mw, norm2 in zip(stacks, ds, total(norms2, "sum"), strict=True):
            factor_w = column_factors(stack, norm2, config.update_rms)
            d_mw.mul_(factor_w).masked_fill_(factor_w == 0, 0.0)
        return [list(d.split(stack.widths, dim=1)) for stack, d in zip(stacks, ds, strict=True)]


def _keep(stack: Stack, look: Look, moment: Tensor) -> None:
    for piece, v in zip(stack.pieces, moment.split(stack.widths, dim=1), strict=True):
        assert piece.second_moment is not None
        piece.second_moment.copy_(torch.where(look.finite, v, piece.second_moment))


@contextmanager
def _own_precision(looks: Sequence[Look]) -> Iterator[None]:
    devices = {look.target.device.type for look in looks} or {"cpu"}
    with torch.autocast(devices.pop(), enabled=False), ieee_products():
        yield


def _into_frames(
    stacks: Sequence[Stack], looks: Sequence[Look], config: AROConfig, total: Total
) -> tuple[list[Tensor], list[Tensor]]:
    """R^T M and the squared norms of its whole rows, as `policies.into_frame`.

    With rotation "none" M itself, with all of its rows.
    """
    xs, sums = [], []
    for stack, look in zip(stacks, looks, strict=True):
        x = momentum(stack, look)
        whole2 = torch.linalg.vector_norm(x).square()
        if config.rotation != "none":
            x = product(stack.rotation.mT, x, config.precision)
        sums.append(torch.cat([_squares(x), whole2.view(1, 1)]))
        xs.append(x)
    rows2 = []
    for stack, x, of_all in zip(stacks, xs, total(sums, "sum"), strict=True):
        row2, whole2 = of_all[:-1], of_all[-1:]
        if config.rotation != "none":
            small = row2 < row_floor(stack, whole2, config)
            row2 = row2.masked_fill(small, 0.0)
            x.masked_fill_(small, 0.0)
        rows2.append(row2)
    return xs, rows2


def _squares(x_kw: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x_kw, dim=1, keepdim=True).square()


def _zero_small_columns(xs: list[Tensor], rows2: list[Tensor]) -> None:
    """As `scaling.zero_small_columns`, in place: the whole is known from its rows."""
    for x, row2 in zip(xs, rows2, strict=True):
        norms = torch.linalg.vector_norm(x, dim=0)
        x.masked_fill_(norms < ZERO_COLUMN * row2.sum().sqrt(), 0.0)


def _project(
    stacks: Sequence[Stack],
    xs: list[Tensor],
    looks: Sequence[Look],
    config: AROConfig,
    total: Total,
    without_rows: Sequence[bool] = (),
) -> tuple[list[Tensor], list[Tensor]]:
    """f, in the place of X, and the second moments that result, as `projections.project` without
    its zero rule.

    Args:
        without_rows: stacks for which Z with Z Z^T = X Q X^T is to be found, f(X) = P X Q.
    """
    if config.projection == "adam":
        return _adam(stacks, xs, looks, config, total)
    if config.projection == "sign":
        return [x.sign_() for x in xs], []
    if config.projection == "rownorm":
        p2s = [reciprocal_or_zero(row2) for row2 in total([_squares(x) for x in xs], "sum")]
    else:
        squares = [x.square() for x in xs]
        rows = [x.new_ones(len(x), 1) for x in xs]
        columns = [x.new_ones(1, x.shape[1]) for x in xs]
        p2s, q2s = sinkhorn_scales(squares, rows, columns, config.sinkhorn_iters, total)
        del squares
        for i, (x, q2) in enumerate(zip(xs, q2s, strict=True)):
            x *= q2.sqrt().sqrt() if any(without_rows[i : i + 1]) else q2.sqrt()
    for i, (x, p2) in enumerate(zip(xs, p2s, strict=True)):
        if not any(without_rows[i : i + 1]):
            x *= p2.sqrt()
    return xs, []


def _adam(
    stacks: Sequence[Stack],
    xs: list[Tensor],
    looks: Sequence[Look],
    config: AROConfig,
    total: Total,
) -> tuple[list[Tensor], list[Tensor]]:
    """As `projections.adam`, brought to one scale over all pieces of a stack."""
    fs, moments, largest = [], [], []
    for stack, x, look in zip(stacks, xs, looks, strict=True):
        of_pieces = [p.second_moment for p in stack.pieces if p.second_moment is not None]
        assert len(of_pieces) == len(stack.pieces), "adam has a second moment for each piece"
        v = torch.cat([x[:, :0], *of_pieces], dim=1)
        x = x / look.scale
        v = second_moment_after(x, v, config.beta2)
        x /= v.sqrt().add_(ADAM_EPS)
        largest.append(
            largest_entry(x[None]).view(()) if stack.pieces else look.scale.new_zeros(())
        )
        fs.append(x)
        moments.append(v)
    factors = [reciprocal_power_of_two(most) for most in total(largest, "max")]
    return [f.mul_(factor) for f, factor in zip(fs, factors, strict=True)], moments
