"""Runs that end by SIGKILL at a chosen moment; functions here run inside a pool's ranks."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from runs import TrainResult, train


def train_killed(
    argv: list[str], victims: list[int], moment: str, call: int, delay: float
) -> TrainResult:
    """Train, and kill these ranks so many seconds after they entered a function for the n-th time.

    Args:
        moment: "train_step" or "save_checkpoint".
        call: counted from 1.
    """
    from megatron.training import training

    original, calls = getattr(training, moment), 0

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and int(os.environ["RANK"]) in victims:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return original(*args, **kwargs)

    setattr(training, moment, watched)
    return train(argv)
