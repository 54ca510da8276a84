"""What every study leaves behind: its configuration with versions, a CSV, a figure."""

from __future__ import annotations

import argparse
import csv
import json
import platform
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

COLOURS = {"none": "#777777", "polar": "#b07aa1", "eigen": "#d1822f", "aro": "#2f6db0"}


def arguments(name: str, doc: str, defaults: Mapping[str, int]) -> argparse.Namespace:
    """The command line of a study: its sizes, and where results go."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    for size, default in defaults.items():
        parser.add_argument(f"--{size}", type=int, default=default, help="default: %(default)s")
    out = Path("docs/results") / f"{time.strftime('%Y-%m-%d')}-{name}"
    parser.add_argument("--out", type=Path, default=out, help="folder, default: %(default)s")
    return parser.parse_args()


def keep(
    out: Path,
    config: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    figure: Any,
    began: float,
) -> None:
    """Write config.json, results.csv and figure.png.

    Args:
        rows: with the same keys; floats get six digits.
        figure: matplotlib's.
        began: of time.perf_counter.
    """
    out.mkdir(parents=True, exist_ok=True)
    packages = ("torch", "numpy", "scikit-learn") if "seeds" in config else ("torch", "numpy")
    about = {
        **config,
        "seconds": round(time.perf_counter() - began),
        "machine": platform.machine(),
        "versions": {"python": platform.python_version()} | {p: version(p) for p in packages},
    }
    (out / "config.json").write_text(json.dumps(about, indent=2) + "\n")
    with (out / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    figure.savefig(out / "figure.png", dpi=140)
    print(f"{out}: config.json, results.csv, figure.png")
