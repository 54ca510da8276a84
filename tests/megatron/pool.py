"""Worker processes for tests that need real Megatron on several ranks, on any machine.

Importing Megatron costs seconds. One process, the nursery, imports it once; every run forks its
ranks from there. So a run starts in milliseconds and nothing is left over from the one before:
process groups, Megatron's globals and whatever a test patched end with the forked ranks, and a
rank that crashes or hangs takes nobody with it.

    results = pool.run(2, function, argument)        # a list, one result per rank
    results = pool.train(2, ["--optimizer", "adam"])  # a TrainResult per rank

`function` is importable (a test module's function, or "module:function"); what goes in and out is
pickled. Everything runs in CPU mode over gloo, one thread a rank, also where there is a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from runs import TrainResult, train

TIMEOUT_S = 120.0
# How long the other ranks may go on after one has failed: they hang in a collective, mostly.
GRACE_S = 10.0
_POLL_S = 0.005
_ENDED = "was ended"
_TAIL = 4000  # characters of a rank's output that an error shows


class WorkerError(RuntimeError):
    """A rank raised, died or did not come back; the message has its traceback and output."""


@dataclass
class RankResult:
    """How a rank ended: `value` is what the function returned unless there is an `error`."""

    value: Any
    error: str
    stdout: str
    stderr: str


@dataclass
class _Job:
    world_size: int
    call: bytes  # pickled (function name, args, kwargs)
    sys_path: list[str]
    folder: str  # the current one
    timeout: float
    grace: float


class Pool:
    """Runs functions on fresh ranks; one run at a time. Close it in the end."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._nursery: subprocess.Popen | None = None
        self._connection: Connection | None = None

    def run(
        self,
        world_size: int,
        function: Callable | str,
        *args: Any,
        timeout: float = TIMEOUT_S,
        **kwargs: Any,
    ) -> list[Any]:
        """The results of function(*args, **kwargs) on ranks 0..world_size-1, in their order.

        Each rank finds torch.distributed initialised over gloo with this many ranks.

        Raises:
            WorkerError: a rank raised, died, or the run took longer than `timeout` seconds.
        """
        ranks = self.run_ranks(world_size, function, *args, timeout=timeout, **kwargs)
        _raise_errors(ranks)
        return [rank.value for rank in ranks]

    def run_ranks(
        self,
        world_size: int,
        function: Callable | str,
        *args: Any,
        timeout: float = TIMEOUT_S,
        grace: float = GRACE_S,
        **kwargs: Any,
    ) -> list[RankResult]:
        """Like `run`, but with each rank's output, and errors are returned.

        Args:
            timeout, grace: see the constants at the top, in seconds.
        """
        if not 1 <= world_size <= self.size:
            raise ValueError(f"world_size is {world_size}: the pool has 1 to {self.size} ranks.")
        if not isinstance(function, str):
            function = f"{function.__module__}:{function.__qualname__}"
        call = pickle.dumps((function, args, kwargs))
        connection = self._started()
        _send(connection, _Job(world_size, call, list(sys.path), os.getcwd(), timeout, grace))
        try:
            endings = _receive(connection)
        except (EOFError, OSError):
            self.close()
            raise WorkerError("The nursery of the worker processes died.") from None
        return [_result(*ending) for ending in endings]

    def train(
        self, world_size: int, argv: Sequence[str], *, timeout: float = TIMEOUT_S, **kwargs: Any
    ) -> list[TrainResult]:
        """A `TrainResult` per rank of `runs.train(argv, **kwargs)`: the entry's own run."""
        ranks = self.run_ranks(world_size, train, list(argv), timeout=timeout, **kwargs)
        _raise_errors(ranks)
        results: list[TrainResult] = [rank.value for rank in ranks]
        spoken = next((r.losses for r in results if r.losses), [])  # the last stage's
        for rank, result in zip(ranks, results, strict=True):
            result.stdout, result.stderr, result.losses = rank.stdout, rank.stderr, spoken
        return results

    def close(self) -> None:
        """End the nursery and, with it, every rank."""
        if self._connection is not None:
            self._connection.close()
        if self._nursery is not None:
            try:
                self._nursery.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._nursery.kill()
        self._nursery = self._connection = None

    def _started(self) -> Connection:
        if self._connection is None:
            ours, theirs = socket.socketpair()
            with theirs:
                environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
                environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, sys.path))
                self._nursery = subprocess.Popen(
                    [sys.executable, "-c", f"import pool; pool.serve({theirs.fileno()})"],
                    pass_fds=[theirs.fileno()],
                    env=environment,
                    start_new_session=True,  # Ctrl-C is pytest's; it closes the pool
                )
            self._connection = Connection(ours.detach())
        return self._connection


