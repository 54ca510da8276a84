"""Inputs that several test files share."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from megatron_aro import config as aro
from megatron_aro.optimizer import ARO
from megatron_aro.rotation import (
    FALLBACK_RUNGS,
    MatrixBatch,
    initial_rotation,
    new_fallback_counts,
    second_moment_shape,
)

PROJECTIONS = get_args(aro.Projection)
ROTATIONS = get_args(aro.Rotation)
QRS = get_args(aro.Orthonormalizer)
GOLDEN_ROTATIONS = [rotation for rotation in ROTATIONS if rotation != "rgd"]  # it has none
SETTINGS = list(itertools.product(PROJECTIONS, ROTATIONS))
SHAPES = [(1, 9), (9, 1), (1, 1), (7, 33), (33, 7), (12, 12)]

GOLDEN = Path(__file__).parents[2].parent / "shared" / "golden" / "aro_steps.npz"


def golden_results() -> dict[str, np.ndarray]:
    """The project's golden results; skips where the file is not beside the checkout."""
    if not GOLDEN.exists():
        pytest.skip(f"no golden results at {GOLDEN}")
    return dict(np.load(GOLDEN))


def weights_after_steps(
    w0: np.ndarray, gradients: np.ndarray, device: str = "cpu", **settings
) -> list[np.ndarray]:
    """The weights after each step of ARO, lr 1e-2."""
    w = torch.nn.Parameter(torch.tensor(w0, device=device))
    optimizer = ARO([w], lr=1e-2, **settings)
    result = []
    for g in gradients:
        w.grad = torch.tensor(g, device=device)
        optimizer.step()
        result.append(w.detach().cpu().numpy().copy())
    return result


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)


def make_batch(momentum: torch.Tensor, config: aro.AROConfig) -> MatrixBatch:
    """The momentum with the state of a first step."""
    b, m, n = momentum.shape
    rotation = initial_rotation(b, m, n, dtype=momentum.dtype, device=momentum.device)
    moment = second_moment_shape(config, m, n)
    second = momentum.new_zeros(b, *moment) if moment else None
    return MatrixBatch(momentum, rotation, new_fallback_counts(b, momentum.device), second)


def counts_by_rung(batches: list[MatrixBatch]) -> dict[str, int]:
    """The fall-backs of all matrices together."""
    total = sum(batch.fallbacks.sum(dim=0).cpu() for batch in batches)
    return dict(zip(FALLBACK_RUNGS, total.tolist(), strict=True))


def hard_inputs(m: int, n: int) -> torch.Tensor:
    """[11, m, n] in float64: everything that a momentum can be without being wrong."""
    x = normal(11, m, n, dtype=torch.float64)
    k = min(m, n)
    x[0] = 0
    x[1, 0] = 0
    x[2, :, -1] = 0
    x[3] = x[3, :, :1] @ x[3, :1]  # rank one
    x[4] = x[4, :1]  # equal rows
    u, _, vt = torch.linalg.svd(x[5], full_matrices=False)
    x[5] = u * torch.logspace(0, -12, k, dtype=x.dtype) @ vt
    x[6, : (m + 1) // 2] = 0
    x[7] *= 10.0 ** torch.linspace(0, -30, n, dtype=x.dtype)
    x[8] *= 10.0 ** torch.linspace(0, -30, m, dtype=x.dtype)[:, None]
    x[9] = 1
    return x
