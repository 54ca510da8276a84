"""Runs a function under torchrun on the GPUs of this machine, or all ranks on one of them.

NCCL refuses two ranks on one GPU of one host. Where there are fewer GPUs than ranks each rank says
that it is a host of its own: then NCCL's collectives go over sockets and the ranks take turns on
the GPU. Slow, and as right as on several.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_ALONE = """
import os
os.environ |= {"LOCAL_RANK": "0", "NCCL_HOSTID": os.environ["RANK"], "NCCL_SOCKET_IFNAME": "lo"}
"""
_CHILD = """
import importlib, os, pickle, sys
module, name, arguments, folder = pickle.load(open(sys.argv[1], "rb"))
result = getattr(importlib.import_module(module), name)(*arguments)
pickle.dump(result, open(f"{folder}/{os.environ['RANK']}.pickle", "wb"))
sys.exit(getattr(result, "exit_status", 0))
"""


def run(folder: Path, ranks: int, function: Callable, *arguments: Any) -> list[Any]:
    """What the function returned on each rank; both it and that can be pickled.

    Args:
        folder: where call and results lie.
    """
    path = folder / "call.pickle"
    call = (function.__module__, function.__name__, arguments, str(folder))
    path.write_bytes(pickle.dumps(call))
    paths = [str(Path(__file__).parent), *sys.path]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    child = _ALONE + _CHILD if torch.cuda.device_count() < ranks else _CHILD
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
