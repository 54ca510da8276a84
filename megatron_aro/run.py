"""Run somebody's own Megatron script, unmodified, with ARO known to Megatron.

torchrun --nproc-per-node N -m megatron_aro.run path/to/pretrain_gpt.py <its flags>
"""

from __future__ import annotations

import functools
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_aro.megatron import launch


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script that `argv` (by default the command line) begins with.

    Returns:
        2 if there is no such script, or its flags cannot work here or with ARO; other errors of
        the script are its own.
    """
    code = launch.reported(functools.partial(_prepare, sys.argv[1:] if argv is None else argv))
    if code == 0:
        code = launch.refused(lambda: runpy.run_path(sys.argv[0], run_name="__main__"))
    return code


def _prepare(argv: Sequence[str]) -> None:
    if not argv or argv[0].startswith("-"):
        raise ValueError("Which script? Usage: python -m megatron_aro.run SCRIPT [its flags]")
    script = Path(argv[0])
    if not script.is_file():
        raise ValueError(f"Script {script} does not exist.")
    sys.argv[:] = [str(script), *launch.prepare(argv[1:])]
    sys.path[0] = str(script.resolve().parent)  # as Python does for a script


if __name__ == "__main__":
    sys.exit(main())
