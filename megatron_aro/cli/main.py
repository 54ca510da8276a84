"""The command `megatron-aro`: one subcommand a file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megatron_aro.cli import bench, inspect, plan


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; 2 with one sentence on stderr where the settings cannot work."""
    parser = argparse.ArgumentParser(
        prog="megatron-aro", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    plan.add_parser(commands)
    bench.add_parser(commands)
    inspect.add_parser(commands)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except (ValueError, AssertionError) as error:  # Megatron's checks are assertions
        print(f"error: {' '.join(str(error).split()) or repr(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
