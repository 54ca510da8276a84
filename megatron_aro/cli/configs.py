"""Configuration files: YAML in the form of Megatron-LM's own recipes, made into a command.

    EXTENDS: [other.yaml]            # read first; paths are relative to this file
    LAUNCH: {nodes: 8, gpus_per_node: 8}
    ENV_VARS: {CUDA_DEVICE_MAX_CONNECTIONS: 1}
    MODEL_ARGS:                      # Megatron's real flags
      --num-layers: 36
      --swiglu: true                 # a switch; false leaves it out
      --train-data-path: ${TRAIN_DATA}
      --lr-warmup-iters: null        # takes back what another file gave

Later files and ``--set`` override earlier ones. Values are passed on as they are written: 3e-4
stays 3e-4. ``${NAME}`` is an environment variable, ``${NAME:-text}`` has a default.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

# Of LAUNCH: how many processes start, and where.
LAUNCH_KEYS = {
    "nodes": "machines",
    "gpus_per_node": "processes a machine; without GPUs they run on its CPU",
    "rendezvous": "HOST:PORT of the first of several machines; each then starts its own processes",
    "max_restarts": "how often torchrun starts all processes again after one failed",
    "logs": "folder for a log file of each rank; a new subfolder for each start",
}
_SECTIONS = ("EXTENDS", "LAUNCH", "ENV_VARS", "MODEL_ARGS")
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
COMMAND_LINE = "--set"


class Setting(NamedTuple):
    """A value and where it was given.

    Attributes:
        words: the value, several for a list; ["true"] and [] for a switch that is on and off; None
            takes back what another file gave.
        where: file and line.
        switch: whether it was written as true, false or null.
    """

    words: list[str] | None
    where: str
    switch: bool = False


@dataclass
class Config:
    """Several files as one. Keys are flags with their dashes, names of variables, LAUNCH_KEYS."""

    launch: dict[str, Setting] = field(default_factory=dict)
    environment: dict[str, Setting] = field(default_factory=dict)
    flags: dict[str, Setting] = field(default_factory=dict)

    def integer(self, key: str, default: int) -> int:
        """A number of LAUNCH that must be at least 1 (0 for max_restarts).

        Raises:
            ValueError: naming file and line.
        """
        setting = self.launch.get(key)
        if setting is None or setting.words is None:
            return default
        words = setting.words
        least = 0 if key == "max_restarts" else 1
        if len(words) != 1 or not words[0].isdigit() or int(words[0]) < least:
            raise ValueError(f"{setting.where}: {key} must be an integer of at least {least}.")
        return int(words[0])

    @property
    def world_size(self) -> int:
        return self.integer("nodes", 1) * self.integer("gpus_per_node", 1)

    def text(self, key: str) -> str | None:
        """A text of LAUNCH."""
        setting = self.launch.get(key)
        return setting.words[0] if setting and setting.words else None


def load(paths: Sequence[str | Path], overrides: Iterable[str] = ()) -> Config:
    """Read files and ``--set`` key=value pairs, the later ones overriding.

    A key of --set is a flag with or without its dashes, a key of LAUNCH, or, in capitals, a
    variable.

    Raises:
        ValueError: a file is missing or not of this form; the message names file and line.
    """
    config = Config()
    for path in paths:
        _read(Path(path), config, ())
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise ValueError(f"{COMMAND_LINE} {override}: write {COMMAND_LINE} key=value.")
        switch = value.lower() in ("true", "false", "null")
        words = _words(value.lower()) if switch else shlex.split(value) or [""]
        setting = Setting(words, f"{COMMAND_LINE} {override}", switch)
        if key in LAUNCH_KEYS:
            section = config.launch
        elif re.fullmatch(r"[A-Z][A-Z0-9_]*", key):
            section = config.environment
        else:
            section, key = config.flags, "--" + key.removeprefix("--")
        section[key] = setting
    return config


def check_flags(config: Config, known: Mapping[str, bool | None]) -> None:
    """Refuse flags that Megatron's parser does not have.

    Args:
        known: flag -> whether it is a switch, without a value; None where both are allowed.

    Raises:
        ValueError: naming file, line and the nearest flag.
    """
    for flag, setting in config.flags.items():
        if flag not in known:
            raise ValueError(f"{setting.where}: Megatron has no flag {flag}{_nearest(flag, known)}")
        takes_none = known[flag]
        if takes_none and not setting.switch:
            raise ValueError(f"{setting.where}: {flag} is a switch: write true or false.")
        if takes_none is False and setting.switch and setting.words is not None:
            raise ValueError(f"{setting.where}: {flag} takes a value: write it, or null for none.")


def expand(config: Config, missing: Callable[[str, str], object]) -> Config:
    """The config with its ``${NAME}`` replaced from the environment and ENV_VARS.

    Args:
        missing: called with name and place of a variable that is not set and has no default,
            which stays as it is.
    """
    values: dict[str, str] = dict(os.environ)

    def replaced(setting: Setting) -> Setting:
        def value(found: re.Match) -> str:
            name, default = found[1], found[2]
            if values.get(name):
                return values[name]
            if default is not None:
                return default
            missing(name, setting.where)
            return found[0]

        words = setting.words and [_VARIABLE.sub(value, word) for word in setting.words]
        return setting._replace(words=words)

    environment = {}
    for name, setting in config.environment.items():
        environment[name] = replaced(setting)
        if environment[name].words is not None:
            values[name] = " ".join(environment[name].words or [])
    return Config(
        launch={key: replaced(setting) for key, setting in config.launch.items()},
        environment=environment,
        flags={key: replaced(setting) for key, setting in config.flags.items()},
    )


def arguments(config: Config) -> list[str]:
    """Megatron's command line."""
    line: list[str] = []
    for flag, (words, _, switch) in config.flags.items():
        if words:
            line += [flag] if switch else [flag, *words]
    return line


