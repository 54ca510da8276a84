"""Full-model runs as tests see them, and what one process makes of their gradients.

`train_full` runs inside a pool's ranks, the rest beside them.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import aro_runs
import torch
from aro_runs import train_recorded

from megatron_aro.config import AROConfig
from megatron_aro.rotation import (
    MatrixBatch,
    advance_momentum,
    apply_updates,
    compute_updates,
    initial_rotation,
    new_fallback_counts,
)
from megatron_aro.rotation.scaling import ZERO_COLUMN


def vanish(name: str, gradient: torch.Tensor, step: int) -> None:
    """From the third step on six tokens of each shard and of a norm have no gradient."""
    if "word_embeddings" in name and step >= 2:
        gradient[3:9] = 0.0
    if "final_layernorm.weight" in name and step >= 2:
        gradient[3:9] = 0.0


def train_full(argv: list[str], vanishing: bool = False) -> dict[str, Any]:
    """As `train_recorded`, with the mathematics of columns in float64.

    Momenta, weights and what travels of them stay float32: what is left of summing in another
    order is 1e-16 of an update, which nearly singular momenta cannot enlarge to float32's 6e-8.

    Args:
        vanishing: whether gradients go through `vanish`.

    Returns:
        `largest`, elements of the largest piece that this rank stepped, and of each optimizer also
        `parameters`, for each name that this rank has elements of: what steps it, the whole shape,
        the axis that tensor parallelism cuts, the first element held and the shape of the shard.
    """
    from megatron_aro.megatron import by_columns
    from megatron_aro.rotation.pieces import Piece
    from megatron_aro.runtime import columns

    found: dict[int, dict[str, Any]] = {}
    largest = [0]
    make, initial = by_columns.make, columns.initial_rotation

    def made(wrapped: Any, placements: Any, *args: Any) -> Any:
        held = {}
        for parameter, placement in placements:
            start = 0
            if hasattr(wrapped, "model_param_gbuf_map"):
                if parameter not in wrapped.model_param_gbuf_map:
                    continue
                start = wrapped._get_model_param_range_map(parameter)["param"].start
            held[placement.name] = (
                placement.by,
                placement.shape,
                placement.layout.axis,
                start,
                tuple(parameter.shape),
            )
        found[id(wrapped.optimizer)] = held
        return make(wrapped, placements, *args)

    def piece(momentum: torch.Tensor, column: int) -> Piece:
        largest[0] = max(largest[0], momentum.numel())
        return Piece(momentum.double(), column=column)

    by_columns.make = made
    columns.Piece = piece
    columns.initial_rotation = lambda *args, **kwargs: initial(*args, **kwargs).double()
    aro_runs.endure = vanish
    recorded = train_recorded(argv, hardship=vanishing)
    for optimizer in recorded["optimizers"]:
        optimizer["parameters"] = found[optimizer["id"]]
    return recorded | {"largest": largest[0]}


def train_counting(argv: list[str]) -> list[Counter]:
    """Train and count the collectives in each step of `Columns`, by name."""
    import runs
    import torch.distributed as dist

    from megatron_aro.runtime.columns import Columns

    steps: list[Counter] = []
    inside = [False]

    def counted(name: str) -> None:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            steps[-1][name] += inside[0]
            return original(*args, **kwargs)

        setattr(dist, name, call)

    def entered(name: str, begins: bool) -> None:
        original = getattr(Columns, name)

        def call(self: Columns, *args: Any) -> None:
            if begins:
                steps.append(Counter())
            inside[0] = True
            original(self, *args)
            inside[0] = False

        setattr(Columns, name, call)

    entered("start", True)
    entered("finish", False)
    steps.append(Counter())
    for name in (
        "all_to_all_single",
        "all_gather_into_tensor",
        "all_reduce",
        "reduce",
        "broadcast",
    ):
        counted(name)
    assert runs.train(argv).exit_status == 0
    return steps[1:]


def assembled(
    optimizers: list[dict[str, Any]], pieces: list[dict[str, torch.Tensor]], kinds: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    """Whole parameters as stored from the pieces of all ranks; replicas must have the same bits."""
    made: dict[str, torch.Tensor] = {}
    for optimizer, held in zip(optimizers, pieces, strict=True):
        t, _ = optimizer["position"]
        for name, (by, shape, axis, start, shard) in optimizer["parameters"].items():
            if by not in kinds:
                continue
            full = made.setdefault(name, torch.full(shape, float("nan")))
            assert axis in (None, 0)
            rows = full if axis is None else full[t * shard[0] : (t + 1) * shard[0]]
            target = rows.view(-1)[start : start + len(held[name])]
            assert bool((target.isnan() | (target == held[name])).all()), name
            target.copy_(held[name])
    assert not any(tensor.isnan().any() for tensor in made.values())
    return made


def reference(
    optimizers: list[dict[str, Any]], vocabulary: int, aro: AROConfig, steps: int | None = None
) -> dict[str, torch.Tensor]:
    """The weights that the specification gives for these gradients, of all that has no owner.

    Vocabulary matrices by `compute_updates` on the whole of the true vocabulary, transposed;
    vectors by the sign of their momentum. After so many steps, all by default.
    """
    kinds = ("columns", "vector")
    by = {
        name: of[0]
        for optimizer in optimizers
        for name, of in optimizer["parameters"].items()
        if of[0] in kinds
    }
    weights = assembled(optimizers, [optimizer["weights"] for optimizer in optimizers], kinds)
    momenta = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    batches: dict[str, MatrixBatch] = {}
    of_ranks = (optimizer["steps"][:steps] for optimizer in optimizers)
    for step in zip(*of_ranks, strict=True):
        _, lr, weight_decay = step[0]
        gradients = assembled(optimizers, [pieces for pieces, _, _ in step], kinds)
        for name, weight in weights.items():
            advance_momentum([momenta[name]], [gradients[name]], aro.momentum)
            if by[name] == "vector":
                m = momenta[name]
                least = max(ZERO_COLUMN * float(m.double().norm()), torch.finfo(m.dtype).tiny)
                d = torch.where(m.abs() >= least, m.sign(), 0.0)
                u = aro.update_rms * math.sqrt(d.numel()) * d / d.norm().clamp(min=1)
                apply_updates([weight], [u], lr, 0.0)
                continue
            rows = weight.shape[0] if "position" in name else vocabulary
            m_mn = momenta[name][:rows].mT.double()
            if name not in batches:
                rotation = initial_rotation(1, *m_mn.shape, dtype=torch.float64, device="cpu")
                batches[name] = MatrixBatch(m_mn[None], rotation, new_fallback_counts(1, "cpu"))
            batches[name].momentum = m_mn[None]
            (u_bmn,) = compute_updates([batches[name]], aro)
            apply_updates([weight[:rows]], [u_bmn[0].mT.float()], lr, weight_decay)
    return weights
