"""What rank 0 prints: where each parameter goes, padding, fall-backs of orthonormalisation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_aro.megatron.matrices import Placement
from megatron_aro.runtime.matrix_optimizer import MatrixOptimizer
from megatron_aro.sharding.buffers import padding_note

_LAYERS = re.compile(r"(?<=\.)\d+(?=\.)|(?<=weight)\d+$")
_HEADER = ("parameter", "count", "shape", "optimizer", "rotated side", "split")


def placement_table(placements: Sequence[Placement]) -> list[tuple[str, ...]]:
    """Rows of the start-up table, a line for all layers (and experts) alike; header first."""
    counts: dict[tuple[str, ...], int] = {}
    for placement in placements:
        matrices = placement.matrices
        sides = dict.fromkeys("columns" if x.transposed else "rows" for x in matrices)
        if placement.by == "columns":
            sides = {"columns": None}
        parts = dict.fromkeys(
            re.sub(r"expert\d+", "expert", x.name.partition("#")[2]) for x in matrices
        )
        row = (
            _LAYERS.sub("*", placement.name),
            "x".join(map(str, placement.shape)),
            "AdamW" if placement.by == "adamw" else "ARO",
            ", ".join(sides) or "-",
            ", ".join(filter(None, parts)) or "-",
        )
        counts[row] = counts.get(row, 0) + 1
    return [_HEADER, *((row[0], str(count), *row[1:]) for row, count in counts.items())]


def whole_model(placements: Sequence[Placement]) -> list[Placement]:
    """The placements of the whole model on every rank, from those of this rank's parameters.

    Pipeline stages and expert-parallel ranks have parameters of their own: a collective over these
    groups brings them together.
    """
    for group in (
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_expert_model_parallel_group(),
    ):
        everyone: list[Sequence[Placement]] = [()] * dist.get_world_size(group)
        dist.all_gather_object(everyone, placements, group=group)
        placements = list({x.name: x for held in everyone for x in held}.values())
    return list(placements)


def print_placements(placements: Sequence[Placement]) -> None:
    """Print on rank 0 which optimizer each parameter has, and why where the table is silent."""
    if dist.get_rank() != 0:
        return
    table = placement_table(placements)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print("> ARO: the optimizer of each trainable parameter")
    for row in table:
        print(
            "    " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        )
    notes = {
        f"    {re.sub(r'(?<=[.])[0-9]+(?=[.])', '*', placement.name)}: {placement.note}"
        for placement in placements
        if placement.note
    }
    print(*sorted(notes), sep="\n" if notes else "", flush=True)


def print_sharing(placements: Sequence[Placement]) -> None:
    """Print on rank 0 how many rotations there are, and which matrices do not share theirs."""
    if dist.get_rank() != 0:
        return
    matrices = [matrix for placement in placements for matrix in placement.matrices]
    sizes = Counter(matrix.group for matrix in matrices if matrix.group)
    alone = sorted({_LAYERS.sub("*", x.name) for x in matrices if not x.group})
    print(
        f"> ARO: shared rotations: {len(sizes)}, of {min(sizes.values())} to "
        f"{max(sizes.values())} matrices, {sizes.total()} in all; matrices with a rotation of "
        f"their own: {', '.join(alone) or 'none'}",
        flush=True,
    )


def print_unknown_vocabulary() -> None:
    """Print on rank 0 that padding of the vocabulary cannot be told from tokens."""
    if dist.get_rank() == 0:
        print(
            "> ARO: the size of the vocabulary is not known: all rows of word embeddings and "
            "output layer count as tokens (AROOptimizerConfig.vocabulary)",
            flush=True,
        )


def print_padding(numel: int, packed: int) -> None:
    """Print on rank 0 what the layout without cut matrices adds to flat buffers.

    A collective over pipeline stages, which have buffers of their own.

    Args:
        numel, packed: elements of this rank's, as they are and as Megatron lays them out.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    stages = [(0, 0)] * dist.get_world_size(group)
    dist.all_gather_object(stages, (numel, packed), group=group)
    if dist.get_rank() == 0:
        print(f"> ARO: {padding_note(stages)}", flush=True)


def report_fallbacks(optimizers: Sequence[MatrixOptimizer], interval: int) -> None:
    """Print which rungs of orthonormalisation rank 0's matrices climbed since the last report."""
    if dist.get_rank() != 0:
        return
    since: Counter[str] = Counter()
    for optimizer in optimizers:
        counts = Counter(optimizer.fallback_counts())
        since.update(counts)
        since.subtract(optimizer.reported)
        optimizer.reported = dict(counts)
    (_, total), *rungs = since.items()
    if any(count for _, count in rungs):
        climbed = ", ".join(f"{count} {rung.replace('_', ' ')}" for rung, count in rungs if count)
        print(
            f"> ARO: fall-backs of rank 0's {total} orthonormalisations in the last {interval} "
            f"steps: {climbed}",
            flush=True,
        )


def report_phases(optimizers: Sequence[MatrixOptimizer]) -> None:
    """Print how long the phases of rank 0's last step took."""
    if dist.get_rank() != 0:
        return
    first, *others = (optimizer.phases for optimizer in optimizers)
    times = first.milliseconds(*others)
    if times:
        phases = ", ".join(f"{name} {times[name]:.2f}" for name in times if name != "all")
        print(f"> ARO: rank 0's last step took {times['all']:.2f} ms: {phases}", flush=True)
