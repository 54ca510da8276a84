"""Full-model mode and shared rotations over NCCL against one GPU: the same losses, replicas alike.

One command: ``scripts/test.sh -m gpu tests/megatron/test_family_gpu.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import runs
import torchrun
from aro_runs import DISTRIBUTED
from test_aro_multi_gpu import FROM_CHECKPOINT, MODEL, TP2

pytestmark = pytest.mark.gpu

FAMILY = {
    "full-model": ["--aro-mode", "full-model"],
    "chain": ["--aro-sharing", "chain"],
    "global": ["--aro-sharing", "global"],
}
LAYOUTS = {
    "DP 2": DISTRIBUTED,
    "TP 2": TP2,
    "PP 2": ["--pipeline-model-parallel-size", "2"],
}


def test_layouts_train_like_one_gpu(tmp_path: Path) -> None:
    """Float32 losses agree to 1e-2 (`test_aro_multi_gpu` says why not better) and fall."""
    start, alone, spread = [], [], []
    check = ["--check-weight-hash-across-dp-replicas-interval", "5"]
    for name, flags in FAMILY.items():
        own = [*MODEL, *flags]
        save = ["--save", str(tmp_path / name), "--save-interval", "1", "--train-iters", "1"]
        start.append([*own, *save, "--lr-warmup-iters", "0"])
        own += ["--load", str(tmp_path / name), *FROM_CHECKPOINT, "--train-iters", "12"]
        alone.append(own)
        spread += [[*own, *layout, *check] for layout in LAYOUTS.values()]

    first = torchrun.run(tmp_path, 1, runs.train_each, [*start, *alone])[0]
    found = iter(torchrun.run(tmp_path, 2, runs.train_each, spread)[-1])
    for name, alone_result in zip(FAMILY, first[len(start) :], strict=True):
        losses = alone_result.losses
        assert losses[-1] < losses[0] - 0.15, name
        for layout in LAYOUTS:
            assert next(found).losses == pytest.approx(losses, abs=1e-2), (name, layout)
