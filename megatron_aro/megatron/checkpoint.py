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
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer, MegatronOptimizer
from megatron.training.utils import print_rank_0

from megatron_aro.megatron import arguments, support
from megatron_aro.runtime.matrix_optimizer import MatrixOptimizer

MATRICES = "matrices"  # of a state: what belongs to logical matrices, by name
PREFIX = "optimizer.aro."  # of its checkpoint keys
SHARDING = "distrib_optim_sharding_type"  # in Megatron's metadata of a checkpoint
SOURCE = "aro_source"  # there too, while loading: a Source
MODEL_SPACE, BUCKET_SPACE = "fully_reshardable", "dp_reshardable"
_STATE = "optimizer.state."
_STEP = "step"
_FILE = "aro_matrices_{:05d}_of_{:05d}.pt"


@dataclasses.dataclass(frozen=True)
class Source:
    """What must be known of a checkpoint, and decided, to ask for its state.

    Attributes:
        in_buckets: whether it is in bucket space.
        main: what main parameters are called in keys; None where they are the model's weights.
        keys: of another optimizer's checkpoint: its keys by their names without prefixes. What
            is not among them starts from zero. None for ARO's, where nothing may be missing.
        momentum: "zero" to start from zero momenta all the same.
        rotation: how rotations start, "identity" or "qr"; None to load them.
    """

    in_buckets: bool
    main: str | None
    keys: Mapping[str, str] | None = None
    momentum: str | None = None
    rotation: str | None = None

    def key(self, names: Sequence[str]) -> str | None:
        """The first of these keys that the checkpoint has, as it has it."""
        if self.keys is None:
            return names[0] if names else None
        return next((self.keys[name] for name in names if name in self.keys), None)


def describe(state: dict[str, Any], args: argparse.Namespace, folder: str) -> None:
    """Add what `sharded_state` must know to the metadata of a checkpoint that is to be loaded.

    Args:
        state: its common state, which Megatron reads first.
        args: this run's, which passed `support.check_checkpoint`.
        folder: where the checkpoint is.

    Raises:
        RefusedError: it is another optimizer's, in pieces of flat buffers.
    """
    metadata = state.get("content_metadata")
    if metadata is None:  # there is none in the "torch" format
        return
    # What is not the distributed optimizer's has no type: it always lies in model space.
    metadata.setdefault(SHARDING, MODEL_SPACE)
    in_buckets = metadata[SHARDING] == BUCKET_SPACE
    saved = state["args"]
    main = "param" if saved.use_distributed_optimizer else "fp32_param" if saved.bf16 else None
    if saved.optimizer == arguments.NAME:
        changed = support.changed_settings(args, saved)
        rotation = args.aro_init_rotation if changed else None
        metadata[SOURCE] = Source(in_buckets, main, rotation=rotation)
        if rotation:
            print_rank_0(f"ARO: rotations start from {rotation}: {', '.join(changed)}")
        return
    stored = dist_checkpointing.load_tensors_metadata(folder)
    keys = {re.sub(r"^chained_\d+\.", "", key): key for key in stored}
    if any(key.startswith("optimizer.distributed.") for key in keys):
        raise support.RefusedError(
            f"The checkpoint's {saved.optimizer} state is in pieces of flat buffers: save it with "
            "--dist-ckpt-optim-fully-reshardable to go on with ARO, or take its weights alone with "
            "--no-load-optim."
        )
    momentum, rotation = args.aro_init_momentum, args.aro_init_rotation
    print_rank_0(f"ARO: from {saved.optimizer}: momenta: {momentum}, rotations: {rotation}")
    metadata[SHARDING] = MODEL_SPACE
    metadata[SOURCE] = Source(False, None, keys, momentum, rotation)


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
        metadata: Megatron's, of this run or of the checkpoint; while loading with a `Source`, or
            without one what this run's wrappers saved is asked for.
    """
    in_buckets = metadata.get(SHARDING) == BUCKET_SPACE
    source: Source | None = metadata.get(SOURCE) if is_loading else None
    state: dict[str, Any] = {} if in_buckets else {_STEP: 0}
    missing: list[str] = []
    for wrapped in chain:
        name = name_of(wrapped)
        own = wrapped.sharded_state_dict(model_state, is_loading, metadata=dict(metadata))
        if in_buckets:
            add_prefix_for_sharding(own, f"{name}.")
            state[name] = own
        else:
            step, state[name] = common_form(wrapped, own)
            state[_STEP] = max(state[_STEP], step)
            if source is not None:
                is_aro = isinstance(wrapped.optimizer, MatrixOptimizer)
                missing += ask_for(state[name], source, is_aro)
    if source is not None and source.keys is not None:
        _print_missing(missing)
    if source is not None and source.rotation is not None:
        return state
    state[MATRICES] = {
        key: ShardedTensor.from_rank_offsets(PREFIX + key, tensor, replica_id=_copy(wrapped, key))
        for wrapped in chain
        for key, tensor in _matrices([wrapped]).items()
    }
    return state


def _copy(wrapped: MegatronOptimizer, key: str) -> tuple[int, int]:
    """Which of the copies this is; that of zeros is written.

    Each instance of the distributed optimizer has one, and in full-model mode each rank has the
    rotations of vocabulary matrices.
    """
    instance = getattr(wrapped, "distributed_optimizer_instance_id", 0)
    return instance, int(key in wrapped.optimizer.read_only())


def load(
    chain: list[MegatronOptimizer], loaded: dict[str, Any], source: Source | None = None
) -> None:
    """Take over what `sharded_state` asked for, or what `plain_state` gave.

    Args:
        source: by which it was asked for, if any.

    Raises:
        ValueError: state of matrices is missing, or of another shape.
    """
    rotation = None if source is None else source.rotation
    if rotation is None:
        _load_matrices(chain, loaded.get(MATRICES, {}))  # empty: this rank owns none
    in_model_space = _STEP in loaded or (source is not None and not source.in_buckets)
    step = _find_step(loaded) if in_model_space else 0
    for wrapped in chain:
        state = loaded.get(name_of(wrapped), {})  # without parameters on this rank it is empty
        wrapped.load_state_dict(wrappers_form(wrapped, state, step) if in_model_space else state)
    if rotation == "qr":
        _aro(chain)[0].align_rotations()  # of all that step together


def _find_step(loaded: Any) -> int:
    """The largest count of steps in a state, whichever optimizer saved it."""
    if isinstance(loaded, dict):
        found = [_find_step(value) for value in loaded.values()]
        found += [int(loaded[key]) for key in (_STEP, "common_step") if key in loaded]
        return max(found, default=0)
    return max((_find_step(value) for value in loaded), default=0) if type(loaded) is list else 0


def plain_state(chain: list[MegatronOptimizer]) -> dict[str, Any]:
    """What ranks write to their files in Megatron's "torch" format; matrices go apart."""
    return {name_of(wrapped): wrapped.state_dict() for wrapped in chain}


