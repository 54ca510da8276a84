"""One ARO step on batches of same-shaped matrices (spec, "One matrix"; arXiv 2602.09006).

Shapes: b matrices in a batch, m rows (the rotated side), n columns, k = min(m, n). M is the
momentum [b, m, n], R the rotation [b, m, k], X and Y are R^T M [b, k, n], D and U [b, m, n].

Step 1 is ``advance_momentum``, steps 2 to 5 are ``compute_updates``, step 6 is ``apply_updates``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from megatron_aro.config import AROConfig
from megatron_aro.kernels.support import use_triton
from megatron_aro.rotation import fast, in_frame
from megatron_aro.rotation.orthonormal import (
    Orthonormal,
    extra_pass,
    first_attempt,
    householder,
)
from megatron_aro.rotation.policies import into_frame, target
from megatron_aro.rotation.precision import ieee_products, product
from megatron_aro.rotation.projections import project
from megatron_aro.rotation.scaling import (
    DTYPES,
    largest_entry,
    reciprocal_power_of_two,
)

# What each entry of the fall-back counts counts: matrices orthonormalised; of these, saved by an
# extra Cholesky pass; left to Householder; not finite even then, so that the rotation was kept.
FALLBACK_RUNGS: tuple[str, ...] = ("factorizations", "extra_pass", "householder", "kept")


@dataclass
class MatrixBatch:
    """b same-shaped oriented matrices (rows = the rotated side), k = min(m, n).

    All tensors have one device, and all but the counts one dtype, float32 or float64.
    """

    momentum: Tensor
    """[b, m, n], already advanced by step 1; read only, any strides."""
    rotation: Tensor
    """[b, m, k]; overwritten in place with the new rotation (untouched for rotation "none")."""
    fallbacks: Tensor
    """int64 [b, len(FALLBACK_RUNGS)]; increased in place, without a host sync."""
    second_moment: Tensor | None = None
    """[b, k, n] ([b, m, n] for rotation "none"), projection "adam" only; overwritten in place."""


def initial_rotation(
    b: int, m: int, n: int, *, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """The first k columns of the identity, [b, m, k]."""
    return torch.eye(m, min(m, n), dtype=dtype, device=device).repeat(b, 1, 1)


def second_moment_shape(config: AROConfig, m: int, n: int) -> tuple[int, int] | None:
    """Shape of one matrix's second moment; None when the projection keeps none."""
    if config.projection != "adam":
        return None
    return (m if config.rotation == "none" else min(m, n), n)


def new_fallback_counts(b: int, device: torch.device | str) -> Tensor:
    """Zero counts of FALLBACK_RUNGS for b matrices, int64 [b, len(FALLBACK_RUNGS)]."""
    return torch.zeros(b, len(FALLBACK_RUNGS), dtype=torch.int64, device=device)


def advance_momentum(momenta: list[Tensor], gradients: list[Tensor], beta: float) -> None:
    """Step 1 in place: M <- beta M + (1 - beta) G, pairs of any shape."""
    if momenta:
        torch._foreach_lerp_(momenta, gradients, 1.0 - beta)


@torch.no_grad()
def apply_updates(
    weights: list[Tensor], updates: list[Tensor], lr: float, weight_decay: float
) -> None:
    """Step 6 in place: W <- (1 - lr * weight_decay) W - lr U, pairs of any shape."""
    if weights:
        torch._foreach_mul_(weights, 1.0 - lr * weight_decay)
        torch._foreach_add_(weights, updates, alpha=-lr)


@torch.no_grad()
def compute_updates(batches: Sequence[MatrixBatch], config: AROConfig) -> list[Tensor]:
    """Steps 2 to 5 for all batches: new rotations (and second moments) in place, updates returned.

    The host waits for the device once, for all batches together: every first attempt at a
    rotation is enqueued, then one read tells which matrices must climb the fall-back ladder. Where
    some must, it waits once more before Householder is asked for any.
    A matrix whose momentum is zero or not finite gets U = 0 and keeps its rotation bit for bit;
    one that is not finite keeps its second moment too. No element can disturb another.

    A caller with other work to do between these three stages calls them itself.

    Args:
        batches: on one device; autocast and the caller's matmul precision have no effect.
        config: ``momentum`` and ``orientation`` are not looked at.

    Returns:
        U for each batch, [b, m, n], of RMS ``config.update_rms`` and not yet times -lr.

    Raises:
        ValueError: a tensor has the wrong dtype or shape, or a second moment is missing.
    """
    attempts = [attempt_rotation(batch, config) for batch in batches]
    climb(batches, attempts, config)
    return [
        finish_update(batch, attempt, config)
        for batch, attempt in zip(batches, attempts, strict=True)
    ]


_Place = tuple[int, int]  # a matrix: the number of its batch, and its place there


@dataclass
class Attempt:
    """A batch between its first attempt at a rotation and its update."""

    frame: _Frame
    failed_b: Tensor | None
    """Matrices that must climb the ladder and still have their old rotation; None for nobody."""


