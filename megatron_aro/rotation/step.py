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
from itertools import islice

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
    some must, it waits once more for their batch before Householder is asked for any.
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
    failed = read_failed(attempts)
    return [
        finish_update(batch, attempt, rows, config)
        for batch, attempt, rows in zip(batches, attempts, failed, strict=True)
    ]


@dataclass
class Attempt:
    """A batch between its first attempt at a rotation and its update."""

    frame: _Frame
    failed_b: Tensor | None
    """Matrices that must climb the ladder and still have their old rotation; None for nobody."""


def is_recordable(batch: MatrixBatch, config: AROConfig) -> bool:
    """Whether a CUDA graph can hold its step without the ladder: nothing waits for the device."""
    return fast.covers(config, batch.rotation) and use_triton(batch.rotation)


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


def read_failed(attempts: Sequence[Attempt]) -> list[list[int]]:
    """Which matrices of each batch must climb the ladder; waits for the device, once."""
    waiting = [attempt.failed_b for attempt in attempts if attempt.failed_b is not None]
    flags = iter(torch.cat(waiting).tolist() if waiting else [])
    found = []
    for attempt in attempts:
        failed = [] if attempt.failed_b is None else islice(flags, len(attempt.failed_b))
        found.append([i for i, bad in enumerate(failed) if bad])
    return found


@torch.no_grad()
def finish_update(
    batch: MatrixBatch, attempt: Attempt, failed: list[int], config: AROConfig
) -> Tensor:
    """The ladder for the matrices that `read_failed` named, then steps 4 and 5; U [b, m, n]."""
    with _own_precision(batch):
        if failed and config.qr == "scqr2":
            failed = _climb(batch, attempt.frame, failed, config)
        if failed:
            _to_the_end(batch, attempt.frame, failed, config)
        if fast.covers(config, batch.momentum):
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


def _climb(batch: MatrixBatch, frame: _Frame, rows: list[int], config: AROConfig) -> list[int]:
    """One more pass for these matrices; which of them need more. Waits for the device."""
    index, failed_b = _again(batch, frame, rows, partial(_extra_pass, config=config))
    batch.fallbacks[index, 1] += (~failed_b).long()
    return [row for row, failed in zip(rows, failed_b.tolist(), strict=True) if failed]


def _extra_pass(part: MatrixBatch, frame: _Frame, config: AROConfig) -> Orthonormal:
    r = part.rotation
    if fast.covers(config, part.momentum):
        return fast.extra_pass(r, part.momentum, frame.factor, config)
    if in_frame.covers(config, r):
        return in_frame.extra_pass(r, into_frame(r, frame.momentum(part), config), config)
    return extra_pass(_look_ahead(part, frame, config), config)


def _to_the_end(batch: MatrixBatch, frame: _Frame, rows: list[int], config: AROConfig) -> None:
    """Householder's answer for these matrices."""
    index, failed_b = _again(
        batch, frame, rows, lambda part, of: householder(_look_ahead(part, of, config))
    )
    batch.fallbacks[index, 2] += 1
    batch.fallbacks[index, 3] += failed_b.long()


def _again(
    batch: MatrixBatch,
    frame: _Frame,
    rows: list[int],
    orthonormalize: Callable[[MatrixBatch, _Frame], Orthonormal],
) -> tuple[Tensor, Tensor]:
    """Another answer for these matrices alone: their indices, and which it failed for."""
    # Not a blocking copy: a small one is staged before the call returns.
    index = torch.tensor(rows).to(batch.rotation.device, non_blocking=True)
    part, frame = _select(batch, index), frame[index]
    q, failed_b = orthonormalize(part, frame)
    _keep_or_replace(part, frame, q, failed_b)
    batch.rotation[index] = part.rotation
    return index, failed_b


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
