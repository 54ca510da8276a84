"""A checkpoint of one layout, continued in another: the state bit for bit, the losses alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from aro_runs import ARO as _ARO
from aro_runs import DISTRIBUTED, GATED, MOE, same, train_frozen
from logical_state import logical, train_watched
from pool import Pool

# 12 divides over 1 to 4 data-parallel ranks; 4 layers over two stages of two chunks.
ARO = [*_ARO, "--micro-batch-size", "1", "--global-batch-size", "12", "--train-iters", "6"]
DEEP = [*GATED, "--num-layers", "4"]
TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
TP4 = ["--tensor-model-parallel-size", "4", "--sequence-parallel"]
PP2 = ["--pipeline-model-parallel-size", "2"]
VIRTUAL = [*PP2, "--num-layers-per-virtual-pipeline-stage", "1"]
EP2 = ["--expert-model-parallel-size", "2"]
CP2 = ["--context-parallel-size", "2"]
INSTANCES = [*DISTRIBUTED, "--num-distributed-optimizer-instances", "2"]
WHOLE = ["--aro-param-layout", "whole"]
EP4 = ["--expert-model-parallel-size", "4"]
ETP1 = ["--expert-tensor-parallel-size", "1"]
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "3000"]
RESHARDABLE = ["--dist-ckpt-optim-fully-reshardable"]
UNTIED = ["--untie-embeddings-and-output-weights"]
BF16 = ["--bf16"]
ADAM = ["--aro-projection", "adam"]  # whose second moment goes where the rotation goes

Layout = tuple[int, list[str]]
# (model, layout that saves, layouts that go on).
MATRIX: dict[str, tuple[list[str], Layout, dict[str, Layout]]] = {
    "DP 4, small buckets": (
        DEEP,
        (4, [*DISTRIBUTED, *OVERLAP]),
        {
            "one process": (1, []),
            "DP 3": (3, DISTRIBUTED),
            "TP 2 x DP 2": (4, [*TP2, *DISTRIBUTED, "--ckpt-fully-parallel-load"]),
            "PP 2, virtual, x DP 2": (4, [*VIRTUAL, *DISTRIBUTED]),
        },
    ),
    "projection adam, TP 2 x DP 2 replicated": (
        [*DEEP, *ADAM],
        (4, TP2),
        {
            "DP 4": (4, DISTRIBUTED),
            "TP 4": (4, TP4),
            "CP 2 x DP 2, no matrix cut": (4, [*CP2, *DISTRIBUTED, *WHOLE]),
            "PP 2 x TP 2": (4, [*PP2, *TP2, *DISTRIBUTED]),
        },
    ),
    # The second moment is [m, n] then, also where m > n.
    "projection adam without rotation, DP 2": (
        [*GATED, *ADAM, "--aro-orientation", "left", "--aro-rotation", "none"],
        (2, DISTRIBUTED),
        {"TP 2": (2, TP2)},
    ),
    "CP 2 x TP 2, no matrix cut": (
        DEEP,
        (4, [*CP2, *TP2, *DISTRIBUTED, *WHOLE]),
        {"DP 2": (2, DISTRIBUTED), "DP 4, two instances": (4, INSTANCES)},
    ),
    "PP 2, virtual, untied": (
        [*DEEP, *UNTIED],
        (2, VIRTUAL),
        {"TP 2": (2, [*TP2, *DISTRIBUTED]), "PP 2 x DP 2": (4, [*PP2, *DISTRIBUTED])},
    ),
    "bf16, DP 2": (
        [*DEEP, *BF16],
        (2, DISTRIBUTED),
        {"TP 2 replicated": (2, TP2), "PP 2": (2, PP2)},
    ),
    "bf16, TP 2 replicated": (
        [*DEEP, *BF16],
        (2, TP2),
        {"PP 2 x DP 2": (4, [*PP2, *DISTRIBUTED])},
    ),
    "experts, EP 2 x DP 2": (
        MOE,
        (4, [*EP2, *DISTRIBUTED, "--distrib-optim-fully-reshardable-mem-efficient"]),
        {
            "one process": (1, []),
            "EP 4": (4, [*EP4, *DISTRIBUTED]),
            "EP 2, expert TP 2": (4, [*EP2, *TP2, *DISTRIBUTED]),
        },
    ),
    "experts, projection adam, DP 3": (
        [*MOE, *ADAM],
        (3, DISTRIBUTED),
        {
            "EP 2, TP 2, expert TP 1": (4, [*EP2, *TP2, *ETP1, *DISTRIBUTED]),
            "EP 2 x PP 2 replicated": (4, [*EP2, *PP2]),
        },
    ),
}


@pytest.mark.parametrize(("model", "saves", "goes_on"), MATRIX.values(), ids=MATRIX.keys())
def test_any_layout_reads_what_another_saved(
    pool: Pool, tmp_path: Path, model: list[str], saves: Layout, goes_on: dict[str, Layout]
) -> None:
    """Main parameters, momenta, moments, steps, rotations, counts: all of the logical state.

    Losses agree up to reassociation, which nearly singular momenta of a tiny model enlarge.
    """
    ranks, flags = saves
    save = ["--save", str(tmp_path), "--save-interval", "3", *RESHARDABLE]
    straight = pool.run(ranks, train_watched, [*ARO, *model, *flags, *save], iteration=3)
    assert straight[0].exit_status == 0
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    saved = logical([rank.inspected for rank in straight])
    matrices = [name for name in saved if name.startswith("rotation.")]
    experts = model[: len(MOE)] == MOE
    layers = 4 if model[: len(DEEP)] == DEEP else 2
    assert len(matrices) == layers * (3 + 1 + (1 + 4 * 3 if experts else 2 + 1))
    moments = {k: saved[k] for k in saved if k.startswith("second_moment.")}
    assert len(moments) == (len(matrices) if ADAM[1] in model else 0)
    assert all(moment.any() for moment in moments.values())
    if "none" in model:
        gate = moments["second_moment.decoder.layers.0.mlp.linear_fc1.weight#gate"]
        assert gate.shape == (64, 32)
    losses = next(rank.losses for rank in straight if rank.losses)
    for name, (ranks, flags) in goes_on.items():
        load = ["--load", str(tmp_path)]
        resumed = pool.run(ranks, train_watched, [*ARO, *model, *flags, *load])
        assert resumed[0].exit_status == 0, name
        assert same(logical([rank.inspected for rank in resumed]), saved), name
        after = next(rank.losses for rank in resumed if rank.losses)
        assert after == pytest.approx(losses[3:], abs=2e-3), name


@pytest.mark.parametrize(
    "flags",
    [[], ["--aro-sharing", "chain"], ["--aro-mode", "full-model"]],
    ids=["a rotation each", "shared rotations", "full-model"],
)
def test_parameters_are_frozen_midway(pool: Pool, tmp_path: Path, flags: list[str]) -> None:
    """What is left goes on from its state bit for bit; frozen weights stay as they were saved.

    In all layers, which Megatron saves as one tensor of which it asks for nothing or all.
    """
    save = ["--save", str(tmp_path), "--save-interval", "3", *RESHARDABLE]
    argv = [*ARO, *GATED, *DISTRIBUTED, *flags]
    straight = pool.run(2, train_watched, [*argv, *save], iteration=3)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    saved = logical([rank.inspected for rank in straight])
    resumed = pool.run(2, train_frozen, [*argv, "--load", str(tmp_path)], "linear_fc1")
    assert [rank.exit_status for rank in resumed] == [0, 0]
    left = {name: tensor for name, tensor in saved.items() if "linear_fc1" not in name}
    rotations = 0 if "--aro-sharing" in flags else 2  # of gate and up, and counts as many
    assert len(saved) - len(left) == 2 * (2 + 2 * rotations)  # beside weight and momentum
    assert same(logical([rank.inspected for rank in resumed]), left)
    assert len(resumed[0].losses) == 3 and resumed[0].losses[-1] < resumed[0].losses[0]
    for rank in resumed:
        for layer in range(2):
            name = f"decoder.layers.{layer}.mlp.linear_fc1.weight"
            assert torch.equal(rank.weights[name], saved[f"{name}.param"])


@pytest.mark.parametrize("form", [[], ["--ckpt-format", "torch"]], ids=["torch_dist", "torch"])
def test_pieces_of_buffers_go_to_other_numbers_of_data_parallel_ranks_only(
    pool: Pool, tmp_path: Path, form: list[str]
) -> None:
    """Megatron's defaults of both formats; the rest is refused before any weight changes."""
    argv = [*ARO, *GATED, *DISTRIBUTED, *form]
    way_out = "--ckpt-format torch_dist" if form else "--dist-ckpt-optim-fully-reshardable"
    save = ["--save", str(tmp_path), "--save-interval", "3"]
    straight = pool.run(2, train_watched, [*argv, *save], iteration=3)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    saved = logical([rank.inspected for rank in straight])
    load = ["--load", str(tmp_path)]
    for ranks in (1, 3, 4):
        resumed = pool.run(ranks, train_watched, [*argv, *load])
        assert same(logical([rank.inspected for rank in resumed]), saved), ranks
    replicated = [flag for flag in argv if flag not in DISTRIBUTED]
    for moved, said in (
        ([*argv, *TP2], "tensor_model_parallel_size from 1 to 2"),
        ([*argv, *PP2], "cannot be loaded" if form else "pipeline_model_parallel_size from 1 to 2"),
        (replicated, "use_distributed_optimizer from True to False"),
        ([*argv, *BF16], "--bf16 off"),
    ):
        refused = pool.train(2, [*moved, *load])[0]
        assert refused.exit_status == 2 and said in refused.stderr
        told = f"save with {way_out}" in refused.stderr
        assert told == (said.endswith(("2", "False")))
    if form:
        return
    cut_otherwise = pool.train(2, [*argv, *OVERLAP, *load])[0]
    assert cut_otherwise.exit_status == 2 and "checkpoint" in cut_otherwise.stderr
