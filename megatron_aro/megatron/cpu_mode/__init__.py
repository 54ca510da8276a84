"""Real Megatron without a GPU: unmodified megatron-core trains on the CPU over gloo.

Five things stand between Megatron and a CPU, a file for each: it calls torch.cuda everywhere
(`answers`), gloo refuses some collectives (`collectives`), some defaults are kernels that exist on
a GPU only (`flags`), torch's norm refuses sequence parallelism (`norm`), and Megatron's own core
attention refuses context parallelism (`attention`). Where a GPU is there, none of it happens:
`enable` returns before it touches anything.

An entry calls `enable` first, and `prepare` with the user's flags.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import torch

from megatron_aro.megatron.cpu_mode.flags import default_flags

__all__ = ["default_flags", "enable", "is_active", "prepare"]

_active = False


def is_active() -> bool:
    """Whether Megatron runs on the CPU: our own code asks this, never torch.cuda."""
    return _active


def enable() -> bool:
    """Make Megatron train on the CPU if there is no GPU. Idempotent; returns `is_active`.

    It may be called before or after torch and Megatron are imported, but before Megatron is
    initialised.
    """
    global _active
    if _active or _gpu_is_available():
        return _active
    # Megatron's torch.compile'd helpers would each start a C++ compiler; eager is quicker here.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if "torch._dynamo" in sys.modules:  # it has read the environment already
        torch.compiler.set_stance("force_eager")
    # Megatron demands it for the order of kernels on a GPU when tensors or sequences are split.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

    for part in ("answers", "collectives", "norm", "attention"):
        importlib.import_module(f"{__name__}.{part}").install()
    _active = True
    return True


def prepare(argv: Sequence[str]) -> list[str]:
    """The flags with what the CPU requires appended; rank 0 says so in one line.

    Raises:
        ValueError: a flag asks for what only a GPU can do.
    """
    if not is_active():
        return list(argv)
    added = default_flags(argv)
    if os.environ.get("RANK", "0") == "0":
        print(f"No GPU: Megatron trains on the CPU over gloo, with {' '.join(added)}", flush=True)
    return [*argv, *added]


def _gpu_is_available() -> bool:
    return torch.cuda.is_available()
