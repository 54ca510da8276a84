"""Give matrices that share rotations what they share, over all ranks of the run."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from megatron_aro.config import flag
from megatron_aro.runtime.matrix_optimizer import MatrixOptimizer
from megatron_aro.runtime.sharing import Sharing
from megatron_aro.sharding.cost import rates_of, turn_seconds
from megatron_aro.sharding.groups import Member, plan_groups


def share(optimizers: Sequence[MatrixOptimizer], loads: Mapping[int, float]) -> list[str]:
    """Plan the groups and tell optimizers that step together. A collective over all ranks.

    Args:
        optimizers: this rank's, bound.
        loads: seconds that ranks, this one among them, have to do already.

    Returns:
        the names of the groups, on all ranks.

    Raises:
        ValueError: no matrix shares a rotation; on all ranks.
    """
    me, world, aro = dist.get_rank(), dist.get_world_size(), optimizers[0].aro
    members = [
        Member(matrix.group, matrix.name, matrix.shape, me)
        for optimizer in optimizers
        for matrix in optimizer.members()
    ]
    everyone: list[tuple[float, list[Member]]] = [(0.0, [])] * world
    dist.all_gather_object(everyone, (loads.get(me, 0.0), members))
    plan = plan_groups(
        (member for _, of_rank in everyone for member in of_rank),
        [load for load, _ in everyone],
        functools.partial(turn_seconds, rates=rates_of(aro)),
    )
    if not plan.groups:
        raise ValueError(
            f"{flag('sharing')} {aro.sharing} finds no matrix whose rotated side is the residual "
            f"stream: use {flag('orientation')} residual, or {flag('sharing')} none."
        )
    group = dist.group.WORLD if world > 1 else None
    sharing = Sharing(plan, me, group, optimizers[0].device, aro)
    for optimizer in optimizers:
        optimizer.share(sharing)
    return [group.name for group in plan.groups]