def is_recordable(batch: MatrixBatch, config: AROConfig) -> bool:
    """Whether a CUDA graph can hold its step without the ladder: nothing waits for the device."""
    covered = config.rotation == "none" or fast.covers(config, batch.rotation)
    return covered and use_triton(batch.rotation)


@torch.no_grad()
def attempt_rotation(batch: MatrixBatch, config: AROConfig) -> Attempt:
    """Steps 2 and 3 as far as they go without the ladder; nothing waits for the device."""
    _check(batch, config)
    frame = _Frame.of(batch)
    if config.rotation == "none":
        return Attempt(frame, None)
    with _own_precision(batch):
        if fast.covers(config, batch.momentum):
            q, failed_b = fast.attempt(batch.rotation, batch.momentum, frame.factor, config)
        elif in_frame.covers(config, batch.rotation):
            q, failed_b = in_frame.attempt(
                batch.rotation, into_frame(batch.rotation, frame.momentum(batch), config), config
            )
        else:
            q, failed_b = first_attempt(_look_ahead(batch, frame, config), config)
    failed_b = failed_b & frame.active.flatten()
    _keep_or_replace(batch, frame, q, failed_b)
    batch.fallbacks[:, 0] += frame.active.flatten()
    if config.qr == "qr":  # which has no ladder
        batch.fallbacks[:, 3] += failed_b
        return Attempt(frame, None)
    return Attempt(frame, failed_b)


@torch.no_grad()
def climb(batches: Sequence[MatrixBatch], attempts: Sequence[Attempt], config: AROConfig) -> None:
    """The ladder, for the matrices whose first attempt failed; rotations in place.

    Waits for the device, once for all batches, and once more where some climb by scqr2. Those of
    a shape climb together, as many at a time as its largest batch has, for which there is memory.
    """
    waiting = [attempt.failed_b for attempt in attempts if attempt.failed_b is not None]
    flags = iter(torch.cat(waiting).tolist() if waiting else [])
    kinds: dict[tuple, list[_Place]] = {}
    largest: dict[tuple, int] = {}
    for number, (batch, attempt) in enumerate(zip(batches, attempts, strict=True)):
        b, kind = len(batch.momentum), (batch.momentum.dtype, batch.momentum.shape[1:])
        rows = range(0 if attempt.failed_b is None else b)
        kinds.setdefault(kind, []).extend((number, row) for row in rows if next(flags))
        largest[kind] = max(b, largest.get(kind, 0))
    parts = [
        failed[i : i + largest[kind]]
        for kind, failed in kinds.items()
        if failed
        for i in range(0, len(failed), largest[kind])
    ]
    again = partial(_again, batches, attempts)
    if parts and config.qr == "scqr2":
        answers = [again(part, partial(_extra_pass, config=config), last=False) for part in parts]
        flags = iter(torch.cat(answers).tolist())
        parts = [[place for place in part if next(flags)] for part in parts]
    for part in filter(None, parts):
        again(part, partial(_householder, config=config), last=True)


@torch.no_grad()
def finish_update(batch: MatrixBatch, attempt: Attempt, config: AROConfig) -> Tensor:
    """Steps 4 and 5, after `climb`; U [b, m, n]."""
    with _own_precision(batch):
        if fast.covers_update(config, batch.momentum):
            return fast.update(batch.rotation, batch.momentum, attempt.frame.factor, config)
        return _update(batch, attempt.frame, config)


@contextmanager
def _own_precision(batch: MatrixBatch) -> Iterator[None]:
    with torch.autocast(batch.momentum.device.type, enabled=False), ieee_products():
        yield


@dataclass
class _Frame:
    """How a batch's momenta are read: times an exact power of two, and only where finite."""

    scale: Tensor
    """[b, 1, 1]"""
    finite: Tensor
    """[b, 1, 1]"""
    active: Tensor
    """[b, 1, 1]: finite and not zero, nor denormal throughout."""

    @classmethod
    def of(cls, batch: MatrixBatch) -> _Frame:
        largest = largest_entry(batch.momentum)
        finite = largest.isfinite()
        # Denormals count as zero: a momentum that only decays would end at the smallest of them,
        # which times beta round to themselves, and be normalised to full updates for ever.
        active = finite & (largest >= torch.finfo(largest.dtype).tiny)
        return cls(reciprocal_power_of_two(largest), finite, active)

    @property
    def factor(self) -> Tensor:
        """[b]: the scale, and 0 where the momentum counts as zero."""
        return self.scale.masked_fill(~self.active, 0.0).flatten()

    def momentum(self, batch: MatrixBatch) -> Tensor:
        return (batch.momentum * self.scale).masked_fill_(~self.active, 0.0)

    def __getitem__(self, index: Tensor) -> _Frame:
        return _Frame(self.scale[index], self.finite[index], self.active[index])

    @classmethod
    def join(cls, frames: list[_Frame]) -> _Frame:
        fields = zip(*((frame.scale, frame.finite, frame.active) for frame in frames), strict=True)
        return cls(*map(torch.cat, fields))


