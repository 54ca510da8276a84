"""The pool of worker processes: what the other tests here stand on."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

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


def fork_a_child(path: str, ends: bool) -> None:
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    Path(path).write_text(str(child))
    if not ends:
        time.sleep(1000)


@pytest.mark.parametrize("ends", [True, False])
def test_children_of_ranks_are_ended(pool: Pool, tmp_path: Path, ends: bool) -> None:
    """What a rank forks (Megatron forks a manager for each torch_dist save) ends with it."""
    pids = tmp_path / "pids"
    pool.run_ranks(1, fork_a_child, str(pids), ends=ends, timeout=5)
    child = int(pids.read_text())
    deadline = time.monotonic() + 10
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return bool(found.stdout.strip()) and not found.stdout.startswith("Z")
