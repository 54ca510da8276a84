"""Parameter names that no layout enters: global layer and expert numbers, no wrapper prefixes."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

_LAYER = re.compile(r"^decoder\.layers\.(\d+)")
_NUMBERS = re.compile(
    r"^decoder\.layers\.\d+\.|\.local_experts\.\d+|\.weight\d*|#expert\d+|(?<=chain)\.\d+$"
)
_EXPERT = re.compile(r"(\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))(\d+)")


def canonical_name(name: str) -> str:
    """A parameter's name without the prefixes that Megatron's wrappers (DDP, Float16Module) add."""
    while name.startswith("module."):
        name = name[len("module.") :]
    return name


def group_name(matrix: str) -> str:
    """What the matrices alike of all layers and experts are called, by one's global name.

    ``self_attention.linear_qkv.q`` for ``decoder.layers.3.self_attention.linear_qkv.weight#q``:
    with signs that TensorBoard takes. Shared rotations of a chain are ``chain``.
    """
    return re.sub(r"(?<=\.)\d+\.", "", _NUMBERS.sub("", matrix)).replace("#", ".")


def trainable_parameters(
    model_chunks: Iterable[torch.nn.Module],
) -> list[tuple[str, torch.nn.Parameter]]:
    """(global name, parameter) of everything that is trained, each parameter once, in order."""
    return [
        (_global(canonical_name(name), layers, offset), parameter)
        for chunk in model_chunks
        for layers, offset in [(_layer_numbers(chunk), _first_expert(chunk))]
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad
    ]


def _global(name: str, layers: dict[str, int], first_expert: int) -> str:
    name = _LAYER.sub(lambda m: f"decoder.layers.{layers.get(m[1], int(m[1]))}", name)
    return _EXPERT.sub(lambda m: m[1] + str(int(m[2]) + first_expert), name)


def _layer_numbers(chunk: torch.nn.Module) -> dict[str, int]:
    """Number in the chunk (as text) -> number in the model, both from 0."""
    numbers = {}
    for name, module in chunk.named_modules():
        found = re.fullmatch(_LAYER.pattern, canonical_name(name))
        if found and hasattr(module, "layer_number"):
            numbers[found[1]] = module.layer_number - 1
    return numbers


def _first_expert(chunk: torch.nn.Module) -> int:
    """Number in the model of this rank's first expert."""
    experts = getattr(get_model_config(chunk), "num_moe_experts", None)
    if not experts:
        return 0
    ranks = parallel_state.get_expert_model_parallel_world_size()
    return parallel_state.get_expert_model_parallel_rank() * (experts // ranks)
