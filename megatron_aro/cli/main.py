"""The command `megatron-aro`: one subcommand a file."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

try:
    from megatron_aro.cli import bench, compare, doctor, inspect, plan, prepare, train
except ModuleNotFoundError as missing:
    print(
        f"error: {sys.executable} (Python {sys.version.split()[0]}) has no {missing.name}: use the "
        "Python that trains, .venv/bin/python after scripts/quickstart.sh.",
        file=sys.stderr,
    )
    sys.exit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; 2 with one sentence on stderr where the settings cannot work.

    What a subcommand returns is the exit code; None is 0.
    """
    parser = argparse.ArgumentParser(
        prog="megatron-aro", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    prepare.add_parser(commands)
    train.add_parser(commands)
    plan.add_parser(commands)
    bench.add_parser(commands)
    doctor.add_parser(commands)
    compare.add_parser(commands)
    inspect.add_parser(commands)
    args = parser.parse_args(argv)
    try:
        status = args.run(args) or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # | head has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
        return 141
    except (ValueError, AssertionError) as error:  # Megatron's checks are assertions
        print(f"error: {' '.join(str(error).split()) or repr(error)}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
