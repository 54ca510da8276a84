"""Ranks that die, fail or stall inside ARO's exchange; functions here run inside them."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any


def train_with_fault(argv: list[str], rank: int, fault: str) -> int:
    """Run the entry; in ARO's third step, one rank meets its fault before its first collective.

    Args:
        fault: "kill", "stop" (SIGKILL, SIGSTOP) or "raise" (as if out of memory).

    Returns:
        the entry's exit code.
    """
    import torch
    import torch.distributed as dist

    from megatron_aro import pretrain_gpt
    from megatron_aro.megatron import cpu_mode
    from megatron_aro.runtime.matrix_optimizer import MatrixOptimizer

    cpu_mode.enable()  # which has an all-to-all of its own
    steps, step, exchange = [0], MatrixOptimizer.step, dist.all_to_all_single

    def counted(self: MatrixOptimizer, closure: None = None) -> None:
        steps[0] += 1
        step(self, closure)
        steps[0] += 1

    def exchange_or_fail(*args: Any, **kwargs: Any) -> Any:
        if steps[0] == 5 and int(os.environ["RANK"]) == rank:
            if fault == "raise":
                raise torch.OutOfMemoryError("CUDA out of memory, on purpose")
            os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        return exchange(*args, **kwargs)

    MatrixOptimizer.step, dist.all_to_all_single = counted, exchange_or_fail  # type: ignore
    return pretrain_gpt.main(argv)


if __name__ == "__main__":
    sys.exit(train_with_fault(sys.argv[3:], int(sys.argv[1]), sys.argv[2]))
