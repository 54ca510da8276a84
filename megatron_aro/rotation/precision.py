"""Precision of float32 matrix products: set for ARO's work, given back to the caller unchanged.

torch keeps two records of it. The old API (``set_float32_matmul_precision``, ``allow_tf32``)
writes both, the new one (``fp32_precision``) only the second, which is also the one that the
products obey. Reading through the old API raises once the records disagree. This module reads and
writes the second alone, so it never raises and leaves the first as it was.

The second record is a tree: an operation that is "none" inherits from its backend, a backend from
the root. Reading gives the inherited value, and writing that back would cut the inheritance, so
what a node holds itself is found by moving its parent for a moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_aro.config import Precision

_ROOT = ("generic", "all")
# "mkldnn" is the CPU: there, "medium" would turn float32 products into bf16 ones.
_PRODUCTS = (("cuda", "matmul"), ("mkldnn", "matmul"))

_get = torch._C._get_fp32_precision_getter
_set = torch._C._set_fp32_precision_setter


def _own_setting(backend: str, op: str) -> str:
    """What this node of the tree holds itself: "none" where it inherits."""
    value = _get(backend, op)
    if (backend, op) == _ROOT:
        return value
    parent = _ROOT if op == "all" else (backend, "all")
    parents_own = _own_setting(*parent)
    probe = "tf32" if value == "ieee" else "ieee"
    _set(*parent, probe)
    inherits = _get(backend, op) == probe
    _set(*parent, parents_own)
    return "none" if inherits else value


@contextmanager
def ieee_products() -> Iterator[None]:
    """float32 products are IEEE inside, on CPU and CUDA; afterwards the caller's setting holds."""
    before = [_own_setting(*node) for node in _PRODUCTS]
    try:
        for node in _PRODUCTS:
            _set(*node, "ieee")
        yield
    finally:
        for node, own in zip(_PRODUCTS, before, strict=True):
            _set(*node, own)


def product(a: Tensor, b: Tensor, precision: Precision) -> Tensor:
    """``a @ b``, TF32 on CUDA if ``precision`` says so; to be called inside ieee_products.

    The halves of fp16 and fp16x3 are for the steps of `fast`: elsewhere fp16 means TF32, which has
    as many bits, and fp16x3 float32.
    """
    if precision not in ("tf32", "fp16"):
        return a @ b
    _set("cuda", "matmul", "tf32")
    try:
        return a @ b
    finally:
        _set("cuda", "matmul", "ieee")


def unit_roundoff(x: Tensor, precision: Precision) -> float:
    """Unit round-off u of a ``product`` of tensors like ``x`` (spec, zero rows of R^T M)."""
    if x.dtype == torch.float64:
        return 1.1e-16
    return 4.9e-4 if precision in ("tf32", "fp16") and x.device.type == "cuda" else 6e-8
