"""Where the Triton kernels run, and one warning where they cannot."""

from __future__ import annotations

import os
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor


class _Missing:
    """Lets the modules of kernels be imported where there is no Triton; the twins run then."""

    @staticmethod
    def jit(function: Any = None, **_: Any) -> Any:
        return function if function else lambda decorated: decorated

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"Triton is not installed: {name}")


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = _Missing()

# Triton's own switch: kernels are executed by Python, on CPU tensors too. For tests.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def require_contiguous(x: Tensor) -> None:
    """For kernels that read rows one after the other.

    Raises:
        ValueError: it has other strides.
    """
    if not x.is_contiguous():
        raise ValueError(f"a kernel for contiguous matrices was given strides {x.stride()}.")


def use_triton(x: Tensor) -> bool:
    """Whether a kernel runs on ``x``; else its torch twin does, on a GPU with a warning."""
    if INTERPRETED:
        return x.dtype == torch.float32
    if not x.is_cuda:
        return False
    reason = _obstacle(x.dtype, x.device)
    if reason:
        _warn(reason)
    return not reason


@cache
def _obstacle(dtype: torch.dtype, device: torch.device) -> str:
    if dtype != torch.float32:
        return f"the kernels are for float32, not {dtype}"
    if isinstance(triton, _Missing):
        return "Triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"{torch.cuda.get_device_name(device)} has no TF32 tensor cores"
    return ""


@cache
def _warn(reason: str) -> None:
    warnings.warn(f"ARO's fast kernels are not used: {reason}; plain torch is.", stacklevel=3)
