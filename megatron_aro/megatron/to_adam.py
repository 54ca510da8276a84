"""From ARO's checkpoint to Megatron's own AdamW, under ``--aro-init-exp-avg``.

Only the loading is ours: the optimizer is Megatron's. It counts the steps of all parameters in one
number N, so the matrices that ARO stepped cannot start from second moments of zero, as at step 0:
divided by the root of what a single gradient leaves of them, updates would be many times too large.
What the checkpoint knows of the sizes of gradients is the momentum (`second_moments`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.training.utils import print_rank_0
from torch import Tensor

from megatron_aro.megatron import arguments, checkpoint, support
from megatron_aro.megatron.wrappers import LoadableDistributedOptimizer

SOURCE = "aro_to_adam"  # in Megatron's metadata of a checkpoint, while loading: a Source
FLAG = "--aro-init-exp-avg"
_UNTRIED = (  # where AdamW's state is not float32 moments beside float32 main parameters
    "fp16",
    "use_megatron_fsdp",
    "use_torch_fsdp2",
    "use_precision_aware_optimizer",
    "optimizer_cpu_offload",
    "fp8_param_gather",
    "fp4_param_gather",
)


@dataclasses.dataclass(frozen=True)
class Source:
    """What must be known of ARO's checkpoint.

    Attributes:
        tensors: what it has of AdamW's names.
        momentum: decay of ARO's momenta.
    """

    tensors: checkpoint.Source
    momentum: float


def describe(state: dict[str, Any], args: argparse.Namespace, folder: str) -> None:
    """Add a `Source` to the metadata of ARO's checkpoint, for a `Loader`.

    Args:
        state: its common state, which Megatron reads first.
        args: this run's, which passed `support.check_checkpoint`.
        folder: where the checkpoint is.

    Raises:
        RefusedError: it is in pieces of flat buffers, or this run's AdamW has other state.
    """
    saved, metadata = state["args"], state["content_metadata"]
    for name in _UNTRIED:
        if getattr(args, name, None):
            raise support.RefusedError(
                f"{FLAG} does not work with --{name.replace('_', '-')}: it makes float32 moments; "
                "go to AdamW and save once without it, or take the checkpoint's weights alone with "
                "--no-load-optim."
            )
    if arguments.aro_config(saved).mode == "full-model":
        raise support.RefusedError(
            f"{FLAG} does not take checkpoints of --aro-mode full-model, whose vocabularies and "
            "vectors have no second moments either: take the weights alone with --no-load-optim."
        )
    metadata.setdefault(checkpoint.SHARDING, checkpoint.MODEL_SPACE)  # replicated: it has no type
    if metadata[checkpoint.SHARDING] == checkpoint.BUCKET_SPACE:
        raise support.RefusedError(
            "The checkpoint's aro state is in pieces of flat buffers: save it with "
            "--dist-ckpt-optim-fully-reshardable to go on with AdamW, or take its weights alone "
            "with --no-load-optim."
        )
    keys = {key: key for key in dist_checkpointing.load_tensors_metadata(folder)}
    metadata[SOURCE] = Source(
        checkpoint.Source(False, None, keys), arguments.aro_config(saved).momentum
    )
    print_rank_0(f"ARO: from aro to adam: exp_avg of ARO's matrices: {args.aro_init_exp_avg}")


class Loader:
    """Stands for Megatron's AdamW while a checkpoint is loaded, and is AdamW in all but ARO's."""

    def __init__(self, optimizer: MegatronOptimizer, exp_avg: str) -> None:
        """
        Args:
            exp_avg: "momentum" or "zero", what ARO's matrices get.
        """
        self._optimizer, self._exp_avg = optimizer, exp_avg
        chain = getattr(optimizer, "chained_optimizers", [optimizer])
        self._chain = [wrapped for wrapped in chain if not wrapped.is_stub_optimizer]
        self._source: Source | None = None
        self._of_aro: list[list[int]] = []  # for each of the chain, the parameters' numbers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def sharded_state_dict(
        self,
        model_sharded_state_dict: dict[str, Any],
        is_loading: bool = False,
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """What AdamW needs and ARO's checkpoint has, in the form of `checkpoint.sharded_state`.

        Raises:
            RefusedError: on all ranks; a parameter has no momentum in the checkpoint.
        """
        self._source = (metadata or {}).get(SOURCE)
        if self._source is None:
            return self._optimizer.sharded_state_dict(
                model_sharded_state_dict, is_loading, metadata=metadata
            )
        asked: dict[str, Any] = {"step": 0}
        missing: list[str] = []
        self._of_aro = []
        for number, wrapped in enumerate(self._chain):
            with _loadable(wrapped):
                own = wrapped.sharded_state_dict(
                    model_sharded_state_dict, is_loading, metadata=dict(metadata or {})
                )
            _, tensors = checkpoint.common_form(wrapped, own)
            missing += checkpoint.ask_for(tensors, self._source.tensors, is_aro=False)
            self._of_aro.append([i for i in tensors if "exp_avg_sq" not in tensors[i]])
            asked[f"chained_{number}"] = tensors
        missing = checkpoint.on_all_ranks(missing)
        without = [name for name in missing if name.startswith("exp_avg of ")]
        if without:
            raise support.RefusedError(
                f"The checkpoint has no {without[0]} ({len(without)} are missing): it was not "
                "trained there; take the weights alone with --no-load-optim."
            )
        print_rank_0(f"ARO: from the momenta: {', '.join(missing)}")
        return asked

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give AdamW what was loaded, and second moments to the matrices that ARO stepped."""
        if self._source is None:
            self._optimizer.load_state_dict(state_dict)
            return
        step = int(state_dict["step"])
        for number, (wrapped, of_aro) in enumerate(zip(self._chain, self._of_aro, strict=True)):
            tensors = state_dict.get(f"chained_{number}", {})
            self._add_moments(wrapped, [tensors[i] for i in of_aro], of_aro, step)
            with _loadable(wrapped):
                wrapped.load_state_dict(checkpoint.wrappers_form(wrapped, tensors, step))
        if hasattr(self._optimizer, "_synchronize_steps"):
            self._optimizer._synchronize_steps()

    def _add_moments(
        self,
        wrapped: MegatronOptimizer,
        states: list[dict[str, Tensor]],
        numbers: list[int],
        step: int,
    ) -> None:
        assert self._source is not None
        if not states:
            return
        is_expert = any(group["is_expert_parallel"] for group in wrapped.param_groups)
        group = (
            parallel_state.get_expert_tensor_parallel_group()
            if is_expert
            else parallel_state.get_tensor_model_parallel_group()
        )
        parameters = _parameters(wrapped)
        axes = [_sharded_axis(parameters[i]) if group.size() > 1 else None for i in numbers]
        unbiased = gradients_to_momenta(self._source.momentum, step)
        # AdamW divides by the last factor, as if it had been averaging for all N steps.
        scale = unbiased * (1 - wrapped.config.adam_beta2**step)
        momenta = [state["exp_avg"] for state in states]
        moments = second_moments(momenta, scale, axes, group, parameters[numbers[0]].device)
        for state, moment in zip(states, moments, strict=True):
            state["exp_avg_sq"] = moment
            if self._exp_avg == "zero":
                state["exp_avg"].zero_()


