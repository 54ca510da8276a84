"""Compare finished runs: by how many steps, and by how much time, is one ahead of the baseline?

    megatron-aro compare runs/adamw runs/muon runs/aro --out comparison

A run is a folder or a file with what Megatron prints, or with TensorBoard's events. Speed-ups are
the paper's (`megatron_aro.cli.matched`). Beside each stands the metric's own noise: the baseline
against itself, and against a twin that differs in its seed alone, if there is one among the runs.
Runs whose schedule, batch, data, model or non-matrix optimizer differ are not compared. OUT gets
table.txt, comparison.json, curves.csv, and curves.png and curves.svg where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_aro.cli import figures, matched, runs
from megatron_aro.cli.matched import Point, Smoothed
from megatron_aro.cli.runs import Run

_CHINCHILLA = 20  # tokens a parameter
_QUARTERS = (0.25, 0.5, 0.75, 1.0)
_SHOWN = 8  # reasons for a refusal


@dataclass
class Comparison:
    """Runs side by side.

    Attributes:
        runs: the baseline first.
        width: iterations that losses are smoothed over.
        steps: the baseline's logged steps.
        points: of every run, the baseline against itself included, one a step.
        twins: names of the runs that differ from the baseline in their seed alone.
        parameters: of the model; None if the settings do not say.
        notes: what limits the comparison, a sentence each.
    """

    runs: list[Run]
    width: int
    smoothed: dict[str, Smoothed]
    steps: list[int]
    points: dict[str, list[Point]]
    twins: list[str]
    parameters: int | None
    notes: list[str]

    @property
    def baseline(self) -> Run:
        return self.runs[0]

    def tokens(self, step: int) -> int:
        settings = self.baseline.settings
        return step * settings["global_batch_size"] * settings["seq_length"]

    def overtrain(self, step: int) -> float | None:
        """Tokens up to a step in units of 20 a parameter."""
        if self.parameters is None:
            return None
        return self.tokens(step) / (_CHINCHILLA * self.parameters)

    def by_time(self, run: Run, point: Point) -> float | None:
        """The speed-up in wall-clock time; None where times are of different machines."""
        ours, theirs = run.milliseconds, self.baseline.milliseconds
        same = run.settings.get("world_size") == self.baseline.settings.get("world_size")
        if not (same and ours and theirs and point.speedup):
            return None
        return point.speedup * theirs / ours


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add `compare` to the subcommands of an argparse parser."""
    parser = commands.add_parser(
        "compare",
        help="compare finished runs: speed-ups over a baseline",
        description=" ".join(__doc__.split("\n\n")[2].split()),
    )
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="RUN", help="folder or file of a run"
    )
    parser.add_argument(
        "--baseline",
        default="adamw",
        metavar="NAME",
        help="an optimizer, or the name of a run's folder or file (default %(default)s)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("comparison"), help="folder (default %(default)s)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Compare, print the table and write the files.

    Raises:
        ValueError: a run cannot be read, or the runs cannot be compared.
    """
    comparison = compare([runs.read(path) for path in args.paths], args.baseline)
    args.out.mkdir(parents=True, exist_ok=True)
    text = table(comparison)
    (args.out / "table.txt").write_text(text + "\n")
    (args.out / "comparison.json").write_text(json.dumps(as_json(comparison), indent=2) + "\n")
    write_csv(comparison, args.out / "curves.csv")
    print(text)
    if importlib.util.find_spec("matplotlib"):
        figures.plot(comparison, [args.out / "curves.png", args.out / "curves.svg"])
        print(f"Figures and data: {args.out}")
    else:
        print(f"Data: {args.out}. No figures: the package matplotlib is not installed.")


def compare(found: Sequence[Run], baseline: str) -> Comparison:
    """Match runs with the baseline.

    Raises:
        ValueError: they differ in more than the matrix optimizer and the seed, or there is no
            such baseline.
    """
    _name_apart(found)
    candidates = [r for r in found if baseline in (r.name, r.optimizer)]
    if not candidates:
        names = ", ".join(f"{r.name} ({r.optimizer or 'optimizer unknown'})" for r in found)
        raise ValueError(f"No run is the baseline {baseline}; there are {names}.")
    base = candidates[0]
    reasons = matched.refusals(found, base)
    if reasons:
        more = f" And {len(reasons) - _SHOWN} more." if len(reasons) > _SHOWN else ""
        raise ValueError(f"These runs cannot be compared. {' '.join(reasons[:_SHOWN])}{more}")
    ordered = [base, *(r for r in found if r is not base)]
    width = matched.window(base.total or base.steps[-1])
    smoothed = {r.name: Smoothed(r, width) for r in ordered}
    points = {
        r.name: matched.points(smoothed[r.name], smoothed[base.name], base.steps) for r in ordered
    }
    comparison = Comparison(
        runs=ordered,
        width=width,
        smoothed=smoothed,
        steps=base.steps,
        points=points,
        twins=[r.name for r in ordered[1:] if matched.is_twin(r, base)],
        parameters=runs.parameters(base),
        notes=[],
    )
    comparison.notes = _notes(comparison)
    return comparison


def _name_apart(found: Sequence[Run]) -> None:
    """Runs in folders of the same name are called by the folder above too."""
    names = [r.name for r in found]
    for r in found:
        if names.count(r.name) > 1:
            r.name = f"{r.path.resolve().parent.name}/{r.name}"
    if len({r.name for r in found}) < len(found):
        raise ValueError("Two runs have the same name: give each a folder of its own.")


def _notes(comparison: Comparison) -> list[str]:
    base, notes = comparison.baseline, []
    for r in comparison.runs:
        total = r.total
        if total and r.steps[-1] < total:
            notes.append(
                f"{r.name} has {r.steps[-1]:,} of {total:,} iterations: its learning rate has not "
                "decayed, which the paper's rules demand."
            )
        seed, theirs = r.settings.get("seed"), base.settings.get("seed")
        if seed != theirs and r.name not in comparison.twins:
            notes.append(f"{r.name} has seed {seed}, {base.name} {theirs}.")
        if r.settings.get("world_size") != base.settings.get("world_size"):
            notes.append(f"{r.name} ran on another number of GPUs: no speed-up by time.")
    factor = comparison.overtrain(base.steps[-1])
    if factor is not None and factor < 1:
        notes.append(
            f"{factor:.2g} times Chinchilla's {_CHINCHILLA} tokens a parameter: the paper's rules "
            "demand 1."
        )
    return notes


def quarters(comparison: Comparison) -> list[int]:
    """Positions in `steps` of the quarters of the baseline's training."""
    last = comparison.steps[-1]
    wanted = [fraction * last for fraction in _QUARTERS]
    positions = range(len(comparison.steps))
    return [max(i for i in positions if i == 0 or comparison.steps[i] <= w) for w in wanted]


def table(comparison: Comparison) -> str:
    """The runs at the end of training, then the speed-ups over it."""
    base = comparison.baseline
    rows = [["", "loss", "validation", "ms", f"reaches {base.name}", "speed-up", "by time"]]
    for r in comparison.runs:
        point = comparison.points[r.name][-1]
        final = comparison.smoothed[r.name].losses[-1]
        valid = r.validation[max(r.validation)] if r.validation else None
        rows.append(
            [
                r.name,
                f"{final:.4f}",
                _number(valid, ".4f"),
                _number(r.milliseconds, ".1f"),
                "-" if point.reached is None else f"{point.reached:,}",
                _speedup(point),
                _number(comparison.by_time(r, point), ".3f"),
            ]
        )
    over = [["step", "x Chinchilla", f"{base.name}'s loss"]]
    over[0] += [f"{r.name}{_role(comparison, r)}" for r in comparison.runs]
    for i in quarters(comparison):
        step = comparison.steps[i]
        over.append(
            [
                f"{step:,}",
                _number(comparison.overtrain(step), ".2f"),
                f"{comparison.points[base.name][i].loss:.4f}",
                *(_speedup(comparison.points[r.name][i]) for r in comparison.runs),
            ]
        )
    noise = f"{base.name} against itself" + "".join(f", {name}" for name in comparison.twins)
    text = (
        f"Losses: nats a token, mean of {comparison.width} iterations. Speed-up: step t of "
        f"{base.name} over the first step at which the run's loss is as low. Its noise: {noise}."
    )
    return "\n".join(
        [*_aligned(rows), "", "Speed-up over training", *_aligned(over), "", text]
        + [f"Note: {note}" for note in comparison.notes]
    )


def _role(comparison: Comparison, r: Run) -> str:
    if r is comparison.baseline:
        return " (noise)"
    return " (twin: noise)" if r.name in comparison.twins else ""


def as_json(comparison: Comparison) -> dict:
    """Everything in the table."""
    positions = quarters(comparison)
    return {
        "baseline": comparison.baseline.name,
        "smoothed_over": comparison.width,
        "parameters": comparison.parameters,
        "twins": comparison.twins,
        "notes": comparison.notes,
        "runs": [
            {
                "name": r.name,
                "path": str(r.path),
                "optimizer": r.optimizer,
                "seed": r.settings.get("seed"),
                "loss": comparison.smoothed[r.name].losses[-1],
                "validation_loss": r.validation[max(r.validation)] if r.validation else None,
                "milliseconds": r.milliseconds,
                "over_training": [
                    {
                        "step": point.step,
                        "chinchilla": comparison.overtrain(point.step),
                        "baseline_loss": point.loss,
                        "reached_at": point.reached,
                        "step_speedup": point.speedup,
                        "time_speedup": comparison.by_time(r, point),
                    }
                    for point in (comparison.points[r.name][i] for i in positions)
                ],
            }
            for r in comparison.runs
        ],
    }


def write_csv(comparison: Comparison, path: Path) -> None:
    """A line for each of the baseline's logged steps; losses are those of that step."""
    header = ["step", "tokens"]
    for r in comparison.runs:
        header += [f"{r.name} {what}" for what in ("loss", "smoothed", "step speed-up")]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        for i, step in enumerate(comparison.steps):
            row: list[object] = [step, comparison.tokens(step)]
            for r in comparison.runs:
                there = step in r.losses
                smoothed = comparison.smoothed[r.name].at(step) if there else ""
                speedup = comparison.points[r.name][i].speedup
                row += [r.losses.get(step, ""), smoothed, "" if speedup is None else speedup]
            writer.writerow(row)


def _speedup(point: Point) -> str:
    return "not reached" if point.speedup is None else f"{point.speedup:.3f}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
