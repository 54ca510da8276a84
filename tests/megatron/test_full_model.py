"""`--aro-mode full-model` in real Megatron: embeddings, output layer and vectors as specified."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from aro_runs import ARO as _ARO
from aro_runs import DISTRIBUTED, GATED, MOE, optimizer_state, same
from full_model_runs import assembled, reference, train_counting, train_full
from logical_state import logical, train_watched
from pool import Pool
from runs import TINY
from stepped import check_steps, given

from megatron_aro.config import AROConfig

WORDS = "embedding.word_embeddings.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
FULL = ["--aro-mode", "full-model"]
# 150 tokens (149 and the end of documents), padded to 160, or 192 at TP 2: padding within the last
# shard, which the distributed optimizer cuts too.
ARO = [*_ARO, *FULL, "--micro-batch-size", "1", "--vocab-size", "150"]
VOCABULARY = 150
TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
PP2 = ["--pipeline-model-parallel-size", "2"]
VIRTUAL = ["--num-layers", "4", "--num-layers-per-virtual-pipeline-stage", "1"]
CP2 = ["--context-parallel-size", "2"]
EP2 = ["--expert-model-parallel-size", "2"]
UNTIED = ["--untie-embeddings-and-output-weights"]
ROPE = ["--position-embedding-type", "rope"]
MTP = ["--mtp-num-layers", "1", *ROPE]
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "700"]
INSTANCES = [*DISTRIBUTED, "--num-distributed-optimizer-instances", "2"]
BIASES = ["--swiglu", "--group-query-attention", "--num-query-groups", "2"]
BATCH = ["--global-batch-size", "6"]
LAYOUTS = {
    "one process": (1, [*GATED, *UNTIED]),
    "DP 2 replicated": (2, GATED),
    "DP 2": (2, [*BIASES, *DISTRIBUTED]),
    "DP 3": (3, [*GATED, *UNTIED, *DISTRIBUTED, *BATCH, "--aro-rotation", "eigen"]),
    "DP 4, overlap, small buckets": (4, [*GATED, *DISTRIBUTED, *OVERLAP]),
    "DP 4, two instances": (4, [*GATED, *INSTANCES]),
    "TP 2": (2, [*BIASES, *TP2, "--aro-projection", "rownorm"]),
    "TP 2 x DP 2": (4, [*BIASES, *UNTIED, *TP2, *DISTRIBUTED]),
    "TP 2 x DP 2 replicated": (4, [*BIASES, *TP2, "--aro-rotation", "none"]),
    "PP 2": (2, [*GATED, *PP2]),
    "PP 2, virtual": (2, [*GATED, *PP2, *VIRTUAL]),
    "PP 2, untied": (2, [*GATED, *UNTIED, *PP2, "--aro-projection", "sign"]),
    "PP 2, multi-token prediction": (2, [*GATED, *MTP, *PP2]),
    "PP 2 x DP 2": (4, [*GATED, *PP2, *DISTRIBUTED]),
    "TP 2 x PP 2": (4, [*BIASES, *TP2, *PP2, *DISTRIBUTED]),
    "EP 2": (2, [*MOE, *EP2, *DISTRIBUTED]),
    "EP 2, expert TP 2": (4, [*MOE, *EP2, *TP2, *DISTRIBUTED, "--aro-qr", "scqr"]),
    "CP 2 replicated": (2, [*GATED, *CP2, "--aro-rotation", "polar"]),
    "CP 2 x TP 2": (4, [*BIASES, *CP2, *TP2, *DISTRIBUTED, "--aro-qr", "qr"]),
    "TP 2 x DP 2 x PP 2": (8, [*BIASES, *TP2, *PP2, *DISTRIBUTED]),
}


def settings(flags: list[str]) -> AROConfig:
    return AROConfig(mode="full-model", **given(flags, "projection", "rotation", "qr"))


@pytest.fixture(scope="module")
def eight() -> Pool:
    pool = Pool(8)
    yield pool
    pool.close()


@pytest.mark.parametrize(("world_size", "flags"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_steps_as_one_process(
    pool: Pool, eight: Pool, world_size: int, flags: list[str]
) -> None:
    """From Megatron's own gradients: the specification's weights, to float32's rounding.

    Hidden matrices to the bit, as in hybrid mode (`check_steps`); vocabulary matrices and vectors
    to 1e-7, two roundings of a weight below 1; padding as it was, to the bit; all copies alike, to
    the bit. No rank steps more of a vocabulary than its share, and one row.
    """
    ranks = (eight if world_size > 4 else pool).run(world_size, train_full, [*ARO, *flags])
    instances = 2 if flags[-2:] == INSTANCES[-2:] else 1
    check_steps(ranks, flags, instances)
    optimizers = [optimizer for rank in ranks for optimizer in rank["optimizers"]]
    expected = reference(optimizers, VOCABULARY, settings(flags))
    kinds = ("columns", "vector")
    first, last = (
        assembled(optimizers, [optimizer[when] for optimizer in optimizers], kinds)
        for when in ("weights", "last")
    )
    assert WORDS in last
    assert ("output_layer.weight" in last) == (UNTIED[0] in flags or PP2[0] in flags)
    for name, weight in last.items():
        assert (weight - expected[name]).abs().max() < 1e-7, name
        if "position" not in name and weight.dim() == 2:
            assert len(weight) > VOCABULARY
            assert torch.equal(weight[VOCABULARY:], first[name][VOCABULARY:]), name
        assert not torch.equal(weight, first[name])
    if "output_layer.weight" in last and not {UNTIED[0], MTP[0]} & {*flags}:
        assert torch.equal(last["output_layer.weight"], last[WORDS])
    for rank in ranks:
        shares = (share(optimizer, optimizers, flags) for optimizer in rank["optimizers"])
        assert rank["largest"] <= max(shares)


def share(optimizer: dict, optimizers: list[dict], flags: list[str]) -> int:
    """Elements of the largest piece of a vocabulary matrix that this rank may step.

    What it holds and the rest of a row; where others hold the same, its part of that.
    """
    tp, dp = (1 + max(x["position"][axis] for x in optimizers) for axis in (0, 1))
    shares = [0]
    for name, (by, shape, axis, *_) in optimizer["parameters"].items():
        if by == "columns":
            copies = (tp if axis is None else 1) * (1 if DISTRIBUTED[0] in flags else dp)
            shares.append(-(-len(optimizer["weights"][name]) // copies) + shape[1])
    return max(shares)


RESHARDABLE = ["--dist-ckpt-optim-fully-reshardable"]
CHECKPOINTS = {
    "fully_reshardable, TP 2 x DP 2": (4, [*TP2, *DISTRIBUTED, *RESHARDABLE]),
    "dp_reshardable, DP 2": (2, DISTRIBUTED),
    "replicated, DP 2": (2, []),
    "torch, TP 2": (2, [*TP2, "--ckpt-format", "torch"]),
}


@pytest.mark.parametrize(("world_size", "form"), CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
def test_it_resumes_to_the_bit(
    pool: Pool, tmp_path: Path, world_size: int, form: list[str]
) -> None:
    """State as it was saved, and the losses and weights of the run that went on."""
    argv = [*ARO, *GATED, *form]
    save = ["--save", str(tmp_path), "--save-interval", "3"]
    straight = pool.run(world_size, train_watched, [*argv, *save], iteration=3)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    saved = logical([rank.inspected for rank in straight])
    resumed = pool.run(world_size, train_watched, [*argv, "--load", str(tmp_path)])
    state = logical([rank.inspected for rank in resumed])
    assert "rotation.embedding.word_embeddings.weight" in state
    assert "fallbacks.embedding.position_embeddings.weight" in state
    assert same(state, saved)
    assert resumed[0].losses == straight[0].losses[3:]
    for one, other in zip(resumed, straight, strict=True):
        assert same(one.weights, other.weights)


def test_any_layout_reads_what_another_saved(pool: Pool, tmp_path: Path) -> None:
    """TP 2 to DP 2 and PP 2: padding of the vocabulary changes, what is true does not.

    Both go on alike, but for rounding. (The loss of the run that saved sees other padding.)
    """
    argv = [*ARO, *GATED, "--train-iters", "6"]
    save = ["--save", str(tmp_path), "--save-interval", "3", *DISTRIBUTED, *RESHARDABLE]
    straight = pool.run(2, train_watched, [*argv, *TP2, *save], iteration=3)
    assert straight[0].exit_status == 0
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    saved = true_rows(logical([rank.inspected for rank in straight]))
    assert saved["rotation.embedding.word_embeddings.weight"].shape == (32, 32)
    losses = []
    for flags in (DISTRIBUTED, PP2):
        resumed = pool.run(2, train_watched, [*argv, *flags, "--load", str(tmp_path)])
        assert resumed[0].exit_status == 0
        state = true_rows(logical([rank.inspected for rank in resumed]))
        assert same(state, saved)
        losses.append(next(rank.losses for rank in resumed if rank.losses))
    assert losses[0] == pytest.approx(losses[1], abs=2e-3) and len(losses[0]) == 3


def true_rows(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: tensor[:VOCABULARY]
        if name.startswith("embedding.word_embeddings.weight.")
        else tensor
        for name, tensor in state.items()
    }


def test_the_mode_of_a_checkpoint_stays(pool: Pool, tmp_path: Path) -> None:
    """Hybrid to full-model and back are refused by a sentence before anything is loaded."""
    hybrid = [flag for flag in ARO if flag not in FULL]
    for saves, loads in ((ARO, hybrid), (hybrid, ARO)):
        folder = str(tmp_path / str(saves is ARO))
        save = ["--save", folder, "--save-interval", "3", "--train-iters", "3"]
        assert pool.train(1, [*saves, *GATED, *save])[0].exit_status == 0
        init = ["--aro-init-momentum", "exp_avg", "--aro-init-rotation", "identity"]
        (rank,) = pool.train(1, [*loads, *GATED, "--load", folder, *init])
        assert rank.exit_status == 2
        assert "The checkpoint's run had --aro-mode" in rank.stderr


def test_from_adamw_with_aligned_rotations(pool: Pool, tmp_path: Path) -> None:
    """AdamW's momenta go on, of all parameters; rotations are turned to them."""
    save = ["--save", str(tmp_path), "--save-interval", "3"]
    adam = [*TINY, *GATED, "--vocab-size", "150", "--optimizer", "adam"]
    assert pool.train(1, [*adam, *save])[0].exit_status == 0
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    init = ["--aro-init-momentum", "exp_avg", "--aro-init-rotation", "qr"]
    argv = [*ARO, *GATED, *TP2, "--load", str(tmp_path), *init]
    ranks = pool.run(2, train_watched, argv)
    assert [rank.exit_status for rank in ranks] == [0, 0]
    state = logical([rank.inspected for rank in ranks])
    rotation = state["rotation.embedding.word_embeddings.weight"]
    assert (rotation.mT @ rotation - torch.eye(32)).abs().max() < 1e-5
    assert not torch.equal(rotation, torch.eye(32))
    assert all(state[name].any() for name in state if name.endswith("exp_avg"))