def variables(config: Config) -> dict[str, str]:
    """The environment variables that the config sets."""
    given = config.environment.items()
    return {name: " ".join(setting.words) for name, setting in given if setting.words is not None}


def _read(path: Path, config: Config, within: tuple[Path, ...]) -> None:
    if not path.is_file():
        by = f" (EXTENDS of {within[-1]})" if within else ""
        raise ValueError(f"Config {path} does not exist{by}.")
    if path.resolve() in [p.resolve() for p in within]:
        raise ValueError(f"{path} extends itself, by way of {' and '.join(map(str, within))}.")
    for name, node in _pairs(_compose(path), str(path), _SECTIONS):
        where = _where(path, node)
        if name == "EXTENDS":
            for other in _scalars(node, where):
                _read(path.parent / other, config, (*within, path))
            continue
        known = LAUNCH_KEYS if name == "LAUNCH" else None
        section = {
            "LAUNCH": config.launch,
            "ENV_VARS": config.environment,
            "MODEL_ARGS": config.flags,
        }[name]
        for key, value in _pairs(node, str(path), known):
            if name == "MODEL_ARGS" and not key.startswith("--"):
                raise ValueError(f"{_where(path, value)}: write flags with dashes, --{key}.")
            section[key] = _setting(value, path)


def _compose(path: Path) -> Any:
    try:
        import yaml
    except ImportError:
        raise ValueError("Configs need the package pyyaml: install it.") from None
    try:
        node = yaml.compose(path.read_text(), Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if node is None:
        raise ValueError(f"{path} is empty.")
    return node


def _pairs(node: Any, path: str, known: Iterable[str] | None) -> Iterable[tuple[str, Any]]:
    if node.id != "mapping":
        raise ValueError(f"{_where(path, node)}: here must be `key: value` lines.")
    seen: set[str] = set()
    for key, value in node.value:
        name, where = key.value, _where(path, key)
        if known is not None and name not in known:
            raise ValueError(f"{where}: unknown key {name}{_nearest(name, known)}")
        if name in seen:
            raise ValueError(f"{where}: {name} is given twice in this file.")
        seen.add(name)
        yield name, value


def _setting(node: Any, path: Path) -> Setting:
    where = _where(path, node)
    kind = node.tag.rpartition(":")[2]
    if kind == "bool" and node.value.lower() in ("true", "false"):  # yes, no, on, off are words
        return Setting(_words(node.value.lower()), where, True)
    if kind == "null":
        return Setting(None, where, True)
    return Setting(_scalars(node, where), where)


def _words(literal: str) -> list[str] | None:
    return {"true": ["true"], "false": [], "null": None}[literal]


def _scalars(node: Any, where: str) -> list[str]:
    nodes = node.value if node.id == "sequence" else [node]
    if any(child.id != "scalar" for child in nodes):
        raise ValueError(f"{where}: here must be a value or a list of values.")
    return [child.value for child in nodes]


def _where(path: str | Path, node: Any) -> str:
    return f"{path}, line {node.start_mark.line + 1}"


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; the nearest is {near[0]}." if near else f"; known are {_listing(known)}."


def _listing(known: Iterable[str]) -> str:
    names = list(known)
    return ", ".join(names) if len(names) <= 8 else "those that `--help` lists"
