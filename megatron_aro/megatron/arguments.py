"""Megatron's command line: ``--optimizer aro`` and the ``--aro-*`` flags."""

from __future__ import annotations

import argparse
import re
from typing import Any

from megatron_aro.config import AROConfig, flag, settings

NAME = "aro"
ADAM = "adam"  # Megatron's AdamW
_BACK = "init_exp_avg"
# What is started from where a checkpoint does not have it; refused as long as nobody says it.
INIT = {
    "init_momentum": (
        ("exp_avg", "zero"),
        "What momenta start from when the checkpoint is AdamW's or Muon's: its exp_avg (Muon's "
        "momentum_buffer), or zero.",
    ),
    "init_rotation": (
        ("identity", "qr"),
        "What rotations start from when the checkpoint has none, or has them of other settings: "
        "the identity, or three sweeps of orthonormalisation on the momenta.",
    ),
    _BACK: (
        ("momentum", "zero"),
        "With --optimizer adam: what AdamW's exp_avg starts from when the checkpoint is ARO's: its "
        "momentum, or zero. exp_avg_sq starts from the momentum's mean squares.",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add what ARO needs to a parser that has Megatron's own arguments already."""
    optimizer = next(a for a in parser._actions if "--optimizer" in a.option_strings)
    optimizer.choices = [*(optimizer.choices or ()), NAME]
    for action in parser._actions:
        # A bare % in one of Megatron's help texts (0.19.2) makes argparse's --help fail.
        action.help = re.sub(r"(?<!%)%(?![%(])", "%%", action.help or "")
    group = parser.add_argument_group(
        "aro", "ARO, the optimizer of --optimizer aro (arXiv 2602.09006)."
    )
    for f in settings():
        group.add_argument(
            flag(f.name),
            type=type(f.default),
            default=f.default,
            choices=f.metadata["choices"],
            help=f.metadata["help"] + " Default: %(default)s.",
        )
    for name, (choices, help) in INIT.items():
        group.add_argument(f"--aro-{name.replace('_', '-')}", choices=choices, help=help)
    return parser


def aro_config(args: argparse.Namespace) -> AROConfig:
    """The settings in parsed arguments, of this version or, in a checkpoint, of an earlier one.

    Raises:
        ValueError: a value is outside its range.
    """
    values: dict[str, Any] = {f.name: getattr(args, f"aro_{f.name}", f.default) for f in settings()}
    return AROConfig(**values)


def ineffective_flags(args: argparse.Namespace) -> list[str]:
    """Sentences about flags that were given although another optimizer is chosen."""
    given = [n for n in INIT if getattr(args, f"aro_{n}")]
    without_adam = [n for n in given if n == _BACK and args.optimizer != ADAM]
    without_aro = []
    if args.optimizer != NAME:
        without_aro = [
            f.name
            for f in settings()
            # Logging is set alike for runs that are compared.
            if f.name != "monitor_interval" and getattr(args, f"aro_{f.name}") != f.default
        ] + [n for n in given if n != _BACK]
    return [
        f"{flag(name)} has no effect without --optimizer {needed}."
        for names, needed in ((without_aro, NAME), (without_adam, ADAM))
        for name in names
    ]
