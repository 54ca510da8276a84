"""Experts as transformer-engine groups them, without it; functions here run inside a pool's ranks.

Megatron's own TEGroupedMLP, with a grouped linear layer that has the parameters of Megatron's
TEGroupedLinear: weight0..N of this rank's experts, [out, in] after expert tensor parallelism, with
the attributes that Megatron sets there.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import _set_expert_parameter_attributes
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class GroupedLinear(torch.nn.Module):
    """x [tokens, in], sorted by expert, to [tokens, out]; one weight an expert, no bias."""

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str,
        config: Any,
        init_method: Any,
        bias: bool,
        pg_collection: Any,
        **names: Any,
    ):
        super().__init__()
        assert not bias
        shards, ep = pg_collection.expt_tp.size(), config.expert_model_parallel_size
        if parallel_mode == "column":
            output_size //= shards
        else:
            input_size //= shards
        for expert in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(output_size, input_size))
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                init_method(weight)
            self.register_parameter(f"weight{expert}", weight)
        self.pg_collection, self.cut = pg_collection, 0 if parallel_mode == "column" else 1
        own_groups = ep > 1 or shards != config.tensor_model_parallel_size
        _set_expert_parameter_attributes(self, parallel_mode, own_groups)

    def forward(self, x: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, None]:
        products = [
            part @ weight.T for part, weight in zip(x.split(tokens), self.parameters(), strict=True)
        ]
        return torch.cat(products), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Keys as for experts one by one, and the number over all ranks as a first dimension."""
        sharded, ep = {}, self.pg_collection.ep
        weights = list(self.parameters())
        for i, weight in enumerate(weights):
            expert = ep.rank() * len(weights) + i
            (sharded[f"{prefix}weight{i}"],) = make_sharded_tensors_for_checkpoint(
                {"weight": weight},
                prefix,
                {"weight": self.cut},
                (*sharded_offsets, (len(sharded_offsets), expert, ep.size() * len(weights))),
                tp_group=self.pg_collection.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            ).values()
            replica = sharded[f"{prefix}weight{i}"].replica_id
            copy = self.pg_collection.expt_dp.rank()
            sharded[f"{prefix}weight{i}"].replica_id = (*replica[:2], copy)
        return sharded


def group_experts() -> None:
    """Let Megatron build grouped experts where it would build them one by one."""
    from megatron.core.models.backends import LocalSpecProvider

    layers = GroupedMLPSubmodules(
        linear_fc1=functools.partial(GroupedLinear, parallel_mode="column"),
        linear_fc2=functools.partial(GroupedLinear, parallel_mode="row"),
    )
    LocalSpecProvider.grouped_mlp_modules = lambda self, grouped: functools.partial(
        TEGroupedMLP, submodules=layers
    )


def train_recorded(argv: list[str]) -> dict[str, Any]:
    """`aro_runs.train_recorded` with grouped experts."""
    import aro_runs

    group_experts()
    return aro_runs.train_recorded(argv)


def train(argv: list[str]) -> Any:
    """`runs.train` with grouped experts; inspected is ARO's state and AdamW's."""
    import aro_runs
    import runs

    group_experts()
    return runs.train(argv, inspect=aro_runs.optimizer_state)
