"""The figure of a comparison: losses, and speed-ups over training with the metric's noise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_aro.cli.curves import STYLES

if TYPE_CHECKING:
    from megatron_aro.cli.compare import Comparison


def plot(comparison: Comparison, paths: Sequence[Path]) -> None:
    """Draw into files, whose endings say the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    lowest, early = [], []
    for number, run in enumerate(comparison.runs):
        colour, dashes = STYLES[number % len(STYLES)]
        smoothed = comparison.smoothed[run.name]
        raw = [run.losses[step] for step in smoothed.steps]
        left.plot(smoothed.steps, raw, color=colour, alpha=0.15, linewidth=0.6)
        style = {"color": colour, "linestyle": dashes, "linewidth": 1.8}
        left.plot(smoothed.steps, smoothed.losses, label=run.name, **style)
        lowest.append(min(smoothed.losses))
        early.append(smoothed.at(max(smoothed.steps[0], comparison.steps[-1] // 7)))
        shown = [p for p in comparison.points[run.name] if p.step > comparison.width]
        reached = [p for p in shown if p.speedup is not None]
        steps, speedups = [p.step for p in reached], [p.speedup or 0.0 for p in reached]
        if number == 0:
            right.axhline(1, color="0.5", linewidth=0.8)
            right.fill_between(steps, 1, speedups, color="0.8", label="noise", linewidth=0)
        elif speedups:
            label = f"{run.name}  {speedups[-1]:.2f}" if reached[-1] is shown[-1] else run.name
            if run.name in comparison.twins:
                label += " (twin)"
            right.plot(steps, speedups, label=label, **style)
    span = max(early) - min(lowest)
    left.set_ylim(min(lowest) - 0.08 * span, max(early) + 0.02 * span)
    left.set_ylabel("training loss, nats a token")
    left.set_title(f"Loss, mean of {comparison.width} iterations", loc="left")
    right.set_ylabel(f"speed-up over {comparison.baseline.name}, in steps")
    right.set_title("Speed-up at the baseline's step", loc="left")
    for axes in (left, right):
        axes.set_xlim(0, comparison.steps[-1])
        axes.set_xlabel("iteration")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    for path in paths:
        figure.savefig(path, dpi=160)
    plt.close(figure)
