"""Megatron's flat buffers on integers: where parameters lie, and which rank holds which range.

A buffer is a row of buckets, and rank r holds the r-th equal share of every bucket. `lay_out` is
the rule of DistributedOptimizer._compute_per_buffer_param_layout in megatron-core 0.19.2:
parameters in reverse order, each starting at a multiple of 64 elements, in buckets that end once
they have `bucket_size` elements; the end of a bucket is padded so that it divides over the
data-parallel ranks. `lay_out_whole` lets no share end within a parameter, for more padding.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Container, Iterable, Sequence
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
    alone: Container[int] = (),
) -> FlatBuffer:
    """Lay parameters of these sizes out in one buffer.

    Args:
        sizes: elements of each parameter on one rank, in the model's order.
        ranks: that share the buffer.
        bucket_size: elements after which a bucket ends; None for one bucket.
        for_bandwidth: --ddp-pad-buckets-for-high-nccl-busbw.
        alone: which of them have a bucket each, as Megatron gives it to word embeddings that
            several stages have.
    """
    divisor = _bucket_divisor(ranks, for_bandwidth)
    spans: list[Interval] = []
    bucket_of: list[int] = []
    buckets: list[Interval] = []
    position = first = 0
    for i in reversed(range(len(sizes))):
        start = _padded(position, _START)
        position = start + sizes[i]
        spans.append((start, position))
        bucket_of.append(len(buckets))
        full = bucket_size is not None and position - first >= bucket_size
        if full or i in alone or i == 0 or i - 1 in alone:
            position = _padded(position, divisor)
            buckets.append((first, position))
            first = position
    return FlatBuffer(ranks, tuple(spans[::-1]), tuple(bucket_of[::-1]), tuple(buckets))


def lay_out_whole(
    sizes: Sequence[int],
    ranks: int,
    bucket_size: int | None = None,
    for_bandwidth: bool = False,
) -> FlatBuffer:
    """Lay parameters out so that one rank holds each of them whole; arguments as of `lay_out`.

    The parameters of a bucket go to its shares by size, the largest first, each to the share that
    is shortest by then. All shares are padded to the longest. Which rank gets which is free: the
    longest goes to the rank that has least in the buckets before, and so on.
    """
    divisor = math.lcm(_START, _bucket_divisor(ranks, for_bandwidth) // ranks)
    spans: list[Interval] = [(0, 0)] * len(sizes)
    bucket_of = [0] * len(sizes)
    buckets: list[Interval] = []
    totals = [0] * ranks
    first = 0
    for members in _whole_buckets(sizes, ranks, bucket_size):
        lengths = [(0, number) for number in range(ranks)]  # of the shares; a heap
        placed = []
        for i in sorted(members, key=lambda i: -sizes[i]):
            length, number = lengths[0]
            placed.append((i, number, length))
            heapq.heapreplace(lengths, (length + _padded(sizes[i], _START), number))
        lengths.sort(reverse=True)
        share = _padded(lengths[0][0], divisor)
        rank_of = {}
        least_first = sorted(range(ranks), key=totals.__getitem__)
        for (length, number), rank in zip(lengths, least_first, strict=True):
            rank_of[number] = rank
            totals[rank] += length
        for i, number, offset in placed:
            start = first + rank_of[number] * share + offset
            spans[i], bucket_of[i] = (start, start + sizes[i]), len(buckets)
        buckets.append((first, first + ranks * share))
        first += ranks * share
    return FlatBuffer(ranks, tuple(spans), tuple(bucket_of), tuple(buckets))


def _whole_buckets(sizes: Sequence[int], ranks: int, bucket_size: int | None) -> list[list[int]]:
    """Parameters by bucket, the last ones first.

    A bucket ends once it has `bucket_size` elements and, on average over its ranks, those of its
    largest parameter: every share is at least as long as that, so in a smaller bucket most shares
    would be padding. What is left over in the end joins the bucket before.
    """
    buckets: list[list[int]] = []
    members: list[int] = []
    elements = largest = 0
    for i in reversed(range(len(sizes))):
        members.append(i)
        elements, largest = elements + sizes[i], max(largest, sizes[i])
        if bucket_size is not None and elements >= max(bucket_size, ranks * largest):
            buckets.append(members)
            members, elements, largest = [], 0, 0
    if buckets and elements < ranks * largest:
        buckets[-1] += members
    elif members:
        buckets.append(members)
    return buckets


def padding_note(ranks: Iterable[tuple[int, int]]) -> str:
    """What `lay_out_whole` costs the rank that it costs most, in a sentence.

    Args:
        ranks: of each, the elements of its flat buffers as they are, and as `lay_out` has them.
    """
    added, packed = max((numel - packed, packed) for numel, packed in ranks)
    share = 100 * added / packed if packed else 0.0
    return (
        f"--aro-param-layout whole pads the flat buffers of ARO's matrices by up to {added:,} "
        f"elements a rank ({share:.1f}% more than packed)"
    )


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


def _bucket_divisor(ranks: int, for_bandwidth: bool) -> int:
    return math.lcm(ranks, _END, _END_FOR_BANDWIDTH if for_bandwidth else 1)


def _padded(value: int, divisor: int) -> int:
    return -(-value // divisor) * divisor