def save_matrices(chain: list[MegatronOptimizer], folder: Path) -> None:
    """Write what belongs to this rank's matrices into a file of its own, for the "torch" format.

    There one data-parallel rank writes for all, and each has its own rotations.
    """
    folder.mkdir(parents=True, exist_ok=True)
    others = frozenset[str]().union(*(optimizer.read_only() for optimizer in _aro(chain)))
    mine = {key: tensor for key, tensor in _matrices(chain).items() if key not in others}
    state = {key: tensor.clone() for key, tensor in mine.items()}
    torch.save(state, folder / _FILE.format(dist.get_rank(), dist.get_world_size()))


def read_matrices(folder: Path, world_size: int) -> dict[str, torch.Tensor]:
    """What so many ranks wrote there, mapped and not read: a rank copies what it owns."""
    found: dict[str, torch.Tensor] = {}
    for rank in range(world_size):  # others are left from a save that was killed
        path = folder / _FILE.format(rank, world_size)
        found |= torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return found


def common_form(wrapped: MegatronOptimizer, own: dict[str, Any]) -> tuple[int, dict[int, Any]]:
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


def wrappers_form(wrapped: MegatronOptimizer, tensors: dict[Any, Any], step: int) -> dict:
    """Inverse of `common_form`, on what was loaded."""
    tensors = defaultdict(dict, tensors)
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
    for number, zeros in wrapped.optimizer.state_dict()["state"].items():
        tensors[number] = {**zeros, **tensors[number]}
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


def ask_for(tensors: dict[int, dict[str, Any]], source: Source, is_aro: bool) -> list[str]:
    """Ask for tensors by their names in the checkpoint, and for none that it does not have.

    Returns:
        what the checkpoint does not have, as "kind of key".
    """
    missing = []
    for of_parameter in tensors.values():
        for kind, sharded in list(of_parameter.items()):
            key = sharded.key.removeprefix(_STATE).partition(".")[2]
            names: list[str | None] = [kind]
            if kind == "param":
                names = ["param", "fp32_param"] if source.keys is not None else [source.main]
            elif is_aro and source.momentum == "zero":
                names = []
            elif is_aro:
                names.append("momentum_buffer")  # Muon's
            found = source.key([f"{_STATE}{name}.{key}" for name in names if name])
            if found is not None:
                sharded.key = found
                continue
            # Float32 main parameters share the memory of the weights, which are loaded anyway.
            del of_parameter[kind]
            if kind != "param" and names:
                missing.append(f"{kind} of {key}")
    return missing


def on_all_ranks(names: list[str]) -> list[str]:
    """The names of all ranks, each once, sorted."""
    of_all: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(of_all, names)
    return sorted({name for names in of_all for name in names})


def _print_missing(of_this_rank: list[str]) -> None:
    names = on_all_ranks(of_this_rank)
    if names:
        print_rank_0(f"ARO: not in the checkpoint, from zero: {', '.join(names)}")


def _matrices(chain: list[MegatronOptimizer]) -> dict[str, torch.Tensor]:
    states = [optimizer.rotation_state() for optimizer in _aro(chain)]
    return {key: tensor for state in states for key, tensor in state.items()}


def _load_matrices(chain: list[MegatronOptimizer], loaded: Mapping[str, torch.Tensor]) -> None:
    for optimizer in _aro(chain):
        own = optimizer.rotation_state().keys()
        optimizer.load_rotation_state({k: v for k, v in loaded.items() if k in own})


def _aro(chain: list[MegatronOptimizer]) -> list[MatrixOptimizer]:
    return [w.optimizer for w in chain if isinstance(w.optimizer, MatrixOptimizer)]