@pytest.mark.parametrize(
    "flags",
    [[*TP2, *DISTRIBUTED, *OVERLAP], TP2],
    ids=["TP 2 x DP 2", "TP 2 x DP 2 replicated"],
)
def test_the_number_of_collectives_does_not_depend_on_the_model(
    pool: Pool, flags: list[str]
) -> None:
    """For two layers as for four, for two vocabulary matrices as for three, on every rank."""
    found = []
    for model in ([*GATED, "--num-layers", "4"], BIASES, [*GATED, *UNTIED]):
        ranks = pool.run(4, train_counting, [*ARO, *model, *flags, "--train-iters", "2"])
        steps = {tuple(sorted((+step).items())) for rank in ranks for step in rank}
        assert len(steps) == 2  # of ranks beside the owner, and of others
        found.append(steps)
    assert found[0] == found[1] == found[2]
    reductions = {dict(step)["all_reduce"] for step in found[0]}
    # Largest, rows, sinkhorn, rows, sinkhorn, norms, of vectors and their signs; over TP and DP.
    assert reductions == {2 * (1 + 1 + 5 + 1 + 5 + 1 + 2)}


def test_exceptions_go_to_adamw(pool: Pool) -> None:
    """By name, all stages' copies of the word embeddings alike; the table says so."""
    exceptions = ["--aro-override", "*.word_embeddings.weight=adamw,*norm.*=adamw,*.0.*q*=left"]
    argv = [*ARO, *GATED, *PP2, *DISTRIBUTED, *exceptions]
    ranks = pool.train(2, argv, inspect=optimizer_state)
    assert [rank.exit_status for rank in ranks] == [0, 0]
    table = [line.split() for line in ranks[0].stdout.splitlines() if line.startswith("    ")]
    by = {line[0]: line[3] for line in table if len(line) > 3}
    for name, optimizer in {
        "embedding.word_embeddings.weight": "AdamW",
        "output_layer.weight": "AdamW",
        "embedding.position_embeddings.weight": "ARO",
        "decoder.final_layernorm.weight": "AdamW",
        "decoder.layers.*.mlp.linear_fc2.weight": "ARO",
    }.items():
        assert by[name] == optimizer, name
    assert sum(key.endswith("exp_avg_sq") for key in ranks[0].inspected) == 1 + 1 * 4
    assert ranks[1].losses[-1] < ranks[1].losses[0] - 0.1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--aro-projection", "adam"], "does not work with --aro-projection adam"),
        (["--aro-rotation", "rgd"], "does not work with --aro-rotation rgd"),
        ([*DISTRIBUTED, "--aro-param-layout", "whole"], "would hold a whole vocabulary matrix"),
        (["--aro-override", "*embeddings*=left"], "fits no matrix of ARO"),
    ],
    ids=["adam", "rgd", "whole", "orientation"],
)
def test_what_does_not_work_is_refused(pool: Pool, flags: list[str], said: str) -> None:
    """At start-up, in one sentence."""
    (rank,) = pool.train(1, [*ARO, *GATED, *flags])
    assert rank.exit_status == 2 and said in rank.stderr


