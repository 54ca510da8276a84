"""Sums and maxima over ranks, many small tensors in one collective."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_aro.rotation.pieces import Total

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def total_over(group: dist.ProcessGroup | None) -> Total:
    """`Total` over the ranks of a group, one all-reduce a call; None for this rank alone."""

    def total(tensors: list[Tensor], op: str) -> list[Tensor]:
        if group is None or not tensors:
            return tensors
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat, op=_OPS[op], group=group)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    return total
