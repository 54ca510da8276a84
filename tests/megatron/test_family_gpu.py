"""Full-model mode and shared rotations over NCCL against one GPU: the same losses, replicas alike.

One command: ``scripts/test.sh -m gpu tests/megatron/test_family_gpu.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torchrun
from aro_runs import DISTRIBUTED
from test_aro_multi_gpu import FROM_CHECKPOINT, MODEL, TP2

pytestmark = pytest.mark.gpu

STEPS = ["--train-iters", "12"]
FAMILY = {
    "full-model": ["--aro-mode", "full-model"],
    "chain": ["--aro-sharing", "chain"],
    "global": ["--aro-sharing", "global"],
}
LAYOUTS = {
    "DP 4": DISTRIBUTED,
    "TP 2 x DP 2": [*TP2, *DISTRIBUTED],
    "PP 2 x DP 2": ["--pipeline-model-parallel-size", "2", *DISTRIBUTED],
}

_CHILD = """
import os, pickle, sys
import runs
argv, folder = pickle.load(open(sys.argv[1], "rb"))
result = runs.train(argv)
pickle.dump(result.losses, open(f"{folder}/{os.environ['RANK']}.pickle", "wb"))
sys.exit(result.exit_status)
"""


def losses(folder: Path, ranks: int, *flags: str) -> list[float]:
    return torchrun.run(folder, ranks, _CHILD, ([*MODEL, *flags], str(folder)))[0]


@pytest.mark.parametrize("flags", FAMILY.values(), ids=FAMILY.keys())
def test_layouts_train_like_one_gpu(tmp_path: Path, flags: list[str]) -> None:
    """Float32 losses agree to 1e-2 (`test_aro_multi_gpu` says why not better) and fall."""
    save = ["--save", str(tmp_path), "--save-interval", "1", "--train-iters", "1"]
    losses(tmp_path, 1, *flags, *save, "--lr-warmup-iters", "0")
    load = [*flags, *STEPS, "--load", str(tmp_path), *FROM_CHECKPOINT]
    expected = losses(tmp_path, 1, *load)
    assert expected[-1] < expected[0] - 0.15
    check = ["--check-weight-hash-across-dp-replicas-interval", "5"]
    for name, layout in LAYOUTS.items():
        found = losses(tmp_path, 4, *load, *layout, *check)
        assert found == pytest.approx(expected, abs=1e-2), name
