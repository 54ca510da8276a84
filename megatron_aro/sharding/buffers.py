"""Megatron's flat buffers on integers: where parameters lie, and which rank holds which range.

The rule of DistributedOptimizer._compute_per_buffer_param_layout in megatron-core 0.19.2:
parameters in reverse order, each starting at a multiple of 64 elements, in buckets that end once
they have `bucket_size` elements; the end of a bucket is padded so that it divides over the
data-parallel ranks. Rank r holds the r-th equal share of every bucket.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_aro.sharding.logical import Interval
from megatron_aro.sharding.plan import Held

_START = 64  # elements
_END = 128
_END_FOR_BANDWIDTH = 2**16


@dataclass(frozen=True)
class FlatBuffer:
    """Positions of parameters in a flat buffer, in elements.

    Attributes:
        ranks: size of the data-parallel group that shares it.
        spans: of each parameter, in the order in which they were given.
        bucket_of: index of the bucket of each parameter.
        buckets: of the buffer; together they are all of it.
    """

    ranks: int
    spans: tuple[Interval, ...]
    bucket_of: tuple[int, ...]
    buckets: tuple[Interval, ...]

    @property
    def numel(self) -> int:
        """Elements of the buffer, padding included."""
        return self.buckets[-1][1] if self.buckets else 0

    def held(self, index: int) -> Held:
        """Which elements of a parameter each data-parallel rank holds."""
        return shares(self.spans[index], self.buckets[self.bucket_of[index]], self.ranks)


def lay_out(
    sizes: Sequence[int],
    ranks: int,
    bucket_size: int | None = None,
    for_bandwidth: bool = False,
) -> FlatBuffer:
    """Lay parameters of these sizes out in one buffer.

    Args:
        sizes: elements of each parameter on one rank, in the model's order. None of them is a
            shared embedding, to which Megatron gives a bucket of its own.
        ranks: that share the buffer.
        bucket_size: elements after which a bucket ends; None for one bucket.
        for_bandwidth: --ddp-pad-buckets-for-high-nccl-busbw.
    """
    divisor = math.lcm(ranks, _END, _END_FOR_BANDWIDTH if for_bandwidth else 1)
    spans: list[Interval] = []
    bucket_of: list[int] = []
    buckets: list[Interval] = []
    position = first = 0
    for number, size in enumerate(reversed(sizes), start=1):
        start = _padded(position, _START)
        position = start + size
        spans.append((start, position))
        bucket_of.append(len(buckets))
        full = bucket_size is not None and position - first >= bucket_size
        if full or number == len(sizes):
            position = _padded(position, divisor)
            buckets.append((first, position))
            first = position
    return FlatBuffer(ranks, tuple(spans[::-1]), tuple(bucket_of[::-1]), tuple(buckets))


def shares(span: Interval, bucket: Interval, ranks: int) -> Held:
    """What each rank holds of a parameter that lies at `span` of a flat buffer, in `bucket`."""
    (start, stop), (first, last) = span, bucket
    share = (last - first) // ranks
    runs = []
    for rank in range((start - first) // share, (stop - 1 - first) // share + 1):
        low, high = first + rank * share, first + (rank + 1) * share
        runs.append((rank, rank + 1, (max(start, low) - start, min(stop, high) - start)))
    return Held(ranks, tuple(runs))


def everywhere(size: int, ranks: int) -> Held:
    """A parameter that every data-parallel rank holds whole."""
    return Held(ranks, ((0, ranks, (0, size)),))


def _padded(value: int, divisor: int) -> int:
    return -(-value // divisor) * divisor
