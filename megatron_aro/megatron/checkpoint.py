"""The state of ARO's chain of optimizers in checkpoints, in a form that no layout enters.

In model space every tensor has the key of its model parameter, and the states of Megatron's three
wrappers become one form, so that any of them reads what any other saved:

    step         Adam's count of steps
    <name>       of an optimizer of the chain: {number: {"param": main parameter, "exp_avg": ...}},
                 numbered by the wrapper that asks; parameter groups are made of the flags anew
    matrices     rotations and counts by logical matrix

In bucket space (Megatron's "dp_reshardable") a state keeps the wrapper's form: its tensors are
pieces of flat buffers, and only the number of ranks that share them can change.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer, MegatronOptimizer

from megatron_aro.runtime.matrix_optimizer import MatrixOptimizer

MATRICES = "matrices"  # of a state: what belongs to logical matrices, by name
PREFIX = "optimizer.aro."  # of its checkpoint keys
SHARDING = "distrib_optim_sharding_type"  # in Megatron's metadata of a checkpoint
SOURCE = "aro_source"  # there too, while loading: a Source
MODEL_SPACE, BUCKET_SPACE = "fully_reshardable", "dp_reshardable"
_STATE = "optimizer.state."
_STEP = "step"


@dataclasses.dataclass(frozen=True)
class Source:
    """What must be known of the run that saved, to ask for its state in model space.

    Attributes:
        main: what main parameters are called in keys; None where they are the model's weights.
    """

    main: str | None

    @classmethod
    def of(cls, saved: argparse.Namespace) -> Source:
        """From the saved arguments."""
        if saved.use_distributed_optimizer:
            return cls("param")
        return cls("fp32_param" if saved.bf16 else None)


def describe(state: dict[str, Any]) -> None:
    """Add what `sharded_state` must know to the metadata of a checkpoint that is to be loaded.

    Args:
        state: its common state, which Megatron reads first.
    """
    metadata = state.get("content_metadata")
    if metadata is not None:  # there is none in the "torch" format
        # What is not the distributed optimizer's has no type: it always lies in model space.
        metadata.setdefault(SHARDING, MODEL_SPACE)
        metadata[SOURCE] = Source.of(state["args"])


def name_of(wrapped: MegatronOptimizer) -> str:
    """The name of an optimizer of the chain in checkpoints."""
    kind = "aro" if isinstance(wrapped.optimizer, MatrixOptimizer) else "adam"
    experts = any(group["is_expert_parallel"] for group in wrapped.optimizer.param_groups)
    return kind + ("_experts" if experts else "")


def sharded_state(
    chain: list[MegatronOptimizer],
    model_state: dict[str, Any],
    is_loading: bool,
    metadata: Mapping[str, Any],
) -> dict[str, Any]:
    """What to save, or what to ask for, as Megatron's sharded state dictionary.

    Args:
        model_state: the model's sharded state dictionary.
        metadata: Megatron's, of this run or of the checkpoint; while loading with a `Source`.
    """
    in_buckets = metadata.get(SHARDING) == BUCKET_SPACE
    state: dict[str, Any] = {} if in_buckets else {_STEP: 0}
    for wrapped in chain:
        name = name_of(wrapped)
        own = wrapped.sharded_state_dict(model_state, is_loading, metadata=dict(metadata))
        if in_buckets:
            add_prefix_for_sharding(own, f"{name}.")
            state[name] = own
        else:
            step, state[name] = _common_form(wrapped, own)
            state[_STEP] = max(state[_STEP], step)
            if is_loading:
                _ask_for(state[name], metadata[SOURCE])
    state[MATRICES] = {
        key: ShardedTensor.from_rank_offsets(PREFIX + key, tensor)
        for key, tensor in _matrices(chain).items()
    }
    return state


def load(chain: list[MegatronOptimizer], loaded: dict[str, Any]) -> None:
    """Take over what `sharded_state` asked for, or what `plain_state` gave.

    Raises:
        ValueError: state of matrices is missing or left over, or of another shape.
    """
    _load_matrices(chain, loaded[MATRICES])
    for wrapped in chain:
        state = loaded.get(name_of(wrapped), {})  # without parameters on this rank it is empty
        if _STEP in loaded:
            state = _wrappers_form(wrapped, state, loaded[_STEP])
        wrapped.load_state_dict(state)


def plain_state(chain: list[MegatronOptimizer]) -> dict[str, Any]:
    """This rank's state for Megatron's "torch" format."""
    return {
        **{name_of(wrapped): wrapped.state_dict() for wrapped in chain},
        MATRICES: _matrices(chain),
    }


def _common_form(wrapped: MegatronOptimizer, own: dict[str, Any]) -> tuple[int, dict[int, Any]]:
    """(Adam's steps, tensors) of a wrapper's sharded state."""
    inner = own if isinstance(wrapped, FP32Optimizer) else own["optimizer"]
    groups = inner["param_groups"]
    if isinstance(wrapped, DistributedOptimizer):
        tensors = own["param_state"] or {}  # gathered to one rank if memory is to be saved
    else:
        tensors = inner["state"]
        mains = own.get("fp32_from_fp16_params", ())
        for group, mains_of_group in zip(groups, mains, strict=False):
            for number, main in zip(group["params"].unwrap(), mains_of_group, strict=True):
                tensors[number]["param"] = main
    in_groups = max((group["step"] for group in groups if "step" in group), default=0)
    return int(tensors.pop("common_step", in_groups)), tensors


def _wrappers_form(wrapped: MegatronOptimizer, tensors: dict[Any, Any], step: int) -> dict:
    """Inverse of `_common_form`, on what was loaded."""
    groups = wrapped.optimizer.state_dict()["param_groups"]
    is_distributed = isinstance(wrapped, DistributedOptimizer)
    # torch's Adam counts by parameter, transformer-engine's by group, ARO does not count.
    by_parameter = isinstance(wrapped.optimizer, torch.optim.Adam | torch.optim.AdamW)
    is_aro = isinstance(wrapped.optimizer, MatrixOptimizer)
    if is_distributed or not (by_parameter or is_aro):
        groups = [{**group, "step": step} for group in groups]
    if is_distributed:
        return {
            "optimizer": {"param_groups": groups},
            "param_state": tensors,
            "param_state_sharding_type": MODEL_SPACE,
        }
    mains = [
        [tensors[number].pop("param") for number in group["params"] if "param" in tensors[number]]
        for group in groups
    ]
    if by_parameter:
        tensors["common_step"] = torch.tensor(float(step))
    native = {"state": tensors, "param_groups": groups}
    if isinstance(wrapped, FP32Optimizer):
        return native
    return {"optimizer": native, "fp32_from_fp16_params": mains}


def _ask_for(tensors: dict[int, dict[str, Any]], source: Source) -> None:
    """Ask for main parameters by the name that they have in the checkpoint."""
    for of_parameter in tensors.values():
        main = of_parameter.get("param")
        if main is None:
            continue
        if source.main is None:
            # Float32 main parameters share the memory of the weights, which are loaded anyway.
            del of_parameter["param"]
        else:
            key = main.key.removeprefix(_STATE).partition(".")[2]
            main.key = f"{_STATE}{source.main}.{key}"


def _matrices(chain: list[MegatronOptimizer]) -> dict[str, torch.Tensor]:
    states = [optimizer.rotation_state() for optimizer in _aro(chain)]
    return {key: tensor for state in states for key, tensor in state.items()}


def _load_matrices(chain: list[MegatronOptimizer], loaded: Mapping[str, torch.Tensor]) -> None:
    nobodys = loaded.keys() - _matrices(chain).keys()
    for optimizer in _aro(chain):
        own = optimizer.rotation_state().keys()
        optimizer.load_rotation_state({k: v for k, v in loaded.items() if k in own | nobodys})


def _aro(chain: list[MegatronOptimizer]) -> list[MatrixOptimizer]:
    return [w.optimizer for w in chain if isinstance(w.optimizer, MatrixOptimizer)]