def gradients_to_momenta(beta: float, steps: int) -> float:
    """Mean square of the gradients over that of their momentum, where noise dominates.

    ``M = (1 - beta) sum_i beta^i G_i`` over independent G of mean square s, i < steps, has the mean
    square ``s (1 - beta) / (1 + beta) (1 - beta^(2 steps))``.
    """
    return (1 + beta) / (1 - beta) / (1 - beta ** (2 * max(steps, 1)))


def second_moments(
    momenta: Sequence[Tensor],
    scale: float,
    axes: Sequence[int | None],
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[Tensor]:
    """Second moments of gradients, from the mean squares of their momenta; a collective.

    Each is the product of its row's and its column's mean, over the matrix's. One mean a matrix
    would be too small for large rows; the squares themselves are nearly zero here and there by
    chance, and AdamW's next updates there huge. Adafactor (arXiv 1804.04235, algorithm 1) keeps
    second moments in this form.

    Args:
        momenta: [..., rows, columns] each, whole or a shard; stacked experts are matrices each.
        scale: factor of the results.
        axes: for each the dimension, -2 or -1, in which the ranks of the group have equal shards;
            None where it is whole.
        device: that the group's collectives take.

    Returns:
        tensors of the momenta's shapes, dtypes and devices.
    """
    of_rows = [_mean_squares(momentum, -1) for momentum in momenta]
    of_columns = [_mean_squares(momentum, -2) for momentum in momenta]
    both = list(zip(momenta, of_rows, of_columns, axes, strict=True))
    # A mean over the dimension that is cut is so far of this rank's shard.
    _average([r if axis == -1 else c for _, r, c, axis in both if axis is not None], group, device)
    made = []
    for momentum, rows, columns, axis in both:
        whole = (columns if axis == -2 else rows).mean(-1, keepdim=True)
        shares = columns / whole.clamp_min(torch.finfo(torch.float64).tiny)  # 0 / 0 is 0
        rows = (scale * rows).to(momentum.dtype)
        made.append(rows.unsqueeze(-1) * shares.to(momentum.dtype).unsqueeze(-2))
    return made


def _mean_squares(momentum: Tensor, axis: int) -> Tensor:
    norms = torch.linalg.vector_norm(momentum, dim=axis, dtype=torch.float64)
    return norms.square_() / momentum.shape[axis]


def _average(tensors: list[Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
    """Replace tensors by their means over a group, in one collective."""
    if not tensors:
        return
    total = torch.cat([tensor.flatten() for tensor in tensors]).to(device)
    dist.all_reduce(total, group=group)
    total /= group.size()
    for tensor, mean in zip(tensors, total.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(mean.view_as(tensor))


def _parameters(wrapped: MegatronOptimizer) -> list[Tensor]:
    """Parameters as a wrapper's state numbers them, with the attributes of tensor parallelism."""
    if isinstance(wrapped, DistributedOptimizer):
        return [parameter for buffer in wrapped.buffers for parameter in buffer.param_index_map]
    return [parameter for group in wrapped.param_groups for parameter in group["params"]]


def _sharded_axis(parameter: Tensor) -> int | None:
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    return parameter.partition_dim - parameter.dim()  # type: ignore[attr-defined]


@contextlib.contextmanager
def _loadable(wrapped: MegatronOptimizer) -> Iterator[None]:
    """Megatron's distributed optimizer with the mends it needs to load at all; its own after."""
    before = type(wrapped)
    if before is DistributedOptimizer:
        wrapped.__class__ = LoadableDistributedOptimizer
    try:
        yield
    finally:
        wrapped.__class__ = before
