"""Checkpoints that cannot be read: missing, truncated or foreign files, saves that were killed."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_aro.megatron.launch import lost_contact
from megatron_aro.megatron.support import RefusedError

_TRACKER = "latest_checkpointed_iteration.txt"
_LONGEST = 400  # characters of a cause
_MEANS = {
    "metadata is None": "its file .metadata is missing or damaged",
    "Missing key in checkpoint state_dict: args.": "its file metadata.json is missing",
}


def told(load: Callable[[], Any], folder: str | None, args: argparse.Namespace) -> Any:
    """The result of a function that loads from a folder of checkpoints; called by all ranks.

    Raises:
        RefusedError: in one sentence, where Megatron raises, or leaves with exit status 0; not
            where another rank has gone.
    """
    if folder is not None:
        _restore_tracker(Path(folder))
    origin: BaseException
    try:
        return load()
    except RefusedError:
        raise
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        if lost_contact(error):
            raise
        origin, cause = error, _cause(error)
    except SystemExit as error:
        if args.exit_on_missing_checkpoint and not (Path(folder or "") / _TRACKER).is_file():
            raise
        origin = error
        cause = f"{_TRACKER} must hold an iteration's number, and each rank's file be whole"
    raise RefusedError(
        f"The checkpoint in {folder} cannot be loaded, and this run has not started: {cause}; "
        "--ckpt-step ITERATION takes another one."
    ) from origin


def _cause(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]  # of the first rank that failed
    words = " ".join(str(error).split())[:_LONGEST]
    means = _MEANS.get(words)
    return means or (f"{type(error).__name__}: {words}" if words else type(error).__name__)


def _restore_tracker(folder: Path) -> None:
    """Write the tracker anew where it is empty: Megatron truncates it first, then writes.

    A run that is killed in between has just saved the newest checkpoint, which is complete: its
    ".metadata" is renamed into place last. Format torch has no such sign, so it is left alone.
    """
    if not dist.is_initialized() or dist.get_rank() == 0:
        tracker = folder / _TRACKER
        saved = sorted(path.parent.name for path in folder.glob("iter_*/.metadata"))
        if saved and tracker.is_file() and not tracker.read_text().strip():
            print(f"ARO: {tracker} was empty: a save was killed; {saved[-1]} is the newest.")
            new = tracker.with_suffix(".new")
            new.write_text(str(int(saved[-1].removeprefix("iter_"))))
            os.replace(new, tracker)
    if dist.is_initialized():
        dist.barrier()
