"""When the phases of a step ran, and on which stream: what overlaps, and what it costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Phases:
    """Times of the phases of one step; on CUDA also NVTX ranges ``aro/<phase>``.

    Two events a phase are recorded on the stream that is current; nothing waits for the device
    until `milliseconds` is asked for.
    """

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[str, float | torch.cuda.Event, float | torch.cuda.Event]] = []

    def clear(self) -> None:
        """Forget the step before."""
        self._spans.clear()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self._cuda:
            torch.cuda.nvtx.range_push(f"aro/{name}")
        start = self._now()
        yield
        self._spans.append((name, start, self._now()))
        if self._cuda:
            torch.cuda.nvtx.range_pop()

    def milliseconds(self, *others: Phases) -> dict[str, float]:
        """Of each phase, summed over chunks, and ``all`` from the first start to the last end.

        Phases that overlap add up to more than ``all``. Waits for the device, unless the step is
        long over.

        Args:
            others: those of optimizers that step together with this one's, and start after it.
        """
        spans = [span for phases in (self, *others) for span in phases._spans]
        if not spans:
            return {}
        times: dict[str, float] = {}
        first = spans[0][1]
        for name, start, end in spans:
            if not isinstance(end, float):
                end.synchronize()
            times[name] = times.get(name, 0.0) + _between(start, end)
        return {**times, "all": max(_between(first, end) for _, _, end in spans)}

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class SideStream:
    """Work beside the current stream; in line where there is nothing to overlap with."""

    def __init__(self, device: torch.device, apart: bool):
        self._stream = torch.cuda.Stream(device) if apart and device.type == "cuda" else None

    def run(self, work: Callable[[], None]) -> torch.cuda.Event | None:
        """Enqueue work behind everything that the current stream has been given so far.

        Returns:
            what `wait` takes.
        """
        if self._stream is None:
            work()
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
            return self._stream.record_event()

    @staticmethod
    def wait(event: torch.cuda.Event | None) -> None:
        """Let the current stream go on only after this work."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


def _between(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(start, float) or isinstance(end, float):
        return 1e3 * (end - start)  # type: ignore[operator]
    return start.elapsed_time(end)
