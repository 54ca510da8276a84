"""Whole iterations of AdamW, Muon and ARO on this machine, in one run: `bench --iteration`."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_aro.cli.quickstart import OPTIMIZERS

WARM_UP = 3  # iterations: kernels are compiled, memory is found, the optimizer has its state


@dataclass
class Iterations:
    """One optimizer's row."""

    optimizer: str
    ms: float
    """Median of an iteration."""
    quartiles: tuple[float, float]
    overhead: float
    """Of the first row's median."""
    peak_mib: int
    """Allocated at most on any rank, all told."""


def measure(
    flags: Sequence[str], gpus: int, iterations: int, rounds: int, aro: Sequence[str]
) -> list[Iterations]:
    """AdamW, Muon and ARO in turns, so often.

    Args:
        flags: Megatron's, without an optimizer.
        aro: more flags for ARO alone.

    Raises:
        ValueError: torchrun failed; what it said is on stderr.
    """
    more = ["--train-iters", str(WARM_UP + iterations + 1), "--log-interval", "1"]
    more += ["--eval-iters", "0", "--eval-interval", str(10**6)]
    own = {"ARO": [*aro, "--timing-log-level", "1"]}
    runs = [[*flags, *more, *words, *own.get(name, [])] for name, words in OPTIMIZERS.items()]
    with tempfile.TemporaryDirectory() as folder:
        job, out = Path(folder) / "job.json", Path(folder) / "out.json"
        job.write_text(json.dumps({"runs": runs * rounds, "out": str(out)}))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(gpus), "-m", "megatron_aro.iterations", str(job)]
        if subprocess.run(command).returncode != 0:
            raise ValueError("--iteration: the training failed; its message stands above.")
        figures = json.loads(out.read_text())
    rows: list[Iterations] = []
    for number, name in enumerate(OPTIMIZERS):
        mine = figures[number :: len(OPTIMIZERS)]
        times = [ms for run in mine for ms in run["milliseconds"][WARM_UP:]]
        low, middle, high = statistics.quantiles(times, n=4)
        first = rows[0].ms if rows else middle
        peak = max(run["mib"] for run in mine)
        rows.append(Iterations(name, middle, (low, high), middle / first - 1, round(peak)))
    return rows


def table(rows: Sequence[Iterations]) -> str:
    """The rows as Markdown."""
    lines = [
        "| optimizer | ms an iteration | quartiles | over AdamW | peak, MiB |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row.quartiles
        lines.append(
            f"| {row.optimizer} | {row.ms:.1f} | {low:.1f} to {high:.1f} | {row.overhead:+.1%} | "
            f"{row.peak_mib:,} |"
        )
    return "\n".join(lines)
