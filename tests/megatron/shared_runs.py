"""Runs with shared rotations as tests see them; functions here run inside a pool's ranks."""

from __future__ import annotations

from typing import Any

import torch
from aro_runs import train_recorded


def train_in_double(argv: list[str]) -> dict[str, Any]:
    """As `train_recorded` on one rank, with the mathematics of shared rotations in float64.

    Momenta and weights stay float32, as in `full_model_runs.train_full`.
    """
    from megatron_aro.rotation.pieces import Piece
    from megatron_aro.runtime import sharing

    initial = sharing.initial_rotation

    def piece(momentum: torch.Tensor, *args: Any) -> Piece:
        return Piece(momentum.double(), *args)

    sharing.Piece = piece
    sharing.initial_rotation = lambda *args, **kwargs: initial(*args, **kwargs).double()
    return train_recorded(argv)
