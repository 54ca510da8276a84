"""`--optimizer aro` on a GPU, in bf16: trains, repeats itself and resumes, bit for bit."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from aro_runs import DISTRIBUTED, GATED, same
from runs import TINY, TrainResult

pytestmark = pytest.mark.gpu

# Without transformer-engine and apex, whose kernels these would be.
PLAIN = ["--transformer-impl", "local", "--no-gradient-accumulation-fusion"]
PLAIN += ["--no-persist-layer-norm", "--no-masked-softmax-fusion", "--no-rope-fusion"]
RUN = [*TINY, "--optimizer", "aro", *GATED, *PLAIN, "--bf16", "--train-iters", "8"]
RUN += ["--hidden-size", "256", "--seq-length", "128", "--max-position-embeddings", "128"]

_CHILD = """
import pickle, sys
import aro_runs, runs
argv, target = pickle.load(sys.stdin.buffer)
result = runs.train(argv, inspect=aro_runs.optimizer_state)
result.inspected = {n: w.cpu() for n, w in result.inspected.items()}
pickle.dump(result, open(target, "wb"))
"""


def train(flags: list[str]) -> TrainResult:
    """A run of the entry in a process of its own, as a user's."""
    with tempfile.NamedTemporaryFile() as target:
        _train(flags, target.name)
        return pickle.load(target)


def _train(flags: list[str], target: str) -> None:
    paths = [str(Path(__file__).parent), *sys.path]
    child = subprocess.run(
        [sys.executable, "-c", _CHILD],
        input=pickle.dumps(([*RUN, *flags], target)),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr.decode()[-3000:]


@pytest.mark.parametrize("flags", [[], DISTRIBUTED], ids=["replicated", "distributed"])
def test_a_resumed_run_repeats_an_uninterrupted_one(tmp_path: Path, flags: list[str]) -> None:
    """Losses fall; a resumed run and one without CUDA graphs give the same bits, state included."""
    save = ["--save", str(tmp_path), "--save-interval", "4"]
    without = ["--aro-cuda-graphs", "none"]
    with ThreadPoolExecutor() as at_once:
        first, again = at_once.map(train, [[*flags, *save], [*flags, *without]])
    shutil.rmtree(tmp_path / "iter_0000008")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    resumed = train([*flags, "--load", str(tmp_path)])

    assert first.losses[-1] < first.losses[0] - 0.3
    assert again.losses == first.losses and resumed.losses == first.losses[4:]
    for other in (again, resumed):
        assert same(other.weights, first.weights)
        assert same(other.inspected, first.inspected)
