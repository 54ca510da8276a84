"""The pool of worker processes: what the other tests here stand on."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from pool import Pool, WorkerError

LEFT_BEHIND: list[int] = []


def rank_and_sum(value: float) -> tuple[int, torch.Tensor]:
    total = torch.full((2,), value * (dist.get_rank() + 1), dtype=torch.bfloat16)
    dist.all_reduce(total)
    return dist.get_rank(), total


def leave_something() -> int:
    LEFT_BEHIND.append(dist.get_rank())
    return len(LEFT_BEHIND)


def fail_on(rank: int, hang: bool) -> None:
    if dist.get_rank() == rank:
        print("about to fail")
        raise ValueError("on purpose")
    if hang:
        time.sleep(1000)


def kill_myself() -> None:
    os.kill(os.getpid(), 9)


def test_ranks_share_a_group_and_return_in_order(pool: Pool) -> None:
    """A function runs on every rank of a working group; tensors of any dtype come back."""
    results = pool.run(3, rank_and_sum, 0.5)
    assert [rank for rank, _ in results] == [0, 1, 2]
    for _, total in results:
        torch.testing.assert_close(total, torch.tensor([3.0, 3.0], dtype=torch.bfloat16))


def test_nothing_is_left_over(pool: Pool) -> None:
    """A module's globals are as new in each run."""
    assert pool.run(2, leave_something) == pool.run(2, leave_something) == [1, 1]


def test_a_failing_rank_is_reported_and_the_others_are_ended(pool: Pool) -> None:
    """The traceback and output of the rank that failed come back although another hangs."""
    started = time.monotonic()
    with pytest.raises(WorkerError, match="(?s)on purpose.*about to fail.*waiting for rank 1"):
        pool.run(2, fail_on, 1, hang=True, grace=0.5)
    assert time.monotonic() - started < 30


def test_a_dead_rank_does_not_break_the_pool(pool: Pool) -> None:
    """A rank that is killed is named, and the next run works."""
    with pytest.raises(WorkerError, match="died of SIGKILL"):
        pool.run(1, kill_myself)
    assert pool.run(1, leave_something) == [1]


def test_a_hanging_rank_times_out(pool: Pool) -> None:
    """Nobody fails, nobody ends: the timeout does."""
    with pytest.raises(WorkerError, match="did not end within 1 s"):
        pool.run(1, fail_on, 1, hang=True, timeout=1)
