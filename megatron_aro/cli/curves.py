"""Megatron's log lines -> a loss curve; several curves -> a table and a figure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_aro.cli.runs import STEP, VALIDATION

# Okabe and Ito's palette, told apart with any colour vision; dashes tell them apart in grey.
STYLES = [("#000000", "-"), ("#0072B2", (0, (5, 1.5))), ("#D55E00", "-"), ("#009E73", ":")]


@dataclass
class Curve:
    """One training run: a training loss and a time for every step, and the last validation loss."""

    name: str
    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    valid_loss: float | None = None

    def read(self, line: str) -> bool:
        """Take in a line that Megatron printed with --log-interval 1; true if it was a step."""
        if found := VALIDATION.search(line):
            self.valid_loss = float(found["loss"])
        if found := STEP.search(line):
            self.losses.append(float(found["loss"]))
            self.step_ms.append(float(found["ms"]))
        return bool(found)

    @property
    def window(self) -> int:
        """Number of steps that the smoothed loss is the mean of."""
        return max(1, len(self.losses) // 15)

    def smoothed(self) -> list[float]:
        """Mean loss of the last ``window`` steps, or of fewer where there are not yet so many."""
        spans = (self.losses[max(0, i - self.window) : i] for i in range(1, len(self.losses) + 1))
        return [statistics.fmean(span) for span in spans]

    def steps_to(self, loss: float) -> int | None:
        """The first step whose smoothed loss is at most ``loss``."""
        return next((i for i, value in enumerate(self.smoothed(), 1) if value <= loss), None)

    def ms(self) -> float:
        """Median time of a step in milliseconds: warm-up and hiccups do not count."""
        return statistics.median(self.step_ms)


def table(curves: Sequence[Curve]) -> str:
    """The runs side by side; the first one is what the last column compares with."""
    base = curves[0]
    target = base.smoothed()[-1]
    rows = [["", "train loss", "validation loss", "ms per step", f"steps to {base.name}'s loss"]]
    for curve in curves:
        steps = curve.steps_to(target)
        rows.append(
            [
                curve.name,
                f"{curve.smoothed()[-1]:.4f}",
                "-" if curve.valid_loss is None else f"{curve.valid_loss:.4f}",
                f"{curve.ms():.1f}",
                "not reached" if steps is None else f"{steps}",
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
        )
        for row in rows
    ]
    note = (
        f"Train loss: nats per byte, mean of the last {base.window} of {len(base.losses)} steps. "
        f"Last column: the first step at which that running mean is at most {target:.4f}."
    )
    return "\n".join([*lines, note])


def plot(curves: Sequence[Curve], path: Path, title: str) -> None:
    """Draw smoothed loss against step; every single step's loss lies faintly behind it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for curve, (colour, dashes) in zip(curves, STYLES, strict=False):
        steps = range(1, len(curve.losses) + 1)
        smoothed = curve.smoothed()
        axes.plot(steps, curve.losses, color=colour, alpha=0.15, linewidth=0.8)
        label = f"{curve.name}  {smoothed[-1]:.3f}"
        if curve.valid_loss is not None:
            label += f"  (validation {curve.valid_loss:.3f})"
        axes.plot(steps, smoothed, color=colour, linestyle=dashes, linewidth=2, label=label)
    early = max(curve.smoothed()[len(curve.losses) // 7] for curve in curves)
    axes.set_ylim(min(min(curve.losses) for curve in curves) - 0.05, early)
    axes.set_xlim(0, max(len(curve.losses) for curve in curves))
    axes.set_xlabel("step")
    axes.set_ylabel(f"training loss, nats per byte (mean of {curves[0].window} steps)")
    axes.set_title(title, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=160)
    plt.close(figure)
