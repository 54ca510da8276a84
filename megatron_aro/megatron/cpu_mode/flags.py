"""The flags that Megatron needs on a CPU, and those it cannot have there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

# Appended unless the user gave the flag. The fusions are CUDA kernels of apex,
# transformer-engine and Megatron itself.
_REQUIRED = (
    ("--transformer-impl", "local"),
    ("--distributed-backend", "gloo"),
    ("--num-workers", "0"),  # two cores have no room for data loading processes
    ("--no-gradient-accumulation-fusion",),
    ("--no-masked-softmax-fusion",),
    ("--no-bias-gelu-fusion",),
    ("--no-bias-swiglu-fusion",),
    ("--no-bias-dropout-fusion",),
    ("--no-rope-fusion",),
    ("--no-persist-layer-norm",),
)


class _NeedsGpu(NamedTuple):
    flag: str
    refused: Callable[[str], bool]
    way_out: str


def _always(value: str) -> bool:
    return True


def _is_not(*allowed: str) -> Callable[[str], bool]:
    return lambda value: value not in allowed


_DROP = "drop the flag"
_NEED_GPU = (
    _NeedsGpu("--transformer-impl", _is_not("local"), "use --transformer-impl local"),
    _NeedsGpu("--distributed-backend", _is_not("gloo"), "use --distributed-backend gloo"),
    _NeedsGpu("--attention-backend", _is_not("local", "unfused", "auto"), "use unfused"),
    _NeedsGpu("--use-flash-attn", _always, _DROP),
    _NeedsGpu("--multi-latent-attention", _always, _DROP),  # transformer-engine's attention
    _NeedsGpu("--moe-grouped-gemm", _always, "drop the flag: experts run one after another"),
    _NeedsGpu("--moe-permute-fusion", _always, _DROP),
    _NeedsGpu("--moe-router-fusion", _always, _DROP),
    _NeedsGpu("--moe-token-dispatcher-type", _is_not("allgather", "alltoall"), "use alltoall"),
    _NeedsGpu("--cross-entropy-fusion-impl", _is_not("native"), "use native"),
    _NeedsGpu("--fp8-format", _always, "use --bf16"),
    _NeedsGpu("--fp4-format", _always, "use --bf16"),
    _NeedsGpu("--cuda-graph-impl", _is_not("none"), _DROP),
    _NeedsGpu("--enable-cuda-graph", _always, _DROP),
    _NeedsGpu("--tp-comm-overlap", _always, _DROP),
    _NeedsGpu("--use-sharp", _always, _DROP),
    _NeedsGpu("--use-nccl-ub", _always, _DROP),
    _NeedsGpu("--use-megatron-fsdp", _always, "use --use-distributed-optimizer"),
    _NeedsGpu("--use-torch-fsdp2", _always, "use --use-distributed-optimizer"),
    _NeedsGpu("--use-precision-aware-optimizer", _always, _DROP),
    _NeedsGpu("--optimizer-cpu-offload", _always, _DROP),
    # Its worker sets a CUDA device, dies, and leaves the ranks waiting.
    _NeedsGpu("--use-persistent-ckpt-worker", _always, "drop the flag: saving is not async then"),
    _NeedsGpu("--ddp-average-in-collective", _always, "drop the flag: gloo only sums"),
)


def default_flags(argv: Sequence[str]) -> list[str]:
    """The flags that training on the CPU requires and `argv` lacks.

    Raises:
        ValueError: `argv` asks for what only a GPU can do; one sentence with the way out.
    """
    given = _values(argv)
    for need in _NEED_GPU:
        if need.flag in given and need.refused(given[need.flag]):
            asked = f"{need.flag} {given[need.flag]}".strip()
            raise ValueError(f"{asked} needs a GPU, and there is none here: {need.way_out}.")
    return [word for words in _REQUIRED if words[0] not in given for word in words]


def _values(argv: Sequence[str]) -> dict[str, str]:
    """Flag -> its value, the last one if given twice, "" for a switch."""
    values = {}
    for position, word in enumerate(argv):
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            following = argv[position + 1 : position + 2]
            if not equals and following and not following[0].startswith("--"):
                value = following[0]
            values[flag] = value
    return values
