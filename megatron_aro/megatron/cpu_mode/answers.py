"""What torch.cuda answers to Megatron when there is no GPU.

Every tensor lives on the CPU, so "the CUDA device" is the CPU, a stream is the program's own
order, and the CUDA generator is torch's default generator. Torch asks some of these questions on
its own behalf (has the data loader pinned memory, does an optimizer have fused kernels): it must
go on hearing the truth, so `is_available` and `device_count` look at who asks.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def install() -> None:
    """Answer torch.cuda, torch.distributed and device arguments from now on."""
    replaced: dict[int, Any] = {}
    for holder, answers in _answers():
        for name, answer in answers.items():
            original = getattr(holder, name, None)
            if callable(original):
                replaced[id(original)] = answer
            setattr(holder, name, answer)
    # What Megatron took by name before, as in `from torch.cuda import _lazy_call`.
    for module in [m for name, m in sys.modules.items() if name.partition(".")[0] == "megatron"]:
        for name, value in list(vars(module).items()):
            if id(value) in replaced:
                setattr(module, name, replaced[id(value)])
    _CudaIsCpu().__enter__()  # for the rest of the process


def _answers() -> list[tuple[Any, dict[str, Any]]]:
    """(module, name -> answer) of every torch name that is replaced."""
    cuda = torch.cuda
    generator = torch.default_generator
    nothing, zero = _returning(None), _returning(0)
    # The plainest card that has bfloat16: Megatron turns on nothing more for it.
    card = SimpleNamespace(
        name="cpu", major=8, minor=0, multi_processor_count=1, total_memory=_memory_in_bytes()
    )
    return [
        # Which devices are there?
        (
            cuda,
            {
                "is_available": _to_megatron(True, cuda.is_available),
                "device_count": _to_megatron(_local_processes(), cuda.device_count),
                "current_device": zero,
                "set_device": nothing,
                "device": _NoDevice,
                "get_device_name": _returning(card.name),
                "get_device_capability": _returning((card.major, card.minor)),
                "get_device_properties": _returning(card),
                "utilization": zero,
                "temperature": zero,
                "power_draw": zero,
                "clock_rate": zero,
            },
        ),
        # Streams and events order kernels; the CPU runs everything in program order.
        (
            cuda,
            {
                "Stream": _Stream,
                "ExternalStream": _Stream,
                "Event": _Event,
                "stream": _NoDevice,
                "current_stream": _Stream,
                "default_stream": _Stream,
                "set_stream": nothing,
                "synchronize": nothing,
                "is_current_stream_capturing": _returning(False),
                "_sleep": nothing,
            },
        ),
        (cuda.graphs, {"is_current_stream_capturing": _returning(False)}),
        # Device memory: none is used.
        (
            cuda,
            {
                "empty_cache": nothing,
                "memory_allocated": zero,
                "max_memory_allocated": zero,
                "memory_reserved": zero,
                "max_memory_reserved": zero,
                "device_memory_used": zero,
                "reset_peak_memory_stats": nothing,
                "mem_get_info": _returning((card.total_memory, card.total_memory)),
                "memory_stats": lambda *args, **kwargs: defaultdict(int),
                "memory_snapshot": lambda *args, **kwargs: [],
                "memory_summary": _returning(""),
            },
        ),
        # Randomness: the default generator. torch.manual_seed calls cuda.manual_seed_all, which
        # therefore stays as it is.
        (
            cuda,
            {
                "manual_seed": lambda seed: generator.manual_seed(int(seed)),
                "get_rng_state": lambda *args, **kwargs: generator.get_state(),
                "set_rng_state": lambda state, *args, **kwargs: generator.set_state(state),
                "default_generators": defaultdict(lambda: generator),
            },
        ),
        (cuda.random, {"get_rng_state": lambda *args, **kwargs: generator.get_state()}),
        # Megatron's tracker of random states defers a call until CUDA is up: it is.
        (cuda, {"_lazy_init": nothing, "_lazy_call": lambda call, **kwargs: call()}),
        # Constructors of typed tensors.
        (
            cuda,
            {
                f"{kind}Tensor": getattr(torch, f"{kind}Tensor")
                for kind in ("Byte", "Int", "Long", "Half", "BFloat16", "Float", "Double")
            },
        ),
        # Profiling marks.
        (cuda.nvtx, {"range_push": zero, "range_pop": zero, "range": _NoDevice}),
        (cuda.profiler, {"start": nothing, "stop": nothing}),
        (
            cuda,
            {
                "check_error": nothing,
                "cudart": _returning(
                    SimpleNamespace(cudaProfilerStart=zero, cudaProfilerStop=zero)
                ),
            },
        ),
        # Collectives go over gloo, which sums but does not average.
        (
            torch.distributed,
            {
                "init_process_group": _over_gloo(distributed_c10d.init_process_group),
                "new_group": _over_gloo(distributed_c10d.new_group),
                "all_reduce": _all_reduce,
            },
        ),
    ]


class _CudaIsCpu(TorchFunctionMode):
    """Places on the CPU whatever asks for a CUDA device, and names CPU tensors as CUDA's."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if kwargs.get("pin_memory"):  # pinned memory is an accelerator's
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron sorts parameters by names such as torch.cuda.FloatTensor.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)  # a CUDA device's index


class _NoDevice(contextlib.nullcontext):
    """Stands for a context on a device, stream or profiler range, whatever its arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


class _Stream:
    """A stream whose work is always done."""

    cuda_stream = 0
    device_index = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = _CPU

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: Any) -> None: ...

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0


class _Event:
    """An event that has happened when it is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seconds = 0.0

    def record(self, stream: Any = None) -> None:
        self.seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds, as CUDA's."""
        return (end.seconds - self.seconds) * 1e3


def _returning(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _to_megatron(answer: Any, truth: Callable[[], Any]) -> Callable[[], Any]:
    """Answers Megatron's modules, and everybody else with the truth."""

    @functools.wraps(truth)
    def ask() -> Any:
        asker = sys._getframe(1).f_globals.get("__name__", "")
        return answer if asker.partition(".")[0] == "megatron" else truth()

    return ask


def _local_processes() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _memory_in_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 1 << 33


def _over_gloo(create: Callable[..., Any]) -> Callable[..., Any]:
    """init_process_group or new_group with gloo for every backend that needs a GPU."""

    @functools.wraps(create)
    def create_over_gloo(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") in (None, "nccl", "cpu:gloo,cuda:nccl"):
            kwargs["backend"] = "gloo"
        if kwargs["backend"] == "gloo":
            for name in ("pg_options", "device_id"):  # both are NCCL's
                kwargs.pop(name, None)
        return create(*args, **kwargs)

    return create_over_gloo


@functools.wraps(distributed_c10d.all_reduce)
def _all_reduce(
    tensor: torch.Tensor,
    op: Any = torch.distributed.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    if op != torch.distributed.ReduceOp.AVG:
        return distributed_c10d.all_reduce(tensor, op=op, group=group, async_op=async_op)
    assert not async_op, "gloo does not average; --ddp-average-in-collective is refused"
    distributed_c10d.all_reduce(tensor, group=group)
    tensor.div_(torch.distributed.get_world_size(group))
