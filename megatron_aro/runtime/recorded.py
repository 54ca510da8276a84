"""Small batches by CUDA graphs: launching a step's hundred kernels takes longer than running them.

A graph reads and writes the same memory at each replay, so what is recorded keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Recorded[T]:
    """Work whose tensors stay where they are, and which does not wait for the device.

    The first call runs it: kernels are compiled and loaded then. The second records it, for good.
    """

    def __init__(self, work: Callable[[], T], pool: Any):
        """`pool`: of `torch.cuda.graph_pool_handle`; work that takes turns can share one."""
        self._work, self._pool = work, pool
        self._warm = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: T

    def __call__(self) -> T:
        """Do the work; tensors that it returns hold until it is done again."""
        if not self._warm:
            self._warm = True
            return self._work()
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile: NCCL's watchdog does.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._result = self._work()
            self._graph = graph
        self._graph.replay()
        return self._result
