"""The studies of scripts/studies run as one command each and keep what they found."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

STUDIES = Path(__file__).parent.parent / "scripts" / "studies"


def study(name: str, out: Path, *sizes: str) -> tuple[dict, list[dict[str, str]]]:
    """The configuration and the rows that it kept."""
    command = [sys.executable, "-W", "ignore", str(STUDIES / f"{name}.py"), *sizes]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (out / "figure.png").stat().st_size > 10_000
    with (out / "results.csv").open() as file:
        return json.loads((out / "config.json").read_text()), list(csv.DictReader(file))


def test_synthetic(tmp_path: Path) -> None:
    """Few draws already order what differs by much: a frame of one's own makes scores steadier."""
    config, rows = study("synthetic", tmp_path, "--draws", "20", "--rotations", "4")
    assert config["draws"] == 20 and config["versions"]["torch"]
    assert len(rows) == 3 * (5 + 2)
    spread = {(row["f"], row["rotation"]): float(row["std"]) for row in rows}
    for f in ("sinkhorn", "sign", "rownorm"):
        assert spread[f, "aro from identity"] < 0.8 * spread[f, "none"]
        assert spread[f, "eigen"] < 0.8 * spread[f, "none"]


def test_digits(tmp_path: Path) -> None:
    """Every row of the figure, and a loss that falls."""
    pytest.importorskip("sklearn", reason="scikit-learn is in the extra 'studies' alone")
    _, rows = study("digits", tmp_path, "--steps", "40", "--seeds", "1")
    assert len(rows) == 2 * 2 * 4 * 2
    for first, last in zip(rows[::2], rows[1::2], strict=True):
        assert float(last["loss mean"]) < float(first["loss mean"])
