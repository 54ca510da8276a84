"""A norm for sequence parallelism on the CPU.

Megatron's wrapper of torch's norms refuses ``--sequence-parallel``, which mixture-of-experts with
tensor parallelism demands; the norms that do not are kernels of apex and transformer-engine. All
such a norm lacks is the mark by which Megatron sums its gradients over the tensor-parallel group.
"""

from __future__ import annotations

import copy
from typing import Any


def install() -> None:
    """Let Megatron's WrappedTorchNorm be built under sequence parallelism."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    original = WrappedTorchNorm.__new__

    def build(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return original(cls, config, *args, **kwargs)
        config = copy.copy(config)
        config.sequence_parallel = False
        norm = original(cls, config, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    WrappedTorchNorm.__new__ = build
