"""Full-model mode: what of a model is stepped where it lies, from Megatron's parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor

from megatron_aro.megatron.checks import Placed
from megatron_aro.megatron.grids import Grid
from megatron_aro.megatron.matrices import Placement
from megatron_aro.megatron.wrappers import held_intervals
from megatron_aro.runtime.columns import Columns, Copied, Vector
from megatron_aro.sharding.columns import ByColumns
from megatron_aro.sharding.plan import Held, Position

_TOKENS = re.compile(r"(word_embeddings|output_layer)\.weight$")


def make(
    wrapped: MegatronOptimizer,
    placements: Placed,
    grid: Grid,
    owner: Position,
    main_parameters: Mapping[str, Tensor],
    vocabulary: int | None,
) -> tuple[Columns, dict[str, int]]:
    """The columns that this rank steps, and where parameters on this rank end in padding.

    A collective over pipeline stages with copies of the word embeddings.

    Args:
        placements: of the grid's parameters, on this pipeline stage.
        owner: the position that turns rotations.
        main_parameters: by name, of those that this rank has elements of.
        vocabulary: see `AROOptimizerConfig`.

    Returns:
        the second as `MatrixOptimizer.bind` takes it.

    Raises:
        RuntimeError: stages cut their copies of the word embeddings differently.
    """
    tp, dp = get_pg_size(grid.tensor), get_pg_size(grid.data)
    t, d = position = get_pg_rank(grid.tensor), get_pg_rank(grid.data)
    matrices: list[ByColumns] = []
    vectors: list[Vector] = []
    copies: list[ByColumns] = []
    for parameter, placement in placements:
        if placement.by not in ("columns", "vector"):
            continue
        held = held_intervals(wrapped, parameter, dp)
        if placement.by == "columns":
            matrix = _matrix(placement, parameter, tp, held, vocabulary)
            (copies if _is_copy(parameter) else matrices).append(matrix)
        else:
            everywhere = held.runs[0][1] - held.runs[0][0] > 1
            counted = not (placement.layout.axis is None and t or everywhere and d)
            numel = torch.Size(placement.shape).numel()
            vectors.append(Vector(placement.name, numel, counted))
    true_elements = {
        matrix.name: matrix.true_elements(t, d)
        for matrix in (*matrices, *copies)
        if matrix.name in main_parameters
    }
    copied = _copied(grid.embedding, placements, [*matrices, *copies], d)
    device = placements[0][0].device if placements else torch.device("cpu")
    columns = Columns(
        matrices,
        vectors,
        copied,
        owner,
        position,
        main_parameters,
        grid.tensor if tp > 1 else None,
        grid.data if dp > 1 else None,
        device,
        wrapped.optimizer.aro,
    )
    return columns, true_elements


def turned(placements: Placed) -> list[tuple[int, int]]:
    """The oriented shapes whose rotations this stage turns."""
    return [
        (placement.shape[1], placement.shape[0])
        for parameter, placement in placements
        if placement.by == "columns" and not _is_copy(parameter)
    ]


def _is_copy(parameter: torch.Tensor) -> bool:
    """Whether it is a copy of the first stage's word embeddings."""
    return getattr(parameter, "shared", False)


def _matrix(
    placement: Placement, parameter: torch.Tensor, tp: int, held: Held, vocabulary: int | None
) -> ByColumns:
    rows, width = placement.shape
    if vocabulary is not None and _TOKENS.search(placement.name):
        rows = min(rows, vocabulary)
    replicated = placement.layout.axis is None
    return ByColumns(placement.name, rows, width, parameter.shape[0], tp, replicated, held)


def _copied(
    group: dist.ProcessGroup | None, placements: Placed, matrices: list[ByColumns], d: int
) -> list[Copied]:
    """The word embeddings where pipeline stages have copies of them."""
    if group is None or get_pg_size(group) < 2:
        return []
    if dist.get_rank() not in dist.get_process_group_ranks(group):
        return []
    shared = {
        placement.name
        for parameter, placement in placements
        if getattr(parameter, "shared_embedding", False)
    }
    mine = next((matrix for matrix in matrices if matrix.name in shared), None)
    name, interval = ("", None) if mine is None else (mine.name, mine.held[d])
    found: list[tuple[int, int] | None] = [None] * get_pg_size(group)
    dist.all_gather_object(found, interval, group=group)
    if found[0] is None:
        return []
    if any(other not in (None, found[0]) for other in found):
        raise RuntimeError(f"Pipeline stages cut the word embeddings differently: {found}.")
    return [Copied(name, found[0][1] - found[0][0], group)]
