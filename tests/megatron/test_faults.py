"""A rank that dies, fails or stalls in mid-step ends the job, and the others say so."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from aro_runs import ARO, DISTRIBUTED, GATED
from pool import Pool, RankResult

from megatron_aro.megatron import launch

TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
RUN = [*ARO, *GATED, *TP2, *DISTRIBUTED, "--distributed-timeout-minutes", "1"]
LOST = r"error: rank {} lost contact with other ranks {}: the log of the rank that failed first"
STEP = "in ARO's step"
ANYWHERE = r"in [\w' ]+( \(\w+\.py, line \d+\))?"


def lost(rank: int, stderr: str, where: str = ANYWHERE) -> bool:
    return re.search(LOST.format(rank, where), stderr) is not None


def train(pool: Pool, rank: int, fault: str, grace: float) -> list[RankResult]:
    """Ranks have `grace` seconds after the first has failed, before the pool ends them."""
    call = "faults:train_with_fault", RUN, rank, fault
    return pool.run_ranks(4, *call, timeout=150, grace=grace)


@pytest.mark.parametrize(("rank", "fault"), [(0, "kill"), (3, "kill"), (1, "raise")])
def test_a_rank_that_dies_ends_all(pool: Pool, rank: int, fault: str) -> None:
    """No rank waits for it: its tensor-parallel peer in the exchange, the others where they are."""
    ranks = train(pool, rank, fault, grace=60)
    for number, result in enumerate(ranks):
        assert "ended" not in result.error.splitlines()[0]  # by the pool
        if number == rank:
            continue
        assert "RuntimeError" in result.error
        assert lost(number, result.stderr, STEP if number == rank ^ 1 else ANYWHERE)
    if fault == "raise":
        assert "OutOfMemoryError: CUDA out of memory, on purpose" in ranks[rank].error
        said = f"error: rank {rank} failed in ARO's step (OutOfMemoryError); ranks that wait"
        assert said in ranks[rank].stderr
    else:
        assert ranks[rank].error == "died of SIGKILL"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "NCCL error in: NCCLUtils.hpp:77, remote process exited or there was a network error",
            True,
        ),
        ("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLTOALL)", True),
        ("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 60000ms for recv", True),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("NCCL error in: NCCLUtils.hpp:77, invalid usage", False),
    ],
)
def test_what_backends_say_of_a_lost_rank(message: str, expected: bool) -> None:
    """NCCL's sentences, which cannot be provoked here, and errors that are a rank's own."""
    assert (launch._LOST.search(message) is not None) == expected


@pytest.mark.slow
def test_a_rank_that_stalls_ends_the_others_at_the_timeout(pool: Pool) -> None:
    """Its connection stays open; the minute of --distributed-timeout-minutes ends the wait."""
    ranks = train(pool, 2, "stop", grace=15)
    assert "waiting for rank" in ranks[2].error  # ended by the pool, the last
    for number in (0, 1, 3):
        assert lost(number, ranks[number].stderr, STEP if number == 3 else ANYWHERE)


@pytest.mark.parametrize("fault", ["kill", "raise"])
def test_a_job_on_two_nodes_ends(fault: str) -> None:
    """Two agents of torchrun with a rank each, so that neither ends the other's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    torchrun += ["--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    script = str(Path(__file__).with_name("faults.py"))
    began = time.monotonic()
    nodes = [
        subprocess.Popen(
            [*torchrun, "--node-rank", str(node), script, "1", fault, *RUN],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        for node in range(2)
    ]
    try:
        first, second = (node.communicate(timeout=120)[1] for node in nodes)
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [1, 1]
    assert lost(0, first, STEP), first[-3000:]
    cause = "Signal 9 (SIGKILL)" if fault == "kill" else "error: rank 1 failed in ARO's step"
    assert cause in second, second[-3000:]
    assert time.monotonic() - began < 100
