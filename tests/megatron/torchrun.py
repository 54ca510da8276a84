"""Runs a piece of Python under torchrun on the GPUs of this machine, or all ranks on one of them.

NCCL refuses two ranks on one GPU of one host. Where there are fewer GPUs than ranks each rank says
that it is a host of its own: then NCCL's collectives go over sockets and the ranks take turns on
the GPU. Slow, and as right as on several.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

_ALONE = """
import os
os.environ |= {"LOCAL_RANK": "0", "NCCL_HOSTID": os.environ["RANK"], "NCCL_SOCKET_IFNAME": "lo"}
"""


def run(folder: Path, ranks: int, child: str, call: tuple) -> list[Any]:
    """What each rank left, by rank.

    Args:
        folder: where call and results lie.
        child: the source that each rank runs. It finds the path of the pickled `call` in
            sys.argv[1], and leaves its result in ``folder / f"{RANK}.pickle"``.
    """
    path = folder / "call.pickle"
    path.write_bytes(pickle.dumps(call))
    paths = [str(Path(__file__).parent), *sys.path]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    if torch.cuda.device_count() < ranks:
        child = _ALONE + child
    command += ["--nproc-per-node", str(ranks), "--no-python", sys.executable, "-c", child]
    done = subprocess.run(
        [*command, str(path)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "4",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        },
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(ranks)]
