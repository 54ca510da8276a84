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
from megatron_aro.kernels import products
from megatron_aro.kernels.halves import halves
from megatron_aro.rotation.scaling import reciprocal_or_zero

# Unit round-off of products on a GPU.
ROUNDOFF: dict[Precision, float] = {"fp32": 6e-8, "fp16x3": 2.4e-7, "tf32": 4.9e-4, "fp16": 4.9e-4}
# Float32 operations that a GPU does while it launches what a product of halves takes.
SMALL = 1e10

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
    """``a @ b``, [m, k] by [k, n] or batches of them; to be called inside ieee_products.

    On CUDA as ``precision`` says. Small float32 products are float32's instead of fp16x3's, which
    are as exact, and TF32's instead of fp16's, which have as many bits.
    """
    if _in_halves(a, b, precision):
        wide = a.dim() == 3
        out = of_halves(a if wide else a[None], b if wide else b[None], precision == "fp16x3")
        return out if wide else out[0]
    if precision in ("fp32", "fp16x3"):
        return a @ b
    _set("cuda", "matmul", "tf32")
    try:
        return a @ b
    finally:
        _set("cuda", "matmul", "ieee")


def _in_halves(a: Tensor, b: Tensor, precision: Precision) -> bool:
    if precision not in ("fp16", "fp16x3") or not a.is_cuda or a.dtype != torch.float32:
        return False
    return 2.0 * a.numel() * b.shape[-1] > SMALL


def of_halves(a_bmk: Tensor, b_bkn: Tensor, split: bool) -> Tensor:
    """``a @ b`` of float16 halves (`kernels.halves`), whatever the scales of a's rows, b's columns.

    Entries below 1e-7 of the largest in their row or column lose bits. What is not finite makes its
    row or column so.
    """
    rows = torch.linalg.vector_norm(a_bmk, float("inf"), dim=2)
    columns = torch.linalg.vector_norm(b_bkn, float("inf"), dim=1)
    left, _ = halves(a_bmk, split=split, rows_br=reciprocal_or_zero(rows), factor=4096.0)
    right, _ = halves(b_bkn, split=split, columns_bc=reciprocal_or_zero(columns), factor=4096.0)
    out = products.product(left, right, 4096.0**-2)
    return out.mul_(rows[:, :, None]).mul_(columns[:, None, :])


def unit_roundoff(x: Tensor, precision: Precision) -> float:
    """Unit round-off u of a ``product`` of tensors like ``x`` (spec, zero rows of R^T M)."""
    if x.dtype == torch.float64:
        return 1.1e-16
    return ROUNDOFF[precision if x.is_cuda else "fp32"]
