"""Time whole iterations of several trainings, one after another in the same processes.

``megatron-aro bench --iteration`` starts it, by torchrun, with the path of a job: JSON of ``runs``,
a list of Megatron's flags for each, and ``out``, the file that rank 0 leaves the figures in.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import get_args
from megatron.training.training import destroy_global_state

from megatron_aro import pretrain_gpt
from megatron_aro.megatron import launch


class Clock:
    """`pretrain_gpt.forward_step` that notes when each iteration begins, the device being idle."""

    def __init__(self) -> None:
        self.calls = 0
        self.starts: list[float] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        chunks = get_args().virtual_pipeline_model_parallel_size or 1
        if self.calls % (chunks * get_num_microbatches()) == 0:
            torch.cuda.synchronize()
            self.starts.append(time.perf_counter())
        self.calls += 1
        return pretrain_gpt.forward_step(*args, **kwargs)

    def milliseconds(self) -> list[float]:
        """Of each iteration but the last, whose end nobody notes."""
        return [1e3 * (b - a) for a, b in zip(self.starts, self.starts[1:], strict=False)]


def measure(flags: Sequence[str]) -> dict[str, Any]:
    """One training: ``milliseconds`` of its iterations, and ``mib`` that a rank takes at most."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    # Megatron's distributed optimizers outlive their training (seen with 0.19.2).
    before = torch.cuda.memory_allocated()
    clock = Clock()
    pretrain_gpt.train(flags, clock)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    peak = torch.tensor((torch.cuda.max_memory_allocated() - before) / 2**20, device=device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    destroy_global_state()
    return {"milliseconds": clock.milliseconds(), "mib": peak.item()}


def main(path: str) -> int:
    job = json.loads(Path(path).read_text())

    def run() -> None:
        figures = [measure(flags) for flags in job["runs"]]
        if dist.get_rank() == 0:
            Path(job["out"]).write_text(json.dumps(figures))
        dist.destroy_process_group()

    return launch.reported(run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
