"""Real training runs inside a pool's ranks, observed without altering them."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

# A GPT that trains in a second: two layers of 32, bytes as tokens. Losses agree between layouts
# only if all pad the vocabulary alike, hence the last flag.
_TINY = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --attention-dropout 0 --hidden-dropout 0
    --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8
    --train-iters 5 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 1
    --weight-decay 0.1 --log-interval 1 --eval-interval 1000 --eval-iters 0 --mock-data
    --tokenizer-type NullTokenizer --vocab-size 256 --make-vocab-size-divisible-by 32
"""
TINY = _TINY.split()


@dataclass
class TrainResult:
    """What a rank saw of a run of `megatron_aro.pretrain_gpt`.

    Losses are those of the whole batch, the same on all ranks. Weights are this rank's shards by
    global name: the layer's number in the model and the expert's in the layer.
    """

    exit_status: int
    losses: list[float] = field(default_factory=list)  # float32 values, one per iteration
    metrics: list[dict[str, float]] = field(default_factory=list)  # last stage: all losses
    grad_norms: list[float | None] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    shards: dict[str, Shard] = field(default_factory=dict)
    inspected: Any = None  # what `inspect` returned
    stdout: str = ""
    stderr: str = ""


@dataclass
class Shard:
    """Which part of a weight a tensor-parallel rank has; `dim` None where it has all."""

    dim: int | None
    stride: int
    rank: int
    size: int


def train(
    argv: Sequence[str], inspect: str | Callable | None = None, entry: str = "pretrain_gpt"
) -> TrainResult:
    """Run the entry with `argv` as the command line does, on this rank.

    Args:
        argv: Megatron's flags.
        inspect: function(model_chunks, optimizer) or "module:function", called after the last
            iteration; its result is pickled.
        entry: module of megatron_aro whose `main` runs.
    """
    from megatron.training import training

    result = TrainResult(exit_status=-1)
    original_step, original_train = training.train_step, training.train

    def train_step(*args: Any, **kwargs: Any) -> Any:
        returned = original_step(*args, **kwargs)
        losses, grad_norm = returned[0], returned[5]
        result.grad_norms.append(None if grad_norm is None else float(grad_norm))
        if losses:
            result.metrics.append({name: float(value) for name, value in losses.items()})
            result.losses.append(result.metrics[-1]["lm loss"])
        return returned

    def train_loop(step: Any, model: list, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original_train(step, model, optimizer, *args, **kwargs)
        finally:  # --exit-interval leaves by SystemExit
            result.weights, result.shards = _weights(model)
            if inspect is not None:
                result.inspected = _function(inspect)(model, optimizer)

    training.train_step, training.train = train_step, train_loop
    try:
        result.exit_status = importlib.import_module(f"megatron_aro.{entry}").main(argv)
    except SystemExit as leaving:
        result.exit_status = int(leaving.code or 0)
    finally:
        training.train_step, training.train = original_step, original_train
    return result


def train_each(trainings: Sequence[Sequence[str]]) -> list[TrainResult]:
    """Trainings one after another in this process, on any device; starting NCCL takes longest."""
    from megatron.training.training import destroy_global_state

    from megatron_aro import pretrain_gpt

    def main(argv: Sequence[str]) -> int:
        pretrain_gpt.train(argv)  # the process group stays
        destroy_global_state()
        return 0

    pretrain_gpt.main = main  # type: ignore[assignment]
    return [train(flags) for flags in trainings]


def full_weights(results: Sequence[TrainResult]) -> dict[str, torch.Tensor]:
    """The whole model's weights from all ranks' shards, as one process would have them."""
    shards: dict[str, dict[int, torch.Tensor]] = {}
    layout: dict[str, Shard] = {}
    for result in results:
        for name, shard in result.shards.items():
            shards.setdefault(name, {})[shard.rank] = result.weights[name]
            layout[name] = shard
    return {name: _merge(parts, layout[name]) for name, parts in shards.items()}


def _merge(parts: dict[int, torch.Tensor], shard: Shard) -> torch.Tensor:
    if shard.dim is None:
        return parts[min(parts)]
    # Stride s: a shard is s pieces, piece i being its part of the i-th s-th of the whole.
    pieces = [parts[rank].chunk(shard.stride, shard.dim) for rank in range(shard.size)]
    return torch.cat([piece[i] for i in range(shard.stride) for piece in pieces], shard.dim)


def _weights(model: list) -> tuple[dict[str, torch.Tensor], dict[str, Shard]]:
    from megatron.core.utils import unwrap_model

    weights, shards = {}, {}
    for chunk in unwrap_model(model):
        renamed = _global_names(chunk)
        for name, parameter in chunk.named_parameters():
            if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
                continue  # a last stage's copy of the word embeddings
            for pattern, number in renamed:
                name = re.sub(pattern, number, name)
            weights[name] = parameter.detach().to("cpu", copy=True)
            shards[name] = _shard(parameter)
            if chunk.config.gated_linear_unit and ".experts.linear_fc1.weight" in name:
                shards[name].stride = 2  # gate and up, of which transformer-engine says nothing
    return weights, shards


def _global_names(chunk: torch.nn.Module) -> list[tuple[str, str]]:
    """(pattern of a local name, what it becomes) for layers of a stage and experts of a rank."""
    from megatron.core import mpu

    renamed = []
    for name, module in chunk.named_modules():
        if re.fullmatch(r"decoder\.layers\.\d+", name):
            new = f"decoder.@layers.{module.layer_number - 1}."
            renamed.append((rf"^{re.escape(name)}\.", new))
    offset = 0
    for module in chunk.modules():
        if hasattr(module, "num_local_experts") and hasattr(module, "ep_group"):
            offset = mpu.get_expert_model_parallel_rank() * module.num_local_experts
            for local in range(module.num_local_experts):
                new = f".@local_experts.{local + offset}."
                renamed.append((rf"\.local_experts\.{local}\.", new))
                new = rf"\1@weight{local + offset}"  # transformer-engine's grouped experts
                renamed.append((rf"(\.experts\.linear_fc[12]\.)weight{local}$", new))
            break
    # The @ keeps a renamed part from being renamed again.
    return [*renamed, ("@", "")]


def _shard(parameter: torch.nn.Parameter) -> Shard:
    from megatron.core import mpu

    if not getattr(parameter, "tensor_model_parallel", False):
        return Shard(None, 1, mpu.get_tensor_model_parallel_rank(), 1)
    group = mpu.get_tensor_model_parallel_group()
    if not getattr(parameter, "allreduce", True):  # an expert's
        group = mpu.get_expert_tensor_parallel_group()
    rank, size = group.rank(), group.size()
    dim, stride = parameter.partition_dim, parameter.partition_stride
    return Shard(dim if size > 1 else None, stride, rank, size)


def _function(function: str | Callable) -> Callable:
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)
