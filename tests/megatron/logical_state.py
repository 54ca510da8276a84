"""A run's whole optimizer state, free of its layout; functions here run inside a pool's ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from runs import Shard, TrainResult, _merge, _weights, train


def train_watched(argv: list[str], iteration: int = 0) -> TrainResult:
    """Train; `inspected` is this rank's state after so many of this run's own iterations."""
    from megatron.training import training

    seen: list[Any] = []
    original = training.train_step
    calls = 0

    def train_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if calls == iteration:
            model, optimizer = args[2], args[3]
            seen.append(pieces(model, optimizer))
        calls += 1
        return original(*args, **kwargs)

    training.train_step = train_step
    result = train(argv)
    result.inspected = seen[0] if seen else None
    return result


def pieces(model: list, optimizer: Any) -> dict[str, Any]:
    """This rank's pieces of parameters' states, and what belongs to the matrices it owns."""
    from megatron.core.utils import unwrap_model

    from megatron_aro.megatron.wrappers import main_parameter

    found: dict[str, dict[str, tuple[int, torch.Tensor]]] = {}
    names = {}
    for chunk in unwrap_model(model):
        _, shards = _weights([chunk])
        parameters = [
            parameter
            for name, parameter in chunk.named_parameters()
            if not (name == "output_layer.weight" and chunk.share_embeddings_and_output_weights)
        ]
        for (name, shard), parameter in zip(shards.items(), parameters, strict=True):
            names[name] = (shard, tuple(parameter.shape))
            for wrapped in optimizer.chained_optimizers:
                if not _holds(wrapped, parameter):
                    continue
                main = main_parameter(wrapped, parameter)
                start = 0
                if hasattr(wrapped, "model_param_gbuf_map"):
                    start = wrapped._get_model_param_range_map(parameter)["param"].start
                state = {"param": main, **wrapped.optimizer.state[main]}
                found[name] = {
                    key: (start, torch.as_tensor(value).detach().clone().cpu().flatten())
                    for key, value in state.items()
                }
    matrices = {}
    for of in getattr(optimizer, "matrices", ()):  # AdamW alone has none
        matrices |= {name: tensor.clone().cpu() for name, tensor in of.rotation_state().items()}
    return {"parameters": found, "names": names, "matrices": matrices}


def _holds(wrapped: Any, parameter: torch.nn.Parameter) -> bool:
    if hasattr(wrapped, "model_param_gbuf_map"):
        return parameter in wrapped.model_param_gbuf_map
    mains = [p for group in wrapped.optimizer.param_groups for p in group["params"]]
    mine = getattr(parameter, "main_param", parameter)
    return any(main is mine for main in mains)


def logical(ranks: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The whole state by name, as one process would have it, from the pieces of all ranks.

    A replica that differs from another fails here.
    """
    shards: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    layout: dict[str, Shard] = {}
    whole: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for name, states in rank["parameters"].items():
            shard, shape = rank["names"][name]
            layout[name] = shard
            mine = shards.setdefault(name, {}).setdefault(shard.rank, {})
            for key, (start, flat) in states.items():
                if key == "step":
                    assert whole.setdefault(f"{name}.step", flat).equal(flat)
                    continue
                full = mine.setdefault(key, torch.full(shape, float("nan")))
                target = full.view(-1)[start : start + len(flat)]
                assert bool((target.isnan() | (target == flat)).all()), f"replicas of {name}.{key}"
                target.copy_(flat)
        for name, tensor in rank["matrices"].items():
            assert whole.setdefault(name, tensor).equal(tensor), f"copies of {name}"
    for name, parts in shards.items():
        for key in parts[min(parts)]:
            merged = _merge({rank: part[key] for rank, part in parts.items()}, layout[name])
            assert not merged.isnan().any(), f"{name}.{key} is not held whole"
            whole[f"{name}.{key}"] = merged
    return whole
