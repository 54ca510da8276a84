"""What real Megatron builds on a rank: parameters, matrices, ranges of flat buffers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from megatron_aro.sharding.account import Run
from megatron_aro.sharding.gpt import GPT, Chunk
from megatron_aro.sharding.logical import Interval, LogicalMatrix


@dataclass
class Real:
    """One parameter on one rank; `held` as the distributed optimizer has it, (0, 0) if nothing."""

    name: str
    shape: tuple[int, ...]
    axis: int | None
    stride: int
    expert: bool
    matrices: tuple[LogicalMatrix, ...]
    by: str
    held: Interval = (0, 0)


@dataclass
class Built:
    """A rank's model chunks, its coordinates, and how `megatron-aro plan` reads the arguments."""

    gpt: GPT
    stages: list[list[Chunk]]
    run: Run
    at: dict[str, int]
    chunks: list[list[Real]] = field(default_factory=list)
    buffers: list[int] = field(default_factory=list)  # elements of each, padding included


class _BuiltError(BaseException):
    """Leaves Megatron once the model is wrapped: nothing is trained."""


def build(argv: list[str]) -> Built:
    """Build and wrap the model of these flags on this rank, with ARO's tags, and look at it."""
    import runs
    from megatron.training import get_args
    from megatron.training.models import dist_utils

    from megatron_aro.megatron.arguments import aro_config
    from megatron_aro.megatron.optimizer import tag_parameters

    found: list[Built] = []
    original = dist_utils._ddp_wrap

    def wrap(chunks: list, *args: Any, **kwargs: Any) -> None:
        tag_parameters(chunks, aro_config(get_args()))
        found.append(_look(original(chunks, *args, **kwargs)))
        raise _BuiltError

    dist_utils._ddp_wrap = wrap
    try:
        result = runs.train(argv)
    except _BuiltError:
        return found[0]
    raise AssertionError(f"Megatron ended with {result.exit_status} before it built a model")


def _look(wrapped: list) -> Built:
    from megatron.core import mpu
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.utils import get_model_config, unwrap_model
    from megatron.training import get_args
    from runs import _global_names

    from megatron_aro.cli import plan
    from megatron_aro.megatron.matrices import place

    args, config = get_args(), get_model_config(wrapped[0])
    built = Built(
        plan.gpt_sizes(args, config),
        plan.pipeline(config),
        plan.run_settings(args),
        at={
            "pp": mpu.get_pipeline_model_parallel_rank(),
            "ep": mpu.get_expert_model_parallel_rank(),
            "dp": mpu.get_data_parallel_rank(with_context_parallel=True),
            "edp": mpu.get_expert_data_parallel_rank(),
        },
    )
    for ddp, chunk in zip(wrapped, unwrap_model(wrapped), strict=True):
        held = {}
        for buffer in ddp.buffers + ddp.expert_parallel_buffers:
            built.buffers.append(buffer.numel)
            (ranges,) = DistributedOptimizer._build_gbuf_range_map(buffer).values()
            for bucket in ranges:
                for parameter, where in bucket["param_map"].items():
                    held[parameter] = (where["param"].start, where["param"].end)
        renamed = _global_names(chunk)

        def rename(name: str, renamed: list = renamed) -> str:
            for pattern, number in renamed:
                name = re.sub(pattern, number, name)
            return name

        reals = []
        for name, parameter in chunk.named_parameters():
            name = rename(name)
            placement = place(name, _whole(parameter), config, built.gpt.aro)
            reals.append(
                Real(
                    name,
                    tuple(parameter.shape),
                    parameter.partition_dim if _is_cut(parameter) else None,
                    parameter.partition_stride if _is_cut(parameter) else 1,
                    not getattr(parameter, "allreduce", True),
                    placement.matrices,
                    placement.by,
                    held.get(parameter, (0, 0)),
                )
            )
        built.chunks.append(reals)
    return built


def _is_cut(parameter: Any) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


def _whole(parameter: Any) -> Any:
    """A parameter of the full shape, without memory."""
    import torch
    from megatron.core import mpu

    shape = list(parameter.shape)
    if _is_cut(parameter):
        expert = not getattr(parameter, "allreduce", True)
        group = mpu.get_expert_tensor_parallel_group if expert else None
        size = group().size() if group else mpu.get_tensor_model_parallel_world_size()
        shape[parameter.partition_dim] *= size
    whole = torch.nn.Parameter(torch.empty(shape, device="meta"))
    for name in ("is_embedding_or_output_parameter", "shared_embedding"):
        setattr(whole, name, getattr(parameter, name, False))
    return whole
