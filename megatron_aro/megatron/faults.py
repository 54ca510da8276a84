"""What is said when a checkpoint cannot be read: missing, truncated or foreign files."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from megatron_aro.megatron.support import RefusedError

_LONGEST = 400  # characters of a cause


def told(load: Callable[[], Any], args: argparse.Namespace) -> Any:
    """The result of Megatron's loading function.

    Raises:
        RefusedError: in one sentence, where Megatron raises, or leaves with exit status 0.
    """
    try:
        return load()
    except RefusedError:
        raise
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        cause = _cause(error)
    except SystemExit:
        if args.exit_on_missing_checkpoint and not (Path(args.load) / _TRACKER).is_file():
            raise
        cause = "a file is damaged; Megatron has printed which"
    raise RefusedError(
        f"The checkpoint in {args.load} cannot be loaded, and this run has not started: {cause}; "
        "--ckpt-step ITERATION takes another one."
    )


def _cause(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]  # of the first rank that failed
    words = " ".join(str(error).split())[:_LONGEST]
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


_TRACKER = "latest_checkpointed_iteration.txt"
