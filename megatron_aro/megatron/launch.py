"""What both entries (`pretrain_gpt`, `run`) do before Megatron takes over, and how they fail."""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_aro.megatron import cpu_mode

TRACEBACK = "MEGATRON_ARO_TRACEBACK"
CONFIGURATION_ERROR = 2
_REFUSALS = (
    ValueError,
    AssertionError,
    NotImplementedError,
    ImportError,
    OSError,
    RuntimeError,
    KeyError,
    TypeError,
    ZeroDivisionError,
)
# Of these, torch raises some on values that Megatron handed on: a dropout of 2, say.
_OF_VALUES = (ValueError, AssertionError, TypeError, ZeroDivisionError)
_TRAINING = {"train", "evaluate", "evaluate_and_print_results", "save_checkpoint_and_time"}
# What gloo and NCCL say of a rank that has gone, or does not answer in time.
_LOST = re.compile(
    r"(gloo|NCCL|TCPStore).*(connection (closed|reset|refused)|tim(ed |e)out|remote process)"
    r"|timeout.*NCCL",
    re.IGNORECASE | re.DOTALL,
)
# So long the other ranks wait for rank 0 to speak: torchrun ends them well before.
_RANK_0_SPEAKS_S = 3.0


def prepare(argv: Sequence[str]) -> list[str]:
    """CPU mode where there is no GPU, ARO known to Megatron; returns the flags to run with.

    Raises:
        ValueError: a flag needs a GPU, and there is none.
        RuntimeError: megatron-core is of an untested version.
    """
    from megatron_aro import register

    cpu_mode.enable()
    register()
    return cpu_mode.prepare(argv)


def reported(run: Callable[[], None]) -> int:
    """Run an entry; an error of the settings is one sentence on rank 0's stderr.

    Returns:
        The exit code: 0, or 2 when Megatron's checks or ours refused the settings. Whatever goes
        wrong once training has begun, or deeper than a check, is raised as it is. So is everything
        if the environment variable MEGATRON_ARO_TRACEBACK is 1.
    """
    try:
        run()
    except Exception as error:
        refusal = isinstance(error, _REFUSALS) and _is_refusal(error)
        if os.environ.get(TRACEBACK) == "1" or not refusal:
            _announce(error)
            raise
        _report(error)
        return CONFIGURATION_ERROR
    return 0


def refused(run: Callable[[], Any]) -> int:
    """Run somebody's own code; only what ARO itself refuses is one sentence and exit code 2."""
    from megatron_aro.megatron.support import RefusedError

    try:
        run()
    except RefusedError as error:
        if os.environ.get(TRACEBACK) == "1":
            raise
        _report(error)
        return CONFIGURATION_ERROR
    except Exception as error:
        _announce(error)
        raise
    return 0


def _is_refusal(error: Exception) -> bool:
    """Whether a check raised it, before the first step: the frames on the way tell."""
    frames = [
        (frame.f_globals.get("__name__", ""), frame.f_code.co_name)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    training = [name for module, name in frames if module == "megatron.training.training"]
    if _TRAINING.intersection(training):
        return False
    # Before pretrain nothing is built: whoever raises, it is about the settings.
    package = frames[-1][0].partition(".")[0]
    ours = "pretrain" not in training or package in ("megatron", "megatron_aro")
    return ours or isinstance(error, _OF_VALUES)


def _announce(error: Exception) -> None:
    """One sentence before the traceback, by which to find the rank that failed first.

    Over NCCL a rank that waits for one that died is ended by torch's watchdog after
    --distributed-timeout-minutes, with its own message; no Python runs then.
    """
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return
    rank, place = dist.get_rank(), _place(error)
    if lost_contact(error):
        said = (
            f"rank {rank} lost contact with other ranks {place}: the log of the rank that failed "
            "first says why."
        )
    else:
        name = type(error).__name__
        said = f"rank {rank} failed {place} ({name}); ranks that wait for it lose contact."
    print(f"error: {said}", file=sys.stderr, flush=True)


def lost_contact(error: BaseException) -> bool:
    """Whether gloo or NCCL says that another rank has gone, or does not answer."""
    return isinstance(error, RuntimeError) and bool(_LOST.search(str(error)))


def _place(error: Exception) -> str:
    """Where an error was raised, frames of torch and of the CPU mode in its place aside."""
    frames = [
        (frame.f_globals.get("__name__", ""), frame.f_code, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    if any(module.startswith("megatron_aro.runtime.") for module, _, _ in frames):
        return "in ARO's step"
    collectives = re.compile(r"(torch|contextlib|megatron_aro\.megatron\.cpu_mode)(\.|$)")
    outside = [frame for frame in frames if not collectives.match(frame[0])]
    _, code, line = (outside or frames)[-1]
    return f"in {code.co_name} ({Path(code.co_filename).name}, line {line})"


def _report(error: Exception) -> None:
    rank = os.environ.get("RANK", "0")
    speaker = "error"
    if rank != "0":
        speaker = f"error on rank {rank}"
        if "TORCHELASTIC_RUN_ID" in os.environ:
            time.sleep(_RANK_0_SPEAKS_S)
    print(f"{speaker}: {_sentence(error)}", file=sys.stderr, flush=True)


def _sentence(error: Exception) -> str:
    words = " ".join(str(error).split())
    if words and isinstance(error, ValueError | AssertionError):
        return words
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"({Path(last.filename).name}, line {last.lineno}; {TRACEBACK}=1 shows more)"
    if isinstance(error, AssertionError):  # a bare one: its source says what it wants
        return f"`{(last.line or '').removeprefix('assert ')}` does not hold {where}"
    if words and not isinstance(error, KeyError):
        return f"{words} {where}"
    return f"{type(error).__name__} {words} {where}"
