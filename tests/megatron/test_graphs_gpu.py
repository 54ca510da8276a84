"""Small batches by CUDA graphs beside NCCL, side streams and experts: no bit differs from without.

One command: ``scripts/test.sh -m gpu tests/megatron/test_graphs_gpu.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import runs
import torch
import torchrun
from aro_runs import DISTRIBUTED, MOE
from test_aro_multi_gpu import MODEL, TP2

pytestmark = pytest.mark.gpu

OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather"]
EXPERTS = [*MOE, "--expert-model-parallel-size", "2", *DISTRIBUTED]
CHUNKS = ["--aro-workspace-mib", "1"]  # so that one travels while another is stepped
LAYOUTS = {
    "DP 2, overlapped": [*DISTRIBUTED, *OVERLAP],
    "TP 2, in chunks": [*TP2, *CHUNKS],
    "experts, EP 2": EXPERTS,
}


def test_graphs_change_nothing(tmp_path: Path) -> None:
    """Losses and weights of 12 steps, whose first ones climb the ladder and two are measured."""
    trainings = []
    for flags in LAYOUTS.values():
        own = [*MODEL, *flags, "--bf16", "--train-iters", "12", "--aro-monitor-interval", "5"]
        trainings += [own, [*own, "--aro-cuda-graphs", "none"]]
    for rank in torchrun.run(tmp_path, 2, runs.train_each, trainings):
        pairs = zip(rank[::2], rank[1::2], strict=True)
        for name, (graphs, without) in zip(LAYOUTS, pairs, strict=True):
            assert graphs.losses == without.losses, name
            assert graphs.weights.keys() == without.weights.keys()
            for weight, tensor in graphs.weights.items():
                assert torch.equal(tensor, without.weights[weight]), (name, weight)
