"""The process groups that share dense parameters, and those that share experts."""

from __future__ import annotations

import dataclasses

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_pg_rank


@dataclasses.dataclass(frozen=True)
class Grid:
    """The groups through this rank that share dense parameters, or experts.

    Attributes:
        ranks: of the whole grid, in the world, by position [tensor][data].
        tensor, data: the ranks over which a parameter is cut, and over which it is replicated or
            its flat buffers are. Of several distributed-optimizer instances, this rank's.
        instance: which of them that is.
        data_gloo: `data` over gloo, for checkpoints, where Megatron made it.
        model: over which gradient statistics of replicated parameters are summed.
        statistics: over which those of the distributed optimizer are.
        checkpoint_index: which of the `data` groups this is, in checkpoint keys.
        buffers: the name of DDP's list of flat buffers.
        embedding: the pipeline stages that have copies of the word embeddings, if any, first the
            one that has the model's beginning.
    """

    ranks: tuple[tuple[int, ...], ...]
    tensor: dist.ProcessGroup
    data: dist.ProcessGroup
    data_gloo: dist.ProcessGroup | None
    model: dist.ProcessGroup
    statistics: dist.ProcessGroup
    instance: int
    checkpoint_index: int
    buffers: str
    embedding: dist.ProcessGroup | None = None


def make_grids(
    pg_collection: ProcessGroupCollection | None, model_chunks: list, use_gloo: bool
) -> dict[bool, Grid]:
    """The grid of dense parameters (False) and that of experts (True)."""
    found = ProcessGroupCollection.setup_process_groups_for_optimizer(
        pg_collection, model_chunks, use_gloo
    )
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    instances = found["inter_dist_opt_group"]
    instance = 0 if instances is None else get_pg_rank(instances)
    # 0.18 cuts no weights over a further group.
    experts = found.get("expt_tp_pp_with_egtp_remat_group", found["expt_tp_pp_group"])
    return {
        False: Grid(
            ranks=_ranks(groups.tp, found["intra_dp_cp_group"]),
            tensor=groups.tp,
            data=found["intra_dp_cp_group"],
            data_gloo=found["intra_dp_cp_group_gloo"],
            model=found["mp_group"],
            statistics=found["intra_dist_opt_group"],
            instance=instance,
            checkpoint_index=get_pg_rank(found["mp_group"]),
            buffers="buffers",
            embedding=getattr(groups, "embd", None),
        ),
        True: Grid(
            ranks=_ranks(groups.expt_tp, found["intra_expt_dp_group"]),
            tensor=groups.expt_tp,
            data=found["intra_expt_dp_group"],
            data_gloo=found["intra_expt_dp_group_gloo"],
            model=experts,
            statistics=found["intra_dist_opt_group"],
            instance=instance,
            checkpoint_index=get_pg_rank(experts),
            buffers="expert_parallel_buffers",
        ),
    }


def _ranks(tensor: dist.ProcessGroup, data: dist.ProcessGroup) -> tuple[tuple[int, ...], ...]:
    rows: list[tuple[int, ...]] = [()] * dist.get_world_size(tensor)
    dist.all_gather_object(rows, tuple(dist.get_process_group_ranks(data)), group=tensor)
    return tuple(rows)
