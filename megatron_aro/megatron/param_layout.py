"""``--aro-param-layout whole``: flat buffers in which one rank holds each of ARO's matrices whole.

DDP fills its buffers by a `FullParamLayout`, which Megatron computes buffer by buffer; buffers of
ARO's parameters get the layout of `sharding.buffers.lay_out_whole` there, all others Megatron's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_layout import PerBufferParamLayout

from megatron_aro.config import AROConfig, ParamLayout
from megatron_aro.sharding.buffers import lay_out_whole


@dataclass
class WholeParamLayout(PerBufferParamLayout):
    """A buffer that cuts no parameter.

    Attributes:
        packed_numel: elements that the buffer would have in Megatron's own layout.
    """

    packed_numel: int = 0


def tag(parameter: torch.Tensor, layout: ParamLayout) -> None:
    """Choose the layout of the buffer that DDP will put one of ARO's parameters into."""
    parameter.aro_param_layout = layout  # type: ignore[attr-defined]


def compute(
    original: Callable[..., PerBufferParamLayout],
    params: list[torch.nn.Parameter],
    bucket_size: int | None,
    data_parallel_world_size: int,
    ddp_config: Any,
    param_indices: list[int] | None = None,
) -> PerBufferParamLayout:
    """The layout of one buffer; arguments are those of Megatron's function, `original`."""
    layout = original(params, bucket_size, data_parallel_world_size, ddp_config, param_indices)
    if getattr(params[0], "aro_param_layout", "packed") == "packed":
        return layout
    buffer = lay_out_whole(
        [parameter.numel() for parameter in params],
        data_parallel_world_size,
        bucket_size,
        ddp_config.pad_buckets_for_high_nccl_busbw,
    )
    # Checkpoints walk through a rank's parameters in this order and take it for that of addresses.
    order = sorted(range(len(params)), key=buffer.spans.__getitem__)
    shards = getattr(layout, "num_optimizer_shards", None)  # 0.18 does not record it
    return WholeParamLayout(
        param_index_map={params[i]: (*buffer.spans[i], buffer.bucket_of[i]) for i in order},
        bucket_indices=list(buffer.buckets),
        # Megatron strips what follows a bucket's last parameter from checkpoints. Here shares
        # of other ranks, padding included, may follow, so nothing is stripped.
        per_bucket_numel_unpadded=[stop - start for start, stop in buffer.buckets],
        param_indices=layout.param_indices,
        **({} if shards is None else {"num_optimizer_shards": shards}),
        packed_numel=layout.bucket_indices[-1][1],
    )


def check(
    model_chunks: Sequence[DistributedDataParallel], config: OptimizerConfig, aro: AROConfig
) -> None:
    """The buffers that DDP made must be laid out as ARO's settings say.

    Raises:
        ValueError: parameters are replicated, and no layout cuts them.
        RuntimeError: the buffers were made by other settings.
    """
    whole = aro.param_layout == "whole"
    if not config.use_distributed_optimizer:
        if whole:
            raise ValueError("ARO's param_layout whole needs the distributed optimizer.")
        return
    found = {isinstance(layout, WholeParamLayout) for layout in _layouts(model_chunks)}
    if found - {whole}:
        raise RuntimeError(
            f"ARO's param_layout is {aro.param_layout}, but its flat buffers were laid out "
            f"{'packed' if whole else 'whole'}: call megatron_aro.register() before Megatron makes "
            "the model, and give tag_parameters() the same layout if you call it yourself."
        )


def elements(model_chunks: Sequence[DistributedDataParallel]) -> tuple[int, int]:
    """Elements of this rank's buffers that cut no parameter: as they are, and as packed."""
    whole = [x for x in _layouts(model_chunks) if isinstance(x, WholeParamLayout)]
    return sum(x.bucket_indices[-1][1] for x in whole), sum(x.packed_numel for x in whole)


def _layouts(model_chunks: Sequence[DistributedDataParallel]) -> list[PerBufferParamLayout]:
    """The layouts of this rank's buffers of ARO's parameters."""
    return [
        layout
        for chunk in model_chunks
        for key, layout in chunk.full_param_layout.layouts.items()
        if key.is_managed_by_layer_wise_optimizer
    ]