def _raise_errors(ranks: Sequence[RankResult]) -> None:
    failed = [(number, rank) for number, rank in enumerate(ranks) if rank.error]
    failed.sort(key=lambda item: item[1].error.startswith(_ENDED))  # causes first
    if failed:
        raise WorkerError(
            "\n".join(
                f"rank {number}: {rank.error}\n"
                f"--- rank {number}, stdout:\n{rank.stdout[-_TAIL:]}\n"
                f"--- rank {number}, stderr:\n{rank.stderr[-_TAIL:]}"
                for number, rank in failed
            )
        )


def _result(payload: bytes, error: str, stdout: str, stderr: str) -> RankResult:
    value, raised = pickle.loads(payload) if payload else (None, error or "left early")
    return RankResult(value, raised or error, stdout, stderr)


def _send(connection: Connection, thing: Any) -> None:
    connection.send_bytes(pickle.dumps(thing))  # send would put tensors into shared memory


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def serve(descriptor: int) -> None:
    """The nursery's life: fork the ranks of each job that comes, until the other end closes."""
    connection = Connection(descriptor)
    _import_megatron()
    while True:
        try:
            job = _receive(connection)
        except EOFError:
            return
        _send(connection, _run_job(job, connection))


def _import_megatron() -> None:
    import gc
    import warnings

    warnings.simplefilter("ignore")
    from megatron_aro.megatron import cpu_mode

    cpu_mode.enable()
    # What a run imports beside the entry itself.
    for name in (
        "megatron_aro.pretrain_gpt",
        "megatron.core.datasets.helpers",
        "megatron.core.dist_checkpointing.strategies.torch",
        "megatron.core.models.mimo.optimizer",
        "megatron.core.optimizer.distrib_optimizer",
        "megatron.core.tokenizers.text.models",
        "numpy.testing",
        "megatron_aro.megatron.checkpoint",
        "megatron_aro.megatron.hooks",
        "megatron_aro.megatron.optimizer",
        "pytest",
        "torch.distributed.checkpoint",
    ):
        importlib.import_module(name)
    _remember_help()
    gc.freeze()  # else collections in the ranks would copy the pages they share


def _remember_help() -> None:
    """Read what --help says of Megatron's flags out of its sources once, not in every rank twice:
    a fifth of the processor time of a small training."""
    from argparse import ArgumentParser

    from megatron.training import argument_utils, arguments

    known: dict[type, dict[str, str]] = {}
    read = argument_utils.ArgumentGroupFactory._get_field_docstrings

    def remembered(factory: Any, of: type) -> dict[str, str]:
        if of not in known:
            known[of] = read(factory, of)
        return dict(known[of])

    argument_utils.ArgumentGroupFactory._get_field_docstrings = remembered
    arguments.add_megatron_arguments(ArgumentParser())


def _run_job(job: _Job, connection: Connection) -> list[tuple]:
    folder = Path(tempfile.mkdtemp(prefix="megatron-aro-pool-"))
    host = _fork(_host_store, folder)
    try:
        ranks = range(job.world_size)
        pids = {_fork(_be_rank, folder, rank, job): rank for rank in ranks}
        errors = _wait_for_ranks(pids, job, connection)
        return [_ending(rank, folder, errors.get(rank, "")) for rank in ranks]
    finally:
        _kill(host)
        shutil.rmtree(folder, ignore_errors=True)


