"""A training run as its files tell it: settings, losses, learning rates and times by step.

A run is a folder, searched to the bottom, or one file: what Megatron prints (a log of any rank, or
of all) or TensorBoard's event files. Where both have a figure, TensorBoard's, which has every step,
counts. A step that was trained again after a restart counts as it was trained last.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_aro.cli import events

# What Megatron prints after a step, and after an evaluation.
STEP = re.compile(
    r"\[(?P<time>\d{4}-\d\d-\d\d [\d:.]+)\] iteration +(?P<step>\d+)/ *(?P<of>\d+) .*"
    r"elapsed time per iteration \(ms\): (?P<ms>[\d.]+) .*?"
    r"(?:learning rate: (?P<lr>\S+) .*?)?\blm loss: (?P<loss>\S+) "
)
VALIDATION = re.compile(
    r"validation loss at iteration (?P<step>\d+)(?: on validation set)? \| "
    r".*?\blm loss value: (?P<loss>\S+) "
)
_ARGUMENTS = re.compile(r"-{20,} (?P<end>end of )?arguments -{20,}")
_ARGUMENT = re.compile(r" {2}(?P<name>\w+) \.* ?(?P<value>.*)$")
_TORCHRUN = re.compile(r"^\[[\w-]*\d+\]:")  # --tee puts it before each line
_PADDED = re.compile(r"padded vocab .*new size: (\d+)")
_LOGS = ("*.log", "*.out", "*.txt")


@dataclass
class Run:
    """Losses are in nats a token; times in milliseconds an iteration.

    Attributes:
        settings: Megatron's arguments, values as Python's literals where they are any.
    """

    name: str
    path: Path
    settings: dict[str, Any] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)

    @property
    def steps(self) -> list[int]:
        return sorted(self.losses)

    @property
    def milliseconds(self) -> float | None:
        """Median time of an iteration; the first two are set-up and do not count."""
        later = [self.times[step] for step in sorted(self.times)][2:]
        return statistics.median(later) if later else None

    @property
    def optimizer(self) -> str:
        """adamw, muon, aro or what --optimizer names."""
        name = str(self.settings.get("optimizer", ""))
        return {"adam": "adamw", "dist_muon": "muon"}.get(name, name)

    @property
    def total(self) -> int | None:
        """Iterations that the run was set up for."""
        if iterations := self.settings.get("train_iters"):
            return int(iterations)
        samples, batch = self.settings.get("train_samples"), self.settings.get("global_batch_size")
        return samples // batch if samples and batch else None


def read(path: Path) -> Run:
    """Read a run.

    Raises:
        ValueError: nothing of a training run is there.
    """
    if not path.exists():
        raise ValueError(f"Run {path} does not exist.")
    if path.is_dir():
        event_files = sorted(path.rglob("events.out.tfevents.*"))
        logs = sorted({log for pattern in _LOGS for log in path.rglob(pattern)})
    else:
        is_event_file = "tfevents" in path.name
        event_files, logs = ([path], []) if is_event_file else ([], [path])
    name = path.resolve().name
    run = Run(name=name if path.is_dir() else Path(name).stem, path=path)
    _read_logs(logs, run)
    _read_events(event_files, run)
    if not run.losses:
        raise ValueError(
            f"{path} has no losses: a run is a folder or file with Megatron's log or TensorBoard "
            "events."
        )
    return run


def parameters(run: Run) -> int | None:
    """The model's parameters, counted from its settings; None if they do not say enough."""
    from megatron_aro.cli import outlook, plan

    args = argparse.Namespace(**run.settings)
    try:
        if not getattr(args, "padded_vocab_size", None):
            multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
            args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple
        config = argparse.Namespace(**vars(args))
        config.gated_linear_unit, config.num_moe_experts = args.swiglu, args.num_experts
        grouped = args.group_query_attention
        config.num_query_groups = args.num_query_groups if grouped else args.num_attention_heads
        found = outlook.classes(plan.gpt_sizes(args, config))
    except (AttributeError, TypeError):
        return None
    return sum(of_kind.parameters for of_kind in found.values())


def _read_logs(paths: Iterable[Path], run: Run) -> None:
    seen: dict[int, str] = {}  # step -> when
    for path in paths:
        inside = False
        with path.open(errors="replace") as lines:
            for line in lines:
                line = _TORCHRUN.sub("", line.rstrip("\n"))
                if mark := _ARGUMENTS.search(line):
                    inside = not mark["end"]
                elif inside:
                    if argument := _ARGUMENT.match(line):
                        run.settings[argument["name"]] = _literal(argument["value"])
                elif step := STEP.search(line):
                    number = int(step["step"])
                    if step["time"] >= seen.get(number, ""):
                        seen[number] = step["time"]
                        run.losses[number] = float(step["loss"])
                        run.times[number] = float(step["ms"])
                        if step["lr"]:
                            run.rates[number] = float(step["lr"])
                elif valid := VALIDATION.search(line):
                    run.validation[int(valid["step"])] = float(valid["loss"])
                elif padded := _PADDED.search(line):
                    run.settings["padded_vocab_size"] = int(padded[1])


def _read_events(paths: Iterable[Path], run: Run) -> None:
    entries = sorted(entry for path in paths for entry in events.read(path))  # by time
    tags = ("lm loss", "learning-rate", "iteration-time", "lm loss validation")
    scalars: dict[str, dict[int, float]] = {tag: {} for tag in tags}
    for entry in entries:
        if isinstance(entry.value, str):
            name, of_text, _ = entry.tag.partition("/text_summary")
            if of_text:
                run.settings[name] = _literal(entry.value)
        elif entry.tag in scalars:
            scalars[entry.tag][entry.step] = entry.value
    if scalars["lm loss"]:
        run.losses = scalars["lm loss"]
    run.rates |= scalars["learning-rate"]
    run.times |= {step: 1e3 * seconds for step, seconds in scalars["iteration-time"].items()}
    run.validation |= scalars["lm loss validation"]


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
