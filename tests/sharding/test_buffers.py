"""Flat buffers that cut no parameter: each lies in one rank's share, with bounded padding."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_aro.sharding.buffers import FlatBuffer, lay_out, lay_out_whole, padding_note

SIZES = st.lists(st.one_of(st.integers(1, 100), st.integers(1, 9000)), min_size=1, max_size=40)
ARGUMENTS = st.tuples(SIZES, st.integers(1, 9), st.none() | st.integers(1, 30_000), st.booleans())


def members(buffer: FlatBuffer, bucket: int) -> list[int]:
    return [i for i, of in enumerate(buffer.bucket_of) if of == bucket]


@settings(derandomize=True, max_examples=300, deadline=None)
@given(ARGUMENTS)
def test_one_rank_holds_each_parameter_whole(arguments: tuple) -> None:
    """Whatever the sizes, ranks and buckets; nothing overlaps, and starts are aligned."""
    sizes, ranks, _, _ = arguments
    buffer = lay_out_whole(*arguments)
    assert [stop - start for start, stop in buffer.spans] == sizes
    assert all(start % 64 == 0 for start, _ in buffer.spans)
    assert all(a[1] <= b[0] for a, b in pairwise(sorted(buffer.spans)))
    for i, size in enumerate(sizes):
        first, last = buffer.buckets[buffer.bucket_of[i]]
        assert first <= buffer.spans[i][0] and buffer.spans[i][1] <= last
        ((rank, end, held),) = buffer.held(i).runs
        assert end == rank + 1 and held == (0, size)
        share = (last - first) // ranks
        assert first + rank * share <= buffer.spans[i][0]
        assert buffer.spans[i][1] <= first + (rank + 1) * share


@settings(derandomize=True, max_examples=300, deadline=None)
@given(ARGUMENTS)
def test_buckets_are_such_as_megatron_demands(arguments: tuple) -> None:
    """One after the other, of equal aligned shares, and filled from the last parameter on."""
    sizes, ranks, _, for_bandwidth = arguments
    buffer = lay_out_whole(*arguments)
    assert buffer.buckets[0][0] == 0
    assert all(a[1] == b[0] for a, b in pairwise(buffer.buckets))
    divisor = math.lcm(ranks, 128, 2**16 if for_bandwidth else 1)
    for first, last in buffer.buckets:
        assert (last - first) % divisor == 0 and (last - first) // ranks % 64 == 0
    in_order = buffer.bucket_of[::-1]
    assert sorted(in_order) == list(in_order)
    assert set(in_order) == set(range(len(buffer.buckets)))


@settings(derandomize=True, max_examples=300, deadline=None)
@given(ARGUMENTS)
def test_shares_are_balanced_and_buckets_filled(arguments: tuple) -> None:
    """A share is the mean and one parameter at most; of several buckets none has empty shares."""
    sizes, ranks, bucket_size, for_bandwidth = arguments
    buffer = lay_out_whole(*arguments)
    rounding = math.lcm(64, math.lcm(ranks, 128, 2**16 if for_bandwidth else 1) // ranks)
    for bucket, (first, last) in enumerate(buffer.buckets):
        aligned = [-(-sizes[i] // 64) * 64 for i in members(buffer, bucket)]
        assert (last - first) / ranks < sum(aligned) / ranks + max(aligned) + rounding
    if bucket_size is None:
        assert len(buffer.buckets) == 1
    for bucket in range(len(buffer.buckets) - 1):
        own = [sizes[i] for i in members(buffer, bucket)]
        assert sum(own) >= max(bucket_size, ranks * max(own))
        # The first in the model came last, and without it the bucket was not full.
        assert sum(own[1:]) < max(bucket_size, ranks * max(own[1:], default=1))
    if len(buffer.buckets) > 1:
        for bucket in range(len(buffer.buckets)):
            holders = {buffer.held(i).runs[0][0] for i in members(buffer, bucket)}
            assert holders == set(range(ranks))


def test_the_longest_share_goes_to_the_rank_with_least_so_far() -> None:
    """Else one rank would have most in every bucket: 384 elements here, the other 256."""
    buffer = lay_out_whole([192, 192, 256] * 4, 2, 500)
    assert len(buffer.buckets) == 4
    ranks = [held.runs[0][0] for held in map(buffer.held, range(12))]
    assert [ranks[i : i + 3] for i in range(0, 12, 3)] == [[1, 1, 0], [0, 0, 1]] * 2


def test_padding_is_what_is_lost_to_the_longest_share() -> None:
    """None where shares come out equal; three quarters of a matrix for each rank without any."""
    whole, packed = lay_out_whole([64, 128, 192], 2), lay_out([64, 128, 192], 2)
    assert (whole.numel, packed.numel) == (384, 384)
    whole, packed = lay_out_whole([64, 256], 4), lay_out([64, 256], 4)
    assert (whole.numel, packed.numel) == (4 * 256, 384)
    assert padding_note([(384, 384), (1024, 384), (0, 0)]) == (
        "--aro-param-layout whole pads the flat buffers of ARO's matrices by up to 640 elements a "
        "rank (166.7% more than packed)"
    )


@pytest.mark.parametrize("ranks", [1, 4])
def test_no_parameters_need_no_buffer(ranks: int) -> None:
    """A pipeline stage may have none."""
    assert lay_out_whole([], ranks, 100).numel == 0 == lay_out([], ranks, 100).numel
