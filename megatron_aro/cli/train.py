"""Train by configuration files: check them with Megatron's own parser, then start torchrun.

    megatron-aro train MODEL.yaml OPTIMIZER.yaml PARALLEL.yaml [--set key=value] [--dry-run]

Later files override earlier ones, and ``--set`` overrides them all. On one machine torchrun takes
over. For several the commands to start are printed: one to run on each machine, one for Slurm.
`megatron_aro.cli.configs` describes the files.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_aro.cli import configs, outlook, parsing

_ENTRY = "megatron_aro.pretrain_gpt"
_PORT = 29500
_HEAD = "HOST_OF_THE_FIRST_NODE"


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add `train` to the subcommands of an argparse parser."""
    launch = "; ".join(f"{key}: {what}" for key, what in configs.LAUNCH_KEYS.items())
    parser = commands.add_parser(
        "train",
        help="train by configuration files",
        description=__doc__.split("\n")[0],
        epilog=f"Keys of LAUNCH, also for --set: {launch}.",
    )
    parser.add_argument("config", nargs="+", metavar="CONFIG", help="YAML file; later ones win")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a flag of Megatron's (lr=3e-4, swiglu=true, min-lr=null), a key of LAUNCH "
        "(nodes=8) or, in capitals, an environment variable; may be repeated",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="only check, and print the command, parameters, tokens, and ARO's memory and time",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Check, then print or train; does not return where torchrun takes over.

    Raises:
        ValueError, AssertionError: settings that cannot work; file and line are named where known.
    """
    before = dict(os.environ)
    unset: dict[str, str] = {}
    config = parsing.read_configs(args.config, args.set, unset=unset.setdefault)
    environment, flags = configs.variables(config), configs.arguments(config)
    os.environ.update(environment)
    try:
        megatron = parsing.validated(flags, config.world_size)
        _check_purpose(megatron)
    except (ValueError, AssertionError) as error:
        raise ValueError(_with_places(str(error), config)) from error
    nodes, rendezvous = config.integer("nodes", 1), config.text("rendezvous")
    here = (nodes == 1 or rendezvous) and not args.dry_run
    if not here:
        for name, where in unset.items():
            print(f"note: {name} is not set in this environment ({where})", file=sys.stderr)
        print(command_text(config, environment, flags, args.config, args.set))
        if args.dry_run:
            print(f"\n{outlook.describe(megatron)}")
        return
    for name, where in unset.items():
        raise ValueError(f"{where}: the environment variable {name} is not set.")
    _check_machine(config, flags)
    words = [sys.executable, "-m", "torch.distributed.run", *torchrun_words(config), *flags]
    sys.stdout.flush()
    os.execve(words[0], words, before | environment)


def torchrun_words(config: configs.Config, rendezvous: str = "") -> list[str]:
    """torchrun's own flags and the entry; Megatron's flags follow.

    Args:
        rendezvous: HOST:PORT in place of the config's.
    """
    nodes = config.integer("nodes", 1)
    words = ["--nproc-per-node", str(config.integer("gpus_per_node", 1))]
    if nodes == 1:
        words = ["--standalone", *words]
    else:
        at = rendezvous or config.text("rendezvous") or f"{_HEAD}:{_PORT}"
        words = ["--nnodes", str(nodes), *words, "--rdzv-backend", "c10d"]
        words += ["--rdzv-id", "megatron-aro", "--rdzv-endpoint", at]
    if restarts := config.integer("max_restarts", 0):
        words += ["--max-restarts", str(restarts)]
    if logs := config.text("logs"):
        words += ["--log-dir", logs, "--tee", "3"]
    return [*words, "-m", _ENTRY]


def command_text(
    config: configs.Config,
    environment: Mapping[str, str],
    flags: Sequence[str],
    files: Sequence[str],
    overrides: Sequence[str],
) -> str:
    """The commands that start this training, to be copied into a shell."""
    variables = [f"{name}={_quoted(value)}" for name, value in environment.items()]
    lines: list[str] = []
    for word in flags:
        if word.startswith("--"):
            lines.append(word)
        else:
            lines[-1] += " " + _quoted(word)
    words = map(_quoted, torchrun_words(config))
    torchrun = " \\\n    ".join([" ".join([*variables, "torchrun", *words]), *lines])
    nodes = config.integer("nodes", 1)
    if nodes == 1:
        return torchrun
    head = "" if config.text("rendezvous") else f", with the name of one of them for {_HEAD}"
    again = [*map(_quoted, files), *(f"--set {_quoted(pair)}" for pair in overrides)]
    gpus = config.integer("gpus_per_node", 1)
    slurm = f"sbatch --nodes {nodes} --gpus-per-node {gpus} scripts/slurm.sh {' '.join(again)}"
    return f"# On each of {nodes} machines{head}:\n{torchrun}\n\n# Or by Slurm:\n{slurm}"


def _quoted(word: str) -> str:
    if re.search(r"\$\{\w+", word):  # not set here: left to the shell that runs it
        return '"' + re.sub(r'(["\\`])', r"\\\1", word) + '"'
    return shlex.quote(word)


def _with_places(message: str, config: configs.Config) -> str:
    """The message, and where the flags that it names were given."""
    places = [
        f"{flag}: {config.flags[flag].where}"
        for flag in dict.fromkeys(re.findall(r"--[a-z][\w-]*", message))
        if flag in config.flags
    ]
    return f"{message} ({'; '.join(places)})" if places else message


def _check_purpose(megatron: argparse.Namespace) -> None:
    from megatron_aro.megatron import preflight

    preflight.check_purpose(megatron)
    if not (megatron.mock_data or preflight.data_prefixes(megatron)):
        raise ValueError("There is no data: give --train-data-path, or add configs/trial.yaml.")


def _check_machine(config: configs.Config, flags: Sequence[str]) -> None:
    """Refuse what this machine cannot run, and make the folder of a start's logs."""
    import torch

    from megatron_aro.megatron import cpu_mode

    wanted, there = config.integer("gpus_per_node", 1), torch.cuda.device_count()
    if cpu_mode.is_active():
        cpu_mode.default_flags(flags)
    elif wanted > there:
        raise ValueError(f"gpus_per_node is {wanted}, but this machine has {there} GPUs.")
    if logs := config.text("logs"):
        now = time.strftime("%Y-%m-%d_%H-%M-%S", time.gmtime())
        folder = Path(logs) / f"{now}_{platform.node()}"
        folder.mkdir(parents=True, exist_ok=True)
        config.launch["logs"] = configs.Setting([str(folder)], config.launch["logs"].where)