def _fork(life: Callable[..., int], folder: Path, *args: Any) -> int:
    """A process that exits with what life(folder, *args) returns."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)  # with what it forks itself, as checkpoint writers are; see _kill
        _die_with_parent()
        code = life(folder, *args)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # no clean-up: what there is to clean up is the nursery's


def _kill(pid: int) -> None:
    """End a process that was forked here, and all that it left behind."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    _kill_group(pid)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _die_with_parent() -> None:
    """Ask Linux to end this process with the nursery, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _wait_for_ranks(pids: dict[int, int], job: _Job, connection: Connection) -> dict[int, str]:
    """Wait for all ranks; returns what is to say about those that did not end by themselves."""
    running, errors = dict(pids), {}
    deadline, why = time.monotonic() + job.timeout, f"did not end within {job.timeout:.0f} s"
    while running:
        time.sleep(_POLL_S)
        for pid, rank in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del running[pid]
                _kill_group(pid)
                code = os.waitstatus_to_exitcode(status)
                if code < 0:
                    errors[rank] = f"died of {signal.Signals(-code).name}"
                if code and time.monotonic() + job.grace < deadline:
                    deadline = time.monotonic() + job.grace
                    why = f"{_ENDED}, waiting for rank {rank}, which failed"
        closed = bool(wait([connection], 0))  # nobody is to speak now: pytest has gone
        if closed or time.monotonic() > deadline:
            for pid, rank in running.items():
                _kill(pid)
                errors[rank] = why
            running = {}
    return errors


def _ending(rank: int, folder: Path, error: str) -> tuple[bytes, str, str, str]:
    """(pickled result, error, stdout, stderr) of a rank."""
    files = [folder / f"{rank}.{name}" for name in ("result", "stdout", "stderr")]
    result, *output = [file.read_bytes() if file.exists() else b"" for file in files]
    return result, error, output[0].decode(errors="replace"), output[1].decode(errors="replace")


def _host_store(folder: Path) -> int:
    """Serve the ranks' rendezvous, on any free port, until killed: no rank may end it for all."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (folder / "port.new").write_text(str(store.port))
    (folder / "port.new").rename(folder / "port")
    signal.pause()
    return 0


def _be_rank(folder: Path, rank: int, job: _Job) -> int:
    """Run the function on one rank and leave its result in the folder."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        with open(folder / f"{rank}.{name}", "wb") as file:
            os.dup2(file.fileno(), descriptor)
    sys.path[:] = job.sys_path
    os.chdir(job.folder)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(job.world_size)))
    try:
        _join_group(folder, rank, job.world_size)
        name, args, kwargs = pickle.loads(job.call)
        module, _, attribute = name.partition(":")
        result = getattr(importlib.import_module(module), attribute)(*args, **kwargs), ""
    except BaseException:
        result = None, traceback.format_exc()
    with open(folder / f"{rank}.result", "wb") as file:
        _Pickler(file).dump(result)
    return int(bool(result[1])) or getattr(result[0], "exit_status", 0)


class _Pickler(pickle.Pickler):
    """Writes tensors as bytes: Megatron changes torch's way, and reading would import Megatron."""

    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, torch.Tensor):
            return NotImplemented
        data = thing.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return _tensor, (data, thing.dtype, tuple(thing.shape))


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.view(shape)


def _join_group(folder: Path, rank: int, world_size: int) -> None:
    import torch.distributed as dist

    port = folder / "port"
    while not port.exists():
        time.sleep(_POLL_S)
    store = dist.TCPStore("127.0.0.1", int(port.read_text()))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    dist.barrier()  # else a rank with little to do has gone when others connect to it
