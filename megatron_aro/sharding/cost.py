"""What one ARO step of a matrix costs: operations, bytes, predicted seconds.

Counts are those of `megatron_aro.rotation` for projection sinkhorn, rotation aro and scqr2 on an
oriented m x n matrix, k = min(m, n): X = R^T M, two Sinkhorns, A = M f(X)^T, two passes of
Cholesky QR on the m x k matrix A, Y = R^T M, D = R f(Y). (What `rotation.in_frame` and
`rotation.fast` do in their place is as much.) Lower orders are left out, and so are fall-backs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from megatron_aro.config import AROConfig, Precision
from megatron_aro.sharding.logical import LogicalMatrix

FP32 = 4  # bytes
# What an optimizer (dense, or of experts) may keep from step to step so that small batches can be
# CUDA graphs. A larger batch keeps the device busy for longer than its kernels take to launch.
RECORDED_BYTES = 256 << 20


@dataclass(frozen=True)
class Work:
    """One matrix's step, in floating-point operations, and the elements it touches.

    Attributes:
        products: the four products with R or f(X).
        factors: Gram matrices, Cholesky factors, solves, the check of orthonormality.
        elements: m x n.
        columns: k; each column of a Cholesky factor waits for the one before.
    """

    products: float
    factors: float
    elements: int
    columns: int

    @property
    def flops(self) -> float:
        return self.products + self.factors


@dataclass(frozen=True)
class Rates:
    """How fast a GPU steps a batch of matrices of one shape.

    Attributes:
        products, factors: operations a second.
        element: seconds an element of M, for everything that is no product: Sinkhorn, norms,
            conversions, cutting matrices out and storing them back.
        column: seconds a column, once for the batch.
        batch: seconds a batch.
    """

    products: float
    factors: float
    element: float
    column: float
    batch: float


# Halves: fitted on an H200, which computes as fast, to 19 batches, 1 to 128 matrices of 768 x 768
# to 4096 x 12288, with the rate of products as measured: root mean square of the relative error 11
# to 12%, at most 29% (docs/results/2026-11-28-rates-h200.json). float32: on an H100, 11%, at most
# 32%. TF32 was not measured: float32 with the products' rate of TF32.
H100: dict[Precision, Rates] = {
    "fp32": Rates(51e12, 36e12, 1.4e-10, 0.0, 2.67e-3),
    "tf32": Rates(312e12, 36e12, 1.4e-10, 0.0, 2.67e-3),
    "fp16": Rates(650e12, 288e12, 2.8e-11, 0.72e-6, 0.36e-3),
    "fp16x3": Rates(325e12, 207e12, 3.1e-11, 0.71e-6, 0.40e-3),
}


def rates_of(aro: AROConfig) -> Rates:
    """An H100's, for what these settings make of their precision.

    Without `rotation.fast` factors are float32's, and products taken for it, though large ones are
    of halves.
    """
    plain: dict[Precision, Precision] = {"fp16": "tf32", "fp16x3": "fp32"}
    return H100[aro.precision if aro.in_halves else plain.get(aro.precision, aro.precision)]


@cache
def step_work(m: int, n: int) -> Work:
    """The work of one step of an oriented m x n matrix."""
    k = min(m, n)
    # Two Gram matrices, a solve and the check, 2 m k^2 each or half of it, and two factors.
    return Work(8.0 * m * n * k, 8.0 * m * k * k + 2 * k**3 / 3, m * n, k)


def batch_seconds(count: int, m: int, n: int, rates: Rates = H100["fp16x3"]) -> float:
    """Predicted seconds of stepping so many oriented m x n matrices together."""
    work = step_work(m, n)
    return rates.batch + rates.column * work.columns + count * _each(work, rates)


@cache
def member_work(m: int, n: int) -> Work:
    """What a matrix adds to a stack of more than m columns in all: products with its m x m R."""
    return Work(8.0 * m * n * m, 0.0, m * n, 0)


@cache
def turn_work(m: int, k: int) -> Work:
    """The new rotation of a stack, m x k, from the sum of what its members looked ahead to."""
    return Work(0.0, step_work(m, k).factors, m * k, k)


def seconds(matrix: LogicalMatrix, rates: Rates = H100["fp16x3"]) -> float:
    """Predicted seconds that one more matrix adds to a batch; what `make_plan` balances.

    Of one that shares its rotation without what is done once for all that do: `turn_seconds`.
    """
    work = member_work if matrix.group else step_work
    return _each(work(*matrix.shape), rates)


def turn_seconds(m: int, k: int, rates: Rates = H100["fp32"]) -> float:
    """Predicted seconds of turning the m x k rotation of a stack."""
    return _each(turn_work(m, k), rates)


def _each(work: Work, rates: Rates) -> float:
    """Seconds a matrix."""
    return (
        work.products / rates.products
        + work.factors / rates.factors
        + work.elements * rates.element
    )


def turning_seconds(shapes: Iterable[tuple[int, int]], rates: Rates) -> float:
    """Predicted seconds of orthonormalising what is stepped by columns, of shapes (m, n)."""
    works = [step_work(m, n) for m, n in shapes]
    return sum(
        rates.batch + rates.column * work.columns + work.factors / rates.factors for work in works
    )


def rotation_bytes(m: int, n: int) -> int:
    """The rotation, m x k in float32, that the owner of an oriented m x n matrix keeps."""
    return FP32 * m * min(m, n)


def batch_limit(m: int, n: int, workspace: int) -> int:
    """How many oriented m x n matrices may be stepped at once in so many bytes; one always."""
    return max(1, workspace // workspace_bytes(m, n))


def members_bytes(elements: int, largest: int) -> int:
    """Memory of stepping what a rank has of stacks, all at once, beside the momenta, in bytes.

    Projecting holds all of them in their frames and squared, and the update is made from one half
    of a stack; to bring the last one into its frame takes its momentum and, on GPUs, the halves of
    this.

    Args:
        elements: of all its members; largest: of those of one stack.
    """
    return FP32 * (elements + max(elements + largest // 2, 2 * largest))


def turn_bytes(m: int, k: int) -> int:
    """Memory of turning the m x k rotation of a stack, beside the shares that came, in bytes."""
    return FP32 * 6 * m * k


def workspace_bytes(m: int, n: int) -> int:
    """Memory that stepping an oriented m x n matrix takes for a while, at its peak, in bytes.

    Beside the gathered momentum: where m <= n four m x n and one m x m, in the update. Else the
    larger of two moments: projecting (the scaled momentum, five k x n, one m x k) and
    orthonormalising (four m x k, two k x k). In halves (`rotation.fast`) seven m x m for square
    matrices (measured: 6.6 at 768), three m x k and four k x k where m > n (measured: 5% more than
    the other two at 1024 x 640). Without what cuBLAS and cuSOLVER take, and without fall-backs.
    """
    if m <= n:
        return FP32 * max(4 * m * n + m * m, 7 * m * m)
    k = min(m, n)
    return FP32 * max(m * n + 5 * k * n + m * k, 4 * m * k + 2 * k * k, 3 * m * k + 4 * k * k)


def recorded(batches: Sequence[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Which batches, of (matrices, m, n), a GPU replays as graphs: small ones, smallest first.

    And how many bytes stay allocated for it: their matrices and one workspace for all of them.
    """
    gathered = [FP32 * b * m * n for b, m, n in batches]
    found: list[int] = []
    kept = workspace = total = 0
    for i in sorted(range(len(batches)), key=gathered.__getitem__):
        b, m, n = batches[i]
        kept, workspace = kept + gathered[i], max(workspace, b * workspace_bytes(m, n))
        if kept + workspace > RECORDED_BYTES:
            break
        found.append(i)
        total = kept + workspace
    return found, total
