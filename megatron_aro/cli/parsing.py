"""Megatron's own parser and validation, with ARO's checks, on any machine; no processes start."""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron_aro.cli import configs

# What the entry, megatron_aro.pretrain_gpt, takes where nothing is given.
_ENTRY_DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop what Megatron prints, and its warnings."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def known_flags() -> dict[str, bool | None]:
    """Every flag of Megatron and ARO -> whether it is a switch; None if its value may be left out.

    Raises:
        RuntimeError: megatron-core is of an untested version.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    with quiet():
        _megatron_arguments().add_megatron_arguments(parser)
    switches = {0: True, "?": None, "*": None}
    return {
        flag: switches.get(action.nargs, False)
        for action in parser._actions
        for flag in action.option_strings
        if flag.startswith("--")
    }


def read_configs(
    paths: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    unset: Callable[[str, str], object],
) -> configs.Config:
    """Configs with Megatron's flags checked and variables expanded; see `configs`.

    Args:
        unset: as `missing` of `configs.expand`.

    Raises:
        ValueError: naming file and line.
    """
    config = configs.load(paths, overrides)
    if config.flags:
        configs.check_flags(config, known_flags())
    return configs.expand(config, unset)


def validated(
    flags: Sequence[str],
    world_size: int,
    adjust: Callable[[argparse.Namespace], None] = lambda args: None,
) -> argparse.Namespace:
    """The arguments as they are after Megatron's validation on rank 0 of `world_size`.

    Megatron reads RANK and WORLD_SIZE in the environment, which stay changed.

    Args:
        adjust: called between parsing and validation.

    Raises:
        ValueError, AssertionError: a flag is unknown, or Megatron or ARO refuse the settings.
    """
    return validator(flags, world_size)(adjust)


def validator(
    flags: Sequence[str], world_size: int
) -> Callable[[Callable[[argparse.Namespace], None]], argparse.Namespace]:
    """Parse once; what is returned validates a copy, adjusted, as `validated` does.

    Raises:
        ValueError: a flag is unknown.
    """
    os.environ["WORLD_SIZE"], os.environ["RANK"] = str(world_size), "0"
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    arguments = _megatron_arguments()
    before = sys.argv[1:]
    sys.argv[1:] = flags
    try:
        with quiet():
            parsed = arguments.parse_args(extra_args_provider=_raise_errors)
    finally:
        sys.argv[1:] = before

    def validate(adjust: Callable[[argparse.Namespace], None]) -> argparse.Namespace:
        args = copy.deepcopy(parsed)
        with quiet():
            adjust(args)
            arguments.validate_args(args, dict(_ENTRY_DEFAULTS))
        return args

    return validate


def _megatron_arguments() -> Any:
    """The module `megatron.training.arguments`, with ARO known to it."""
    from megatron_aro.megatron import cpu_mode, hooks

    cpu_mode.enable()
    with quiet():
        hooks.register()
        from megatron.training import arguments
    return arguments


def _raise_errors(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    def error(message: str) -> None:
        raise ValueError(message)

    parser.error = error  # type: ignore[assignment, method-assign]
    return parser
