"""docs/examples/own_loop.py: a loop on megatron-core without Megatron's, run as its user would."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch
from megatron.core import dist_checkpointing

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "own_loop.py"


def losses(folder: Path, processes: int) -> list[float]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), str(EXAMPLE), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(loss) for loss in re.findall(r"^loss (\S+)", done.stdout, re.MULTILINE)]


def test_it_is_short() -> None:
    """60 lines, so that it is read."""
    assert len(EXAMPLE.read_text().splitlines()) <= 60


def test_it_trains_saves_and_goes_on(tmp_path: Path) -> None:
    """From log(64) to a third in 20 steps; another number of ranks goes on where it stopped."""
    folder = tmp_path / "saved"
    first = losses(folder, 1 if torch.cuda.is_available() else 2)
    assert len(first) == 20 and first[0] > 4 and first[-1] < first[0] / 3
    saved = dist_checkpointing.load_tensors_metadata(str(folder))
    rotations = [key for key in saved if key.startswith("optimizer.aro.") and "rotation" in key]
    assert len(rotations) == 2 * 6  # two layers of q, k, v, attention output, fc1 and fc2
    second = losses(folder, 1)
    assert second[0] < 1.5 * first[-1] and second[-1] < second[0] / 3
