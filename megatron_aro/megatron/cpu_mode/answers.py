"""What torch.cuda answers to Megatron when there is no GPU.

Every tensor lives on the CPU, so "the CUDA device" is the CPU, a stream is the program's own
order, and the CUDA generator is torch's default generator. Torch asks some of these questions on
its own behalf (has the data loader pinned memory, does an optimizer have fused kernels): it must
go on hearing the truth, so `is_available` and `device_count` look at who asks.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def install() -> None:
    """Answer torch.cuda and device arguments from now on."""
    for module, answers in _answers():
        replace(module, answers)
    # One generator serves both, so drawing from "CUDA's" moves "the CPU's": no news.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
    _CudaIsCpu().__enter__()  # for the rest of the process


def replace(module: Any, answers: dict[str, Any]) -> None:
    """Put the answers in the place of a module's names, and of what Megatron took from there."""
    replaced = {}
    for name, answer in answers.items():
        original = getattr(module, name, None)
        if callable(original):
            replaced[id(original)] = answer
        setattr(module, name, answer)
    # As in `from torch.cuda import _lazy_call`, if Megatron is imported already.
    for taker in [m for name, m in sys.modules.items() if name.partition(".")[0] == "megatron"]:
        for name, value in list(vars(taker).items()):
            if id(value) in replaced:
                setattr(taker, name, replaced[id(value)])


def _answers() -> list[tuple[Any, dict[str, Any]]]:
    """(module, name -> answer) of every torch name that is replaced."""
    cuda = torch.cuda
    generator = torch.default_generator
    # The plainest card that has bfloat16: Megatron turns on nothing more for it.
    card = SimpleNamespace(
        name="cpu", major=8, minor=0, multi_processor_count=1, total_memory=_memory_in_bytes()
    )
    return [
        # Which devices are there?
        (
            cuda,
            {
                "is_available": _to_megatron(lambda: True, cuda.is_available),
                "device_count": _to_megatron(_local_processes, cuda.device_count),
                **_always(None, "set_device"),
                **_always(card.name, "get_device_name"),
                **_always((card.major, card.minor), "get_device_capability"),
                **_always(card, "get_device_properties"),
                **_always(0, "current_device", "utilization", "temperature", "power_draw"),
                **_always(0, "clock_rate"),
                "device": _NoDevice,
            },
        ),
        # Streams and events order kernels; the CPU runs everything in program order.
        (
            cuda,
            {
                "Stream": _Stream,
                "ExternalStream": type("ExternalStream", (_Stream,), {}),
                "Event": _Event,
                "stream": lambda stream: contextlib.nullcontext(),
                "current_stream": lambda device=None: _Stream(),
                "default_stream": lambda device=None: _Stream(),
                **_always(None, "set_stream", "synchronize", "_sleep"),
                **_always(False, "is_current_stream_capturing"),
            },
        ),
        (cuda.graphs, _always(False, "is_current_stream_capturing")),
        # Device memory: none is used.
        (
            cuda,
            {
                **_always(0, "memory_allocated", "max_memory_allocated", "device_memory_used"),
                **_always(0, "memory_reserved", "max_memory_reserved"),
                **_always(None, "empty_cache", "reset_peak_memory_stats"),
                **_always((card.total_memory, card.total_memory), "mem_get_info"),
                "memory_stats": lambda device=None: defaultdict(int),
                "memory_snapshot": lambda mempool_id=None: [],
            },
        ),
        # Randomness: the default generator. torch.manual_seed calls cuda.manual_seed_all, which
        # therefore stays as it is.
        (
            cuda,
            {
                "manual_seed": lambda seed: generator.manual_seed(int(seed)),
                "get_rng_state": lambda device=None: generator.get_state(),
                "set_rng_state": lambda state, device=None: generator.set_state(state),
                "default_generators": defaultdict(lambda: generator),
            },
        ),
        (cuda.random, {"get_rng_state": lambda device=None: generator.get_state()}),
        # Megatron's tracker of random states defers a call until CUDA is up: it is.
        (cuda, {**_always(None, "_lazy_init"), "_lazy_call": lambda call, **kwargs: call()}),
        # Constructors of typed tensors.
        (
            cuda,
            {
                f"{kind}Tensor": getattr(torch, f"{kind}Tensor")
                for kind in ("Byte", "Int", "Long", "Half", "BFloat16", "Float", "Double")
            },
        ),
        # Profiling marks.
        (cuda.nvtx, {**_always(0, "range_push", "range_pop"), "range": _NoDevice}),
        (cuda.profiler, _always(None, "start", "stop")),
        (
            cuda,
            {
                **_always(None, "check_error"),
                **_always(
                    SimpleNamespace(**_always(0, "cudaProfilerStart", "cudaProfilerStop")),
                    "cudart",
                ),
            },
        ),
    ]


def _always(value: Any, *names: str) -> dict[str, Callable[..., Any]]:
    """A function for each name that returns `value`: torch.compile wants them distinct."""

    def answer() -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    return {name: answer() for name in names}


class _CudaIsCpu(TorchFunctionMode):
    """Places on the CPU whatever asks for a CUDA device, and names CPU tensors as CUDA's."""

    def __init__(self) -> None:
        super().__init__()
        self._host_generator = torch.Generator()

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.random_ and _asker() == "torch.utils.data.dataloader":
            # The seed of its workers. With a GPU it would not come from dropout's generator;
            # drawn there, a resumed run would not go on as if it had never stopped.
            kwargs = {**kwargs, "generator": self._host_generator}
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
    """Stands for a context on a device or of a profiler's range, whatever its arguments."""

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


def _to_megatron(answer: Callable[[], Any], truth: Callable[[], Any]) -> Callable[[], Any]:
    """Answers Megatron's modules, and everybody else with the truth."""

    @functools.wraps(truth)
    def ask() -> Any:
        return answer() if _asker().partition(".")[0] == "megatron" else truth()

    return ask


def _asker() -> str:
    """The name of the module that calls the function that asks this."""
    return sys._getframe(2).f_globals.get("__name__", "")


def _local_processes() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _memory_in_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 1 << 33
