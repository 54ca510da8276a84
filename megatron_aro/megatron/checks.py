"""What must hold of parameters and their groups before an optimizer is made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_aro.config import ADAMW, AROConfig, flag
from megatron_aro.megatron.matrices import Placement, rule_name, would_be_aros
from megatron_aro.megatron.names import group_name, trainable_parameters
from megatron_aro.sharding.rules import check_used, unused

# Parameter groups by (ARO's, experts').
Groups = dict[tuple[bool, bool], list[dict[str, Any]]]
# (parameter, placement) of one grid's parameters.
Placed = list[tuple[torch.nn.Parameter, Placement]]


def exceptions(placements: dict[bool, Placed], aro: AROConfig) -> None:
    """An exception by name must fit something, on whichever rank, and not divide layers.

    A checkpoint has one tensor for the second moments of all layers and experts of a name, of
    which none may be missing: Megatron would fail in the first save.

    Raises:
        ValueError: on all ranks.
    """
    if not aro.exceptions:
        return
    mine = [
        (rule_name(placement.name, parameter), placement)
        for of in placements.values()
        for parameter, placement in of
        if would_be_aros(placement.name, parameter, aro)
    ]
    not_used = unused(aro, ((name, placement.matrices) for name, placement in mine))
    by = {(group_name(name), placement.by == ADAMW) for name, placement in mine}
    everyone: list[tuple[dict[str, str], set[tuple[str, bool]]]] = [({}, set())]
    everyone *= dist.get_world_size()
    dist.all_gather_object(everyone, (not_used, by))
    patterns = [patterns for patterns, _ in everyone]
    check_used({p: r for p, r in patterns[0].items() if all(p in of for of in patterns)})
    kinds = Counter(name for name, _ in set().union(*(of_rank for _, of_rank in everyone)))
    divided = sorted(name for name, count in kinds.items() if count > 1)
    if divided:
        raise ValueError(
            f"{flag('override')} sends {divided[0]} to AdamW in some layers or experts and not in "
            "others, which checkpoints cannot hold: let the pattern fit all of them, with * for "
            "their numbers."
        )


def some_matrix(groups: Groups, model_parallel: dist.ProcessGroup) -> None:
    """A pipeline stage may be without matrices, the model may not.

    Raises:
        ValueError: on all ranks.
    """
    mine = any(group["params"] for (is_aro, _), of in groups.items() if is_aro for group in of)
    everyone = [False] * dist.get_world_size(model_parallel)
    dist.all_gather_object(everyone, mine, group=model_parallel)
    if not any(everyone):
        raise ValueError(
            "--optimizer aro finds no trainable matrix in this model: use --optimizer adam."
        )


def each_parameter_once(model_chunks: Sequence[torch.nn.Module], groups: Groups) -> None:
    """Every trainable parameter must be in exactly one group, and nothing else in any.

    Raises:
        RuntimeError: naming the parameters.
    """
    grouped = Counter(
        id(parameter)
        for of_kind in groups.values()
        for group in of_kind
        for parameter in group["params"]
    )
    trainable = {id(parameter): name for name, parameter in trainable_parameters(model_chunks)}
    wrong = [name for key, name in trainable.items() if grouped[key] != 1]
    strangers = grouped.keys() - trainable.keys()
    if wrong or strangers:
        raise RuntimeError(
            f"{len(wrong)} trainable parameters have no optimizer, or two: {wrong[:5]}; "
            f"{len(strangers)} others have one."
        )


def tags(model_chunks: Sequence[torch.nn.Module], groups: Groups) -> None:
    """The distributed optimizer needs each parameter in a flat buffer of its optimizer's kind."""
    aro = {
        id(parameter)
        for (is_aro, _), of_kind in groups.items()
        if is_aro
        for group in of_kind
        for parameter in group["params"]
    }
    untagged = [
        name
        for name, parameter in trainable_parameters(model_chunks)
        if getattr(parameter, "is_managed_by_layer_wise_optimizer", None) != (id(parameter) in aro)
    ]
    if untagged:
        raise RuntimeError(
            f"{len(untagged)} parameters ({untagged[0]}) were put into flat buffers before ARO's "
            "were tagged: call megatron_aro.register() before Megatron makes the model, or "
            "megatron_aro.megatron.optimizer.tag_parameters() before you wrap it in DDP yourself."
        )
