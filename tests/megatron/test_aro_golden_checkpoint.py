"""A checkpoint made by version 0.1.0, which every later version must read.

tests/data/checkpoint.tar.xz: ARGV on two ranks, `--save golden --save-interval 3`, iteration 3.
"""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path

import pytest
import torch
from aro_runs import DISTRIBUTED
from logical_state import logical, train_watched
from pool import Pool

from megatron_aro.cli.inspect import inspect

ARCHIVE = Path(__file__).parent.parent / "data" / "checkpoint.tar.xz"
MODEL = """
    --num-layers 2 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 24 --swiglu
    --disable-bias-linear --group-query-attention --num-query-groups 1
    --attention-dropout 0 --hidden-dropout 0 --seq-length 16 --max-position-embeddings 16
    --micro-batch-size 2 --global-batch-size 8 --train-iters 6 --lr 1e-2 --min-lr 1e-3
    --lr-decay-style cosine --lr-warmup-iters 1 --weight-decay 0.1 --log-interval 1
    --eval-interval 1000 --eval-iters 0 --mock-data --tokenizer-type NullTokenizer
    --vocab-size 64 --make-vocab-size-divisible-by 16 --optimizer aro
""".split()
RESHARDABLE = ["--dist-ckpt-optim-fully-reshardable"]
ARGV = [*MODEL, *DISTRIBUTED, *RESHARDABLE]
TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
LOSSES = [3.99466609954834, 3.9190869331359863, 3.8767733573913574]  # of iterations 4 to 6
# Of all momenta, moments, rotations and counts.
STATE = "d43b26abc05b63c13b48c5467a250e0d5551507155bdc93155c8ea10fc53bc00"


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    assert ARCHIVE.stat().st_size < 200_000
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "golden"


def digest(state: dict[str, torch.Tensor]) -> str:
    made = hashlib.sha256()
    for name in sorted(state):
        made.update(name.encode())
        made.update(state[name].contiguous().numpy().tobytes())
    return made.hexdigest()


def test_its_contents_are_pinned(golden: Path) -> None:
    """Names and sizes of what ARO keeps in a checkpoint, as the documentation says them."""
    found = inspect(golden)
    assert found["iteration"] == 3 and found["sharding"] == "fully_reshardable"
    layers = [f"decoder.layers.{layer}." for layer in range(2)]
    parts = {
        "self_attention.linear_qkv.weight#q": (16, 16),
        "self_attention.linear_qkv.weight#k": (16, 8),
        "self_attention.linear_qkv.weight#v": (16, 8),
        "self_attention.linear_proj.weight": (16, 16),
        "mlp.linear_fc1.weight#gate": (16, 16),
        "mlp.linear_fc1.weight#up": (16, 16),
        "mlp.linear_fc2.weight": (16, 16),
    }
    sizes = {matrix["name"]: (matrix["m"], matrix["k"]) for matrix in found["matrices"]}
    assert sizes == {layer + part: size for layer in layers for part, size in parts.items()}
    assert all(matrix["orthogonality_error"] < 1e-2 for matrix in found["matrices"])
    assert all(matrix["fallbacks"]["factorizations"] == 3 for matrix in found["matrices"])
    moments = 4 * (64 * 16 + 16 * 16 + 2 * 2 * 2 * 16 + 2 * 16)  # embeddings, norms
    matrices = 4 * 2 * (16 * (16 + 2 * 8) + 16 * 16 + 16 * 24 * 3)
    assert found["bytes"] == {
        "weights": moments + matrices,
        "param": moments + matrices,
        "exp_avg": moments + matrices,
        "exp_avg_sq": moments,
        "rotation": 4 * 2 * (5 * 16 * 16 + 2 * 16 * 8),
        "fallbacks": 8 * 4 * 14,
    }


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [(2, DISTRIBUTED), (1, []), (2, [*TP2, *DISTRIBUTED])],
    ids=["as saved", "one process", "TP 2"],
)
def test_it_goes_on_as_it_did(pool: Pool, golden: Path, ranks: int, flags: list[str]) -> None:
    """The same state bit for bit, and the losses of the run that wrote it."""
    resumed = pool.run(ranks, train_watched, [*MODEL, *flags, "--load", str(golden)])
    assert resumed[0].exit_status == 0
    assert digest(logical([rank.inspected for rank in resumed])) == STATE
    assert resumed[0].losses == pytest.approx(LOSSES, abs=2e-3)