def test_bf16_is_clipped_and_monitored(pool: Pool) -> None:
    """Losses near float32's, without AdamW and with the monitor's measured steps."""
    argv = [*ARO, *GATED, "--clip-grad", "0.1"]
    exact = pool.train(1, argv)[0]
    monitor = ["--aro-monitor-interval", "2", "--timing-log-level", "1"]
    ranks = pool.train(4, [*argv, *TP2, *DISTRIBUTED, *OVERLAP, "--bf16", *monitor])
    # TP 2 pads the vocabulary to 192, 42 rows of padding in place of 10.
    more = math.log(192 / 160)
    assert exact.losses == pytest.approx([loss - more for loss in ranks[0].losses], rel=2**-6)
    assert all(w.dtype == torch.bfloat16 for w in ranks[0].weights.values())
    printed = "".join(rank.stdout for rank in ranks)
    assert "> ARO at iteration 4:" in printed
    assert re.search(r"last step took .* columns [0-9.]+", printed)


def test_tokens_that_no_longer_occur_fade_away(pool: Pool) -> None:
    """A momentum of 0.03 takes twelve tokens' columns through the denormals to zero in 30 steps.

    The prototype's momentum, 0.95, takes 800 steps and more, and there reciprocals of such columns
    turned everything NaN. Every weight is one process's, so nothing else felt it; the tokens'
    own only decay in the end. An entry of a norm stays where it is then, whose sign would go on.
    """
    argv = [*ARO, *GATED, *TP2, "--aro-momentum", "0.03", "--train-iters", "38"]
    ranks = pool.run(2, train_full, argv, vanishing=True)
    optimizers = [optimizer for rank in ranks for optimizer in rank["optimizers"]]
    last = assembled(optimizers, [x["last"] for x in optimizers], ("columns", "vector"))
    expected = reference(optimizers, VOCABULARY, AROConfig(momentum=0.03))
    gone = [*range(3, 9), *range(99, 105)]
    smallest = [
        float(step[0][WORDS].view(-1, 32)[3:9].abs().max()) for step in optimizers[0]["steps"]
    ]
    assert smallest[1] > 0 and not any(smallest[2:])
    for name, weight in last.items():
        assert weight.isfinite().all()
        assert (weight - expected[name]).abs().max() < 1e-6, name
    before = reference(optimizers, VOCABULARY, AROConfig(momentum=0.03), steps=33)
    decay = math.prod(1 - lr * wd for _, lr, wd in optimizers[0]["steps"][33:])
    assert torch.allclose(last[WORDS][gone], before[WORDS][gone] * decay, rtol=1e-5, atol=1e-8)
    assert torch.equal(last[FINAL_NORM][3:9], before[FINAL_NORM][3:9])  # which does not decay
    assert not torch.equal(last[FINAL_NORM][9:], before[FINAL_NORM][9:])
    assert not torch.allclose(last[WORDS][20:30], before[WORDS][20:30] * decay, rtol=1e-2)
