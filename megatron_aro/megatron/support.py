"""What is supported: Megatron versions, layouts and flags, and how the rest is refused."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

TESTED_MEGATRON = ("0.19.2",)
OVERRIDE = "MEGATRON_ARO_ALLOW_UNTESTED"


def check_megatron_version() -> None:
    """Refuse a megatron-core that the hooks were not tested on.

    Raises:
        RuntimeError: unless the environment variable MEGATRON_ARO_ALLOW_UNTESTED is 1.
    """
    found = version("megatron-core")
    if found not in TESTED_MEGATRON and os.environ.get(OVERRIDE) != "1":
        raise RuntimeError(
            f"megatron-aro is tested with megatron-core {', '.join(TESTED_MEGATRON)} and found "
            f"{found}: install a tested version, or set {OVERRIDE}=1 to try this one."
        )


class Refusal(NamedTuple):
    flag: str
    applies: Callable[[Any], bool]
    reason: str
    way_out: str


def _larger_than_one(name: str) -> Callable[[Any], bool]:
    return lambda args: (getattr(args, name, None) or 1) > 1


def _is_set(name: str) -> Callable[[Any], bool]:
    return lambda args: bool(getattr(args, name, None))


_NOT_SHARDED = "ARO does not step matrices that are split this way yet"
_REFUSALS = (
    Refusal(
        "--tensor-model-parallel-size",
        _larger_than_one("tensor_model_parallel_size"),
        _NOT_SHARDED,
        "use 1",
    ),
    Refusal(
        "--pipeline-model-parallel-size",
        _larger_than_one("pipeline_model_parallel_size"),
        "rotations have no names across pipeline stages yet",
        "use 1",
    ),
    Refusal(
        "--context-parallel-size",
        _larger_than_one("context_parallel_size"),
        "ARO is not tested with it yet",
        "use 1",
    ),
    Refusal(
        "--expert-model-parallel-size",
        _larger_than_one("expert_model_parallel_size"),
        _NOT_SHARDED,
        "use 1",
    ),
    Refusal(
        "--expert-tensor-parallel-size",
        _larger_than_one("expert_tensor_parallel_size"),
        _NOT_SHARDED,
        "use 1",
    ),
    Refusal(
        "--num-distributed-optimizer-instances",
        _larger_than_one("num_distributed_optimizer_instances"),
        "ARO gathers matrices within one instance only",
        "use 1",
    ),
    Refusal(
        "--fp16", _is_set("fp16"), "ARO has no loss scaling", "use --bf16, or float32 without it"
    ),
    Refusal(
        "--use-megatron-fsdp",
        _is_set("use_megatron_fsdp"),
        "its sharded parameters are not Megatron's flat buffers",
        "use --use-distributed-optimizer",
    ),
    Refusal(
        "--use-torch-fsdp2",
        _is_set("use_torch_fsdp2"),
        "its sharded parameters are not Megatron's flat buffers",
        "use --use-distributed-optimizer",
    ),
    Refusal(
        "--use-precision-aware-optimizer",
        _is_set("use_precision_aware_optimizer"),
        "ARO keeps main parameters and momentum in float32",
        "drop the flag",
    ),
    Refusal(
        "--optimizer-cpu-offload",
        _is_set("optimizer_cpu_offload"),
        "ARO's step runs where the gradients are",
        "drop the flag",
    ),
    Refusal(
        "--rl-offload-optimizer-during-inference",
        _is_set("rl_offload_optimizer_during_inference"),
        "the rotations would stay behind",
        "drop the flag",
    ),
    Refusal(
        "--optimizer-cuda-graph",
        _is_set("optimizer_cuda_graph"),
        "ARO reads a flag from the GPU in each step",
        "drop the flag",
    ),
    Refusal(
        "--cuda-graph-impl full_iteration",
        lambda args: getattr(args, "cuda_graph_impl", None) == "full_iteration",
        "ARO reads a flag from the GPU in each step",
        "use another implementation of CUDA graphs",
    ),
    Refusal(
        "--fp8-param-gather",
        _is_set("fp8_param_gather"),
        "ARO is not tested with quantized parameters",
        "drop the flag",
    ),
    Refusal(
        "--fp4-param-gather",
        _is_set("fp4_param_gather"),
        "ARO is not tested with quantized parameters",
        "drop the flag",
    ),
    Refusal(
        "--overlap-param-gather-with-optimizer-step",
        _is_set("overlap_param_gather_with_optimizer_step"),
        "ARO steps all model chunks together",
        "drop the flag; --overlap-param-gather works",
    ),
    Refusal(
        "--yaml-cfg",
        lambda args: getattr(args, "yaml_cfg", None) is not None,
        "Megatron's YAML configuration has no place for ARO's settings",
        "use flags",
    ),
    Refusal(
        "--ckpt-format",
        lambda args: args.ckpt_format not in ("torch", "torch_dist"),
        "ARO saves rotations in torch_dist and torch checkpoints",
        "use torch_dist",
    ),
)


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse what ARO cannot do right, before anything is built.

    Raises:
        ValueError: one sentence that names the flag, the reason and the way out.
    """
    for refusal in _REFUSALS:
        if refusal.applies(args):
            raise ValueError(
                f"--optimizer aro does not work with {refusal.flag}: {refusal.reason}; "
                f"{refusal.way_out}."
            )
    for name in ("lr", "min_lr", "weight_decay", "clip_grad"):
        value = getattr(args, name)
        if value is None and name == "lr":
            raise ValueError("--optimizer aro needs a learning rate: give --lr.")
        if value is not None and not 0 <= value < math.inf:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} is {value}: it must be finite and not negative.")
