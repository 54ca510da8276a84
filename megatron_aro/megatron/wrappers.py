"""Megatron's optimizer wrappers, and its distributed one made to hold a momentum alone."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_aro.megatron import support
from megatron_aro.sharding.buffers import everywhere, shares
from megatron_aro.sharding.plan import Held

_SECOND = "exp_avg_sq"  # Adam's second moment


class LoadableDistributedOptimizer(DistributedOptimizer):
    """Megatron's own, for AdamW, mended where it cannot load without transformer-engine or apex.

    0.19.2 then asks for the step count that all states share while there are none yet, misses
    that count in two of three formats, restores one tensor for all states, which each of them
    increments in a step, and writes to float32 parameters that require gradients. With several
    buckets it also saves wrong states as fully reshardable.
    """

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        is_loading = kwargs.get("is_loading", args[1] if len(args) > 1 else False)
        if is_loading and not self.is_stub_optimizer and not self.optimizer.state:
            self._init_optimizer_states_with_dummy_values()
        return super().sharded_state_dict(*args, **kwargs)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].clone()

    @torch.no_grad()
    def load_parameter_state(self, *args: Any, **kwargs: Any) -> None:
        super().load_parameter_state(*args, **kwargs)

    @torch.no_grad()
    def load_parameter_state_from_dp_zero(self, *args: Any, **kwargs: Any) -> None:
        super().load_parameter_state_from_dp_zero(*args, **kwargs)

    def sharded_param_state_fully_reshardable(self, *args: Any, **kwargs: Any) -> Any:
        # The parent gathers states without the padding between buckets, but looks for a parameter
        # where it is with it: after a padded bucket it would save what belongs to others.
        padded = [*self.buffers, *(x for buffer in self.buffers for x in buffer.buckets)]
        unpadded = [x.numel_unpadded for x in padded]
        for x in padded:
            x.numel_unpadded = x.grad_data.numel()
        try:
            return super().sharded_param_state_fully_reshardable(*args, **kwargs)
        finally:
            for x, numel in zip(padded, unpadded, strict=True):
                x.numel_unpadded = numel

    def _set_main_param_and_optimizer_states(
        self, model_param: torch.nn.Parameter, tensors: dict[str, Any]
    ) -> None:
        # What a checkpoint does not have stays: main parameters that are the weights themselves,
        # and states that start from zero.
        moments = getattr(self, "optimizer_state_keys", ("exp_avg", _SECOND))  # not in 0.18
        states = dict.fromkeys(("param", *moments))
        present = {**states, **tensors, "step": None}
        super()._set_main_param_and_optimizer_states(model_param, present)


class ARODistributedOptimizer(LoadableDistributedOptimizer):
    """Main parameters and momentum as 1-D slices of flat buffers that hold ARO's matrices only.

    megatron-core 0.18 takes Adam alone here, and two moments by name where it gathers states.
    """

    _gathers = False  # whether the parent asks for both

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if not support.ADAM_ONLY:
            super().__init__(optimizer, *args, **kwargs)
            return
        stand_in = torch.optim.AdamW(optimizer.param_groups)
        super().__init__(stand_in, *args, **kwargs)
        optimizer.param_groups = [
            {
                k: v
                for k, v in group.items()
                if k in optimizer.defaults or k not in stand_in.defaults
            }
            for group in stand_in.param_groups
        ]
        self.optimizer = optimizer

    @property
    def optimizer_state_keys(self) -> tuple[str, ...]:
        return ("exp_avg",)

    def state_dict(self) -> dict[str, Any]:
        # The parent wants Adam's step count, which ARO does not have.
        groups = [
            {k: v for k, v in group.items() if k != "params"} | {"step": 0}
            for group in self.optimizer.state_dict()["param_groups"]
        ]
        return {"optimizer": {"param_groups": groups}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.optimizer.state.values():
            state.pop("step", None)
            state.pop(_SECOND, None)
        for group in self.optimizer.param_groups:
            group.pop("step", None)

    def _init_optimizer_states_with_dummy_values(self) -> None:
        # The parent steps on zero gradients, which would decay the weights.
        self.optimizer.initialize_state()

    def _get_main_param_and_optimizer_states(self, model_param: torch.nn.Parameter) -> dict:
        tensors = super()._get_main_param_and_optimizer_states(model_param)
        return {**tensors, _SECOND: tensors["exp_avg"]} if self._gathers else tensors

    def get_parameter_state_dp_zero(self, *args: Any, **kwargs: Any) -> dict[Any, Any] | None:
        self._gathers = support.ADAM_ONLY
        state = super().get_parameter_state_dp_zero(*args, **kwargs)
        self._gathers = False
        for tensors in _gathered(state):
            tensors.pop(_SECOND, None)
        return state

    def load_parameter_state_from_dp_zero(
        self, state_dict: dict, *args: Any, **kwargs: Any
    ) -> None:
        for tensors in _gathered(state_dict) if support.ADAM_ONLY else ():
            tensors[_SECOND] = tensors["exp_avg"]
        super().load_parameter_state_from_dp_zero(state_dict, *args, **kwargs)

    def get_parameter_state_dp_reshardable(self) -> dict[Any, Any]:
        # The parent refuses a bucket of which this rank holds no parameter, as may be where none
        # is cut: its share is padding then.
        state = super().get_parameter_state_dp_reshardable()
        group = self.data_parallel_group
        for index, buffer in enumerate(self.buffers):
            for buckets in state[index].values():
                for bucket, held in zip(buffer.buckets, buckets, strict=True):
                    share = bucket.grad_data.numel() // group.size()
                    stop = min(share, bucket.numel_unpadded - group.rank() * share)
                    if not held and stop > 0:
                        padding = torch.zeros(stop, device=bucket.grad_data.device)
                        keys = ("param", *self.optimizer_state_keys)
                        where = {"gbuf_local_start": 0, "gbuf_local_end": stop, "padding": True}
                        held.append(dict.fromkeys(keys, padding) | where)
        return state

    def start_param_sync_for_bucket_group_subset(self) -> None:
        # The parent leaves buckets with ARO's tag to the layer-wise optimizer, which is us.
        for chunk in self.model_chunks:
            for bucket_group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                if bucket_group.buckets[0].params_list[0].is_managed_by_layer_wise_optimizer:
                    chunk._start_bucket_group_param_sync(bucket_group, force_sync=False)


def _gathered(state: dict[Any, Any] | None) -> list[dict[str, Tensor]]:
    """The tensors of each flat buffer in what the distributed optimizer gathers to one rank."""
    buffers = [of_buffer for of_buffer in (state or {}).values() if isinstance(of_buffer, dict)]
    return [tensors for of_buffer in buffers for tensors in of_buffer.values()]


def main_parameter(wrapped: MegatronOptimizer, parameter: torch.nn.Parameter) -> Tensor | None:
    """The float32 main parameter of a model parameter on this rank, or its 1-D slice, if any."""
    if not isinstance(wrapped, DistributedOptimizer):
        return parameter if parameter.dtype == torch.float32 else parameter.main_param  # type: ignore[attr-defined]
    if parameter not in wrapped.model_param_gbuf_map:
        return None
    group, order = wrapped.model_param_group_index_map[parameter]
    return wrapped.optimizer.param_groups[group]["params"][order]


def held_intervals(wrapped: MegatronOptimizer, parameter: torch.nn.Parameter, dp: int) -> Held:
    """Which elements of a flattened parameter each of `dp` data-parallel ranks has as its main."""
    if not isinstance(wrapped, DistributedOptimizer):
        return everywhere(parameter.numel(), dp)
    (start, stop, bucket), bounds = next(
        (buffer.param_index_map[parameter], buffer.bucket_indices)
        for buffer in wrapped.buffers
        if parameter in buffer.param_index_map
    )
    return shares((start, stop), bounds[bucket], dp)
