"""Collectives over gloo, which is less general than NCCL: what Megatron asks and gloo refuses."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_aro.megatron.cpu_mode.answers import replace


def install() -> None:
    """Answer torch.distributed from now on."""
    replace(
        dist,
        {
            "init_process_group": _over_gloo(c10d.init_process_group),
            "new_group": _over_gloo(c10d.new_group),
            "all_reduce": _all_reduce,
            "all_to_all_single": _all_to_all_single,
            "all_gather": _all_gather,
            "reduce_scatter": _reduce_scatter,
        },
    )


def _over_gloo(create: Callable[..., Any]) -> Callable[..., Any]:
    """init_process_group or new_group with gloo in place of NCCL, the default."""
    signature = inspect.signature(create)

    @functools.wraps(create)
    def create_over_gloo(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if "nccl" in (given.get("backend") or "nccl"):
            given["backend"] = "gloo"
            for name in ("pg_options", "device_id"):  # both are NCCL's
                given.pop(name, None)
        return create(**given)

    return create_over_gloo


@functools.wraps(c10d.all_reduce)
def _all_reduce(
    tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """Gloo sums but does not average."""
    if op != dist.ReduceOp.AVG:
        return c10d.all_reduce(tensor, op=op, group=group, async_op=async_op)
    assert not async_op, "--ddp-average-in-collective is refused"
    c10d.all_reduce(tensor, group=group)
    tensor.div_(dist.get_world_size(group))


@functools.wraps(c10d.all_to_all_single)
def _all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Megatron's dispatcher of tokens has counts in tensors, which it copies from a GPU only."""
    outgoing, incoming = (
        sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes
        for sizes in (input_split_sizes, output_split_sizes)
    )
    return c10d.all_to_all_single(output, input, incoming, outgoing, group, async_op)


@functools.wraps(c10d.all_gather)
def _all_gather(
    tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """Gloo gathers equal shapes only; experts under tensor parallelism have unequal ones."""
    if async_op or _equal_shapes(tensor_list):
        return c10d.all_gather(tensor_list, tensor, group=group, async_op=async_op)
    tensor_list[dist.get_rank(group)].copy_(tensor)
    for rank, part in enumerate(tensor_list):
        c10d.broadcast(part, group=group, group_src=rank)


@functools.wraps(c10d.reduce_scatter)
def _reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """As for `_all_gather`, whose gradient it is."""
    if async_op or _equal_shapes(input_list):
        return c10d.reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
    for rank, part in enumerate(input_list):
        total = part.clone()
        c10d.all_reduce(total, op=op, group=group)
        if rank == dist.get_rank(group):
            output.copy_(total)


def _equal_shapes(tensors: list[torch.Tensor]) -> bool:
    return len({tensor.shape for tensor in tensors}) <= 1
