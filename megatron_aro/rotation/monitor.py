"""Measures of a step, taken without changing anything of it.

J(R) = <M, R f(R^T M)>, the objective of a rotation (spec, "Rotation policies"; the paper's figure
2), is how fast the loss falls along the update, to first order. Updates have a fixed size and the
scale of f is free, so J is given over ||M|| ||R f(R^T M)||: the cosine of momentum and update.

The eigen-rotation that it is compared with is the policy ``eigen``'s: one power iteration from the
same old R on the same M, orthonormalised by Householder.

Shapes: b matrices, m rows, n columns, k = min(m, n). NaN stands for what was not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_aro.config import AROConfig
from megatron_aro.rotation.precision import ieee_products
from megatron_aro.rotation.scaling import largest_entry, reciprocal_power_of_two
from megatron_aro.rotation.step import MatrixBatch, compute_updates

# The columns of a batch's measures: RMS of U; max |R^T R - I| of the new R; J of the new R, and of
# the eigen-rotation.
MEASURES: tuple[str, ...] = ("update_rms", "orthogonality", "objective", "objective_eigen")


@torch.no_grad()
def measure_before(batch: MatrixBatch, sample: Sequence[int], config: AROConfig) -> Tensor:
    """MEASURES of a batch whose step has not begun, [b, 4]: J of the eigen-rotation, for a sample.

    Nothing waits for the device. The sample is taken one by one, in the memory of one matrix.
    """
    b, m, n = batch.momentum.shape
    measures = batch.momentum.new_full((b, len(MEASURES)), torch.nan)
    if config.rotation != "none":
        for i in sample:
            measures[i, 3] = eigen_objective(_single(batch, i), config)[0]
    return measures


@torch.no_grad()
def measure_after(
    measures: Tensor, batch: MatrixBatch, update: Tensor, sample: Sequence[int]
) -> None:
    """Fill in the rest, between `finish_update` and the loss of the momentum.

    Args:
        measures: what `measure_before` gave.
        update: U [b, m, n].
    """
    measures[:, 0] = torch.linalg.vector_norm(update, dim=(1, 2)) / update[0].numel() ** 0.5
    for i in sample:
        one = _single(batch, i)
        measures[i, 1] = orthogonality_error(one.rotation)[0]
        measures[i, 2] = objective(one.momentum, update[i : i + 1])[0]


def objective(m_bmn: Tensor, d_bmn: Tensor) -> Tensor:
    """<M, D> / (||M|| ||D||), [b], for any scale of M; NaN where M or D is zero."""
    m_bmn = m_bmn * reciprocal_power_of_two(largest_entry(m_bmn))
    norms = torch.linalg.vector_norm(m_bmn, dim=(1, 2)) * torch.linalg.vector_norm(
        d_bmn, dim=(1, 2)
    )
    return m_bmn.mul_(d_bmn).sum(dim=(1, 2)) / norms


def eigen_objective(batch: MatrixBatch, config: AROConfig) -> Tensor:
    """J [b] of the step that the policy ``eigen`` would take instead, f's state included."""
    second = batch.second_moment
    copy = MatrixBatch(
        batch.momentum,
        batch.rotation.clone(),
        torch.zeros_like(batch.fallbacks),
        None if second is None else second.clone(),
    )
    # Householder has no ladder, for which the host would wait.
    (update,) = compute_updates(
        [copy], replace(config, rotation="eigen", qr="qr", precision="fp32")
    )
    return objective(batch.momentum, update)


def orthogonality_error(r_bmk: Tensor) -> Tensor:
    """max |R^T R - I|, [b]."""
    with torch.autocast(r_bmk.device.type, enabled=False), ieee_products():
        error = r_bmk.mT @ r_bmk
    error.diagonal(dim1=1, dim2=2).sub_(1.0)
    return torch.linalg.vector_norm(error, float("inf"), dim=(1, 2))


def _single(batch: MatrixBatch, i: int) -> MatrixBatch:
    """The i-th matrix as a batch of one, in the same memory."""
    one, second = slice(i, i + 1), batch.second_moment
    return MatrixBatch(
        batch.momentum[one],
        batch.rotation[one],
        batch.fallbacks[one],
        None if second is None else second[one],
    )