def _extra_pass(part: MatrixBatch, frame: _Frame, config: AROConfig) -> Orthonormal:
    r = part.rotation
    if fast.covers(config, part.momentum):
        return fast.extra_pass(r, part.momentum, frame.factor, config)
    if in_frame.covers(config, r):
        return in_frame.extra_pass(r, into_frame(r, frame.momentum(part), config), config)
    return extra_pass(_look_ahead(part, frame, config), config)


def _householder(part: MatrixBatch, frame: _Frame, config: AROConfig) -> Orthonormal:
    return householder(_look_ahead(part, frame, config))


def _again(
    batches: Sequence[MatrixBatch],
    attempts: Sequence[Attempt],
    places: list[_Place],
    orthonormalize: Callable[[MatrixBatch, _Frame], Orthonormal],
    last: bool,
) -> Tensor:
    """Another answer for these matrices, of one shape; which of them it failed for, [places]."""
    pieces = []
    for number, of in groupby(places, key=itemgetter(0)):
        # Not a blocking copy: a small one is staged before the call returns.
        index = torch.tensor([row for _, row in of])
        index = index.to(batches[number].rotation.device, non_blocking=True)
        pieces.append((batches[number], attempts[number].frame, index))
    part = _join([_select(batch, index) for batch, _, index in pieces])
    frame = _Frame.join([frame[index] for _, frame, index in pieces])
    with _own_precision(part):
        q, failed_b = orthonormalize(part, frame)
    _keep_or_replace(part, frame, q, failed_b)
    sizes = [len(index) for _, _, index in pieces]
    for (batch, _, index), rotation, failed in zip(
        pieces, part.rotation.split(sizes), failed_b.split(sizes), strict=True
    ):
        batch.rotation[index] = rotation
        if last:
            batch.fallbacks[index, 2] += 1
            batch.fallbacks[index, 3] += failed.long()
        else:
            batch.fallbacks[index, 1] += (~failed).long()
    return failed_b


def _keep_or_replace(batch: MatrixBatch, frame: _Frame, q: Tensor, failed_b: Tensor) -> None:
    keep = ~frame.active | failed_b.bool()[:, None, None]
    torch.where(keep, batch.rotation, q, out=batch.rotation)


def _select(batch: MatrixBatch, index: Tensor) -> MatrixBatch:
    v = batch.second_moment
    return MatrixBatch(
        batch.momentum[index],
        batch.rotation[index],
        batch.fallbacks[index],
        None if v is None else v[index],
    )


def _join(parts: list[MatrixBatch]) -> MatrixBatch:
    moments = [part.second_moment for part in parts if part.second_moment is not None]
    return MatrixBatch(
        torch.cat([part.momentum for part in parts]),
        torch.cat([part.rotation for part in parts]),
        torch.cat([part.fallbacks for part in parts]),
        torch.cat(moments) if moments else None,
    )


def _look_ahead(batch: MatrixBatch, frame: _Frame, config: AROConfig) -> Tensor:
    """Step 2: A [b, m, k] in the old frame; the state of f is not advanced."""

    def f(x_bkn: Tensor) -> Tensor:
        return project(x_bkn, config, batch.second_moment, frame.scale)[0]

    return target(batch.rotation, frame.momentum(batch), f, config)


def _update(batch: MatrixBatch, frame: _Frame, config: AROConfig) -> Tensor:
    """Steps 4 and 5: U [b, m, n] in the frame that the rotation now holds."""
    y = frame.momentum(batch)
    if config.rotation != "none":
        y = into_frame(batch.rotation, y, config)
    d, v = project(y, config, batch.second_moment, frame.scale)
    if v is not None:
        assert batch.second_moment is not None
        batch.second_moment.copy_(torch.where(frame.finite, v, batch.second_moment))
    if config.rotation != "none":
        d = product(batch.rotation, d, config.precision)
    norm = torch.linalg.vector_norm(d, dim=(1, 2), keepdim=True)
    d *= config.update_rms * math.sqrt(d.shape[1] * d.shape[2]) / norm
    return d.masked_fill_(~((norm > 0) & norm.isfinite()), 0.0)


def _check(batch: MatrixBatch, config: AROConfig) -> None:
    b, m, n = batch.momentum.shape
    expected = {"rotation": (b, m, min(m, n))}
    moment = second_moment_shape(config, m, n)
    if moment is not None:
        expected["second_moment"] = (b, *moment)
    if batch.momentum.dtype not in DTYPES:
        raise ValueError(
            f"momentum is {batch.momentum.dtype}: ARO's state is float32 or float64 (keep float32 "
            "main parameters when the model is bf16 or fp16)."
        )
    for name, shape in expected.items():
        tensor = getattr(batch, name)
        if tensor is None or tensor.shape != shape or tensor.dtype != batch.momentum.dtype:
            found = None if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
            raise ValueError(
                f"{name} is {found}: for a momentum of shape {(b, m, n)} and "
                f"{batch.momentum.dtype} it must be {shape} of the same dtype."
            )
