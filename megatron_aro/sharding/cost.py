"""What one ARO step of a matrix costs: operations, bytes, predicted seconds.

Counts are those of `megatron_aro.rotation` for projection sinkhorn, rotation aro and scqr2 on an
oriented m x n matrix, k = min(m, n): X = R^T M, two Sinkhorns, A = M f(X)^T, two passes of
Cholesky QR on the m x k matrix A, Y = R^T M, D = R f(Y). (Where m <= n, `rotation.in_frame` takes
S = X Q X^T and R N for A and one of the Gram matrices, which is as much, and solves once less.)
Lower orders are left out, and so are fall-backs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from megatron_aro.config import Precision
from megatron_aro.sharding.logical import LogicalMatrix

FP32 = 4  # bytes
_SINKHORN_ITERATIONS = 5


@dataclass(frozen=True)
class Work:
    """One step's work. All but `bytes` in floating-point operations.

    Attributes:
        products: the four products with R or f(X), whose precision is a setting.
        gram: A^T A of both passes, always float32.
        check: Q^T Q of the result, always TF32.
        cholesky, solve: of both passes.
        columns: Cholesky columns and triangular-solve columns, of which each one waits for the
            one before.
        bytes: read and written by everything that is no product: norms, scaling, Sinkhorn,
            cutting matrices out and storing them back.
    """

    products: float
    gram: float
    check: float
    cholesky: float
    solve: float
    columns: int
    bytes: float

    @property
    def flops(self) -> float:
        return self.products + self.gram + self.check + self.cholesky + self.solve


@dataclass(frozen=True)
class Rates:
    """How fast a GPU is; operations a second unless said otherwise.

    The defaults are an H100 with torch 2.11 and CUDA 13.0, measured by this project:

    Attributes:
        fp32, tf32: product 4096 x 12288 x 4096.
        copy: bytes a second read and written.
        cholesky, solve: of the part that grows with the operations; `cholesky_column` and
            `solve_column` are seconds a column. Fitted to 1.9 and 2.0 ms for one 4096 x 4096, and
            4.0 and 3.4 ms for 64 of 1024 x 1024.
    """

    fp32: float = 51e12
    tf32: float = 312e12
    copy: float = 2.98e12
    cholesky: float = 13.0e12
    cholesky_column: float = 34e-9
    solve: float = 36e12
    solve_column: float = 23e-9


H100 = Rates()


@cache
def step_work(m: int, n: int) -> Work:
    """The work of one step of an oriented m x n matrix."""
    k = min(m, n)
    product, gram = 2.0 * m * n * k, 2.0 * m * k * k
    # Passes over elements, read or written: cutting out, storing back, scale, mask, norms and the
    # final scaling touch m x n; zeroing small rows and columns, squares, two passes an iteration
    # and the final scaling touch k x n in each of two projections; scaling A, choosing and storing
    # Q touch m x k.
    elements = 20 * m * n + 2 * (12 + 2 * _SINKHORN_ITERATIONS) * k * n + 8 * m * k
    return Work(
        products=4 * product,
        gram=2 * gram,
        check=gram,
        cholesky=2 * k**3 / 3,
        solve=2.0 * m * k * k,
        columns=2 * k,
        bytes=FP32 * elements,
    )


def work_seconds(work: Work, rates: Rates = H100, precision: Precision = "fp32") -> float:
    """Predicted seconds of some work, done alone and without launch overhead."""
    return (
        work.products / (rates.fp32 if precision == "fp32" else rates.tf32)
        + work.gram / rates.fp32
        + work.check / rates.tf32
        + work.cholesky / rates.cholesky
        + work.solve / rates.solve
        + work.columns * (rates.cholesky_column + rates.solve_column)
        + work.bytes / rates.copy
    )


def seconds(matrix: LogicalMatrix, rates: Rates = H100, precision: Precision = "fp32") -> float:
    """Predicted seconds of one step of a matrix; what `make_plan` balances."""
    return work_seconds(step_work(*matrix.shape), rates, precision)


def rotation_bytes(m: int, n: int) -> int:
    """The rotation, m x k in float32, that the owner of an oriented m x n matrix keeps."""
    return FP32 * m * min(m, n)


def batch_limit(m: int, n: int, workspace: int) -> int:
    """How many oriented m x n matrices may be stepped at once in so many bytes; one always."""
    return max(1, workspace // workspace_bytes(m, n))


def workspace_bytes(m: int, n: int) -> int:
    """Memory that stepping an oriented m x n matrix takes for a while, at its peak, in bytes.

    Beside the gathered momentum: where m <= n four m x n and one m x m, in the update. Else the
    larger of two moments: projecting (the scaled momentum, five k x n, one m x k) and
    orthonormalising (four m x k, two k x k). Without what cuBLAS and cuSOLVER take, and without
    fall-backs.
    """
    if m <= n:
        return FP32 * (4 * m * n + m * m)
    k = min(m, n)
    return FP32 * max(m * n + 5 * k * n + m * k, 4 * m * k + 2 * k * k)
