"""`--optimizer aro` in real Megatron gives what the single-process optimizer gives."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
import torch
from aro_runs import (
    ARO,
    DISTRIBUTED,
    GATED,
    MOE,
    decay_by_dimension,
    optimizer_state,
    same,
    train_recorded,
    train_with_lost_parameter,
    train_with_poisoned_gradient,
    train_without_matrices,
)
from pool import Pool
from runs import TINY, TrainResult, full_weights
from stepped import ROUTERS_TO_ADAMW, TURNED, check_steps

from megatron_aro import config

# Megatron keeps the gradients of these heads out of the norm that clips.
DETACHED = ["--position-embedding-type", "rope", "--mtp-num-layers", "1", "--mtp-detach-heads"]


@pytest.fixture(scope="module")
def one_process(pool: Pool) -> TrainResult:
    return pool.train(1, [*ARO, *GATED], inspect=optimizer_state)[0]


# Members of the family, spread over the layouts.
ADAM = ["--aro-projection", "adam"]
LEFT = ["--aro-orientation", "left"]
WHOLE_QKV = ["--aro-split", "gate-up"]
SHARED = [*MOE, "--moe-shared-expert-intermediate-size", "16", "--moe-shared-expert-gate"]
TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
TP4 = ["--tensor-model-parallel-size", "4", "--sequence-parallel"]
PP2 = ["--pipeline-model-parallel-size", "2"]
CP2 = ["--context-parallel-size", "2"]
EP2 = ["--expert-model-parallel-size", "2"]
INSTANCES = [*DISTRIBUTED, "--num-distributed-optimizer-instances", "2"]
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "3000"]
DEEP = ["--num-layers", "4", *GATED]
# (ranks, model, flags); TP 4 is more than the two query groups.
LAYOUTS = {
    "one process": (1, GATED, []),
    "DP 2 replicated": (2, GATED, []),
    "DP 2": (2, GATED, [*DISTRIBUTED, *ADAM]),
    "DP 3": (
        3,
        GATED,
        [*DISTRIBUTED, "--global-batch-size", "6", "--aro-rotation", "eigen", "--aro-qr", "qr"],
    ),
    "DP 4, overlap, small buckets": (4, GATED, [*DISTRIBUTED, *OVERLAP, *LEFT]),
    "DP 4, two instances": (4, GATED, INSTANCES),
    "DP 4, two instances, overlap, small buckets": (4, GATED, [*INSTANCES, *OVERLAP]),
    "TP 2": (2, GATED, [*TP2, "--aro-projection", "sign", "--aro-rotation", "polar"]),
    "TP 4": (4, GATED, [*TP4, *DISTRIBUTED, *WHOLE_QKV]),
    "TP 2 x DP 2": (4, GATED, [*TP2, *DISTRIBUTED]),
    "TP 2 x DP 2 replicated": (4, GATED, [*TP2, "--aro-rotation", "rgd"]),
    "TP 2 x DP 2, overlap, small buckets": (4, GATED, [*TP2, *DISTRIBUTED, *OVERLAP, *ADAM]),
    "PP 2 x DP 2": (4, DEEP, [*PP2, *DISTRIBUTED]),
    "PP 2, virtual": (2, DEEP, [*PP2, "--num-layers-per-virtual-pipeline-stage", "1"]),
    "PP 2 x DP 2, two instances": (4, DEEP, [*INSTANCES, *PP2]),
    "TP 2 x DP 2, two instances": (4, GATED, [*INSTANCES, *TP2]),
    "PP 3, a stage without layers": (
        3,
        GATED,
        ["--pipeline-model-parallel-size", "3", "--pipeline-model-parallel-layout", "Et|t|L"],
    ),
    "PP 2 x DP 2, a stage without layers": (
        4,
        GATED,
        [*PP2, *DISTRIBUTED, "--pipeline-model-parallel-layout", "Ett|L"],
    ),
    "PP 2 x TP 2": (4, DEEP, [*PP2, *TP2, *DISTRIBUTED, *TURNED]),
    "CP 2": (2, GATED, [*CP2, *DISTRIBUTED]),
    "CP 2 replicated": (2, GATED, [*CP2, "--aro-projection", "rownorm", "--aro-qr", "scqr"]),
    "CP 2 x DP 2": (4, GATED, [*CP2, *DISTRIBUTED]),
    "CP 2 x DP 2 replicated": (4, GATED, [*CP2, "--aro-rotation", "none"]),
    "CP 2 x TP 2": (4, GATED, [*CP2, *TP2, *DISTRIBUTED]),
    "experts": (1, MOE, ROUTERS_TO_ADAMW),
    "EP 2": (2, MOE, EP2),
    "EP 2 x DP 2": (4, SHARED, [*EP2, *DISTRIBUTED, *ADAM]),
    "EP 2 x DP 2, two instances": (4, MOE, [*INSTANCES, *EP2]),
    "EP 2 x DP 2 replicated": (4, MOE, EP2),
    "EP 2 x CP 2": (4, MOE, [*EP2, *CP2, *DISTRIBUTED]),
    "EP 2, expert TP 2": (4, MOE, [*TP2, *EP2, *DISTRIBUTED]),
    "EP 2, TP 2, expert TP 1": (
        4,
        MOE,
        [*TP2, *EP2, "--expert-tensor-parallel-size", "1", *DISTRIBUTED],
    ),
}


@pytest.mark.parametrize(("world_size", "model", "flags"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_steps_as_the_single_process_optimizer(
    pool: Pool, world_size: int, model: list[str], flags: list[str]
) -> None:
    """Split, orientation, settings and shards as `check_steps` says, and every matrix there is."""
    argv = [*ARO, *model, "--micro-batch-size", "1", *flags]
    instances = 2 if flags[: len(INSTANCES)] == INSTANCES else 1
    ranks = pool.run(world_size, train_recorded, argv)
    names = check_steps(ranks, flags, instances)
    chunks = [optimizer["chunks"] for rank in ranks for optimizer in rank["optimizers"]]
    assert TP2[0] not in flags or max(chunks) > 1
    a_layer = 3 + 1 + (1 + 4 * 3 if model[: len(MOE)] == MOE else 2 + 1)
    a_layer += 4 * (model is SHARED) - 2 * (WHOLE_QKV[1] in flags) - (flags is ROUTERS_TO_ADAMW)
    assert len(names) == (4 if model is DEEP else 2) * a_layer
    losses = next(rank["result"].metrics for rank in ranks if rank["result"].metrics)
    assert losses[-1]["lm loss"] < losses[0]["lm loss"] - 0.1


# Of each setting, below, every value with every value of each other one.
FAMILY = [
    row.split()
    for row in """
        sinkhorn aro   qr    residual qkv
        sinkhorn eigen scqr2 right    qkv,gate-up
        sinkhorn polar scqr  min-side none
        sinkhorn rgd   scqr2 residual gate-up
        sinkhorn none  scqr  left     qkv
        rownorm  aro   scqr2 left     none
        rownorm  eigen scqr  left     gate-up
        rownorm  polar scqr  residual qkv,gate-up
        rownorm  rgd   scqr2 min-side qkv
        rownorm  none  qr    right    qkv,gate-up
        sign     aro   scqr2 right    gate-up
        sign     eigen qr    min-side none
        sign     polar scqr2 right    qkv
        sign     rgd   qr    left     qkv,gate-up
        sign     none  scqr  residual none
        adam     aro   scqr  min-side qkv,gate-up
        adam     eigen scqr2 residual qkv
        adam     polar qr    left     gate-up
        adam     rgd   scqr  right    none
        adam     none  scqr2 min-side gate-up
    """.strip().splitlines()
]
SETTINGS = {
    "projection": get_args(config.Projection),
    "rotation": get_args(config.Rotation),
    "qr": get_args(config.Orthonormalizer),
    "orientation": get_args(config.Orientation),
    "split": ("qkv,gate-up", "qkv", "gate-up", "none"),
}


def test_the_selection_has_every_pair() -> None:
    """Also of a value that is new in `AROConfig`, which nobody has added here."""
    for (i, a), (j, b) in itertools.combinations(enumerate(SETTINGS.values()), 2):
        assert {(row[i], row[j]) for row in FAMILY} == set(itertools.product(a, b))


@pytest.mark.parametrize("row", FAMILY, ids="-".join)
def test_the_family_steps_as_the_single_process_optimizer(pool: Pool, row: list[str]) -> None:
    """Flags reach each matrix: one layer, one process, the second step from a turned rotation."""
    chosen = [
        x for name, value in zip(SETTINGS, row, strict=True) for x in (f"--aro-{name}", value)
    ]
    small = ["--num-layers", "1", "--global-batch-size", "2", "--train-iters", "3"]
    ranks = pool.run(1, train_recorded, [*ARO, *GATED, *small, *chosen])
    names = check_steps(ranks, chosen, iterations=3)
    assert len(names) == 4 + 2 * ("qkv" in row[-1]) + ("gate-up" in row[-1])


def test_hardship_of_some_matrices_is_theirs_alone(pool: Pool) -> None:
    """Zero, vanishing and enormous gradients of one layer, cut over TP and DP.

    The reference steps each matrix in an optimizer of its own: that weights are its own, to the
    bit, says that no matrix feels what another endures.
    """
    argv = [*ARO, *GATED, "--micro-batch-size", "1", *TP2, *DISTRIBUTED]
    ranks = pool.run(4, train_recorded, argv, hardship=True)
    check_steps(ranks, [])
    weights = full_weights([rank["result"] for rank in ranks])
    assert all(weight.isfinite().all() for weight in weights.values())


@pytest.mark.parametrize("flags", [[], DISTRIBUTED], ids=["replicated", "distributed"])
def test_data_parallel_ranks_agree_with_one_process(pool: Pool, flags: list[str]) -> None:
    """Losses are one process's but for the order of gradient sums; replicas are bit-identical.

    That order is 1e-7 of a gradient. Weights differ by more, where a momentum is nearly zero in a
    direction and rounding decides what is normalised there; the loss does not see it (2e-5 here).
    """
    argv = [*ARO, *GATED, "--micro-batch-size", "1"]
    one, results = pool.train(1, argv)[0], pool.train(4, [*argv, *flags])
    assert results[0].losses == pytest.approx(one.losses, abs=1e-4)
    assert all(same(other.weights, results[0].weights) for other in results)


def test_the_distributed_optimizer_changes_nothing(pool: Pool) -> None:
    """Nothing is reassociated between it and replicated parameters at DP 2: the same bits.

    One matrix at a time, since the two have other owners.
    """
    argv = [*ARO, *GATED]
    replicated, distributed = (
        pool.run(2, train_recorded, [*argv, *flags])[0]["result"] for flags in ([], DISTRIBUTED)
    )
    assert same(replicated.weights, distributed.weights)


def test_instances_of_the_distributed_optimizer_stay_alike(pool: Pool) -> None:
    """Ranks 0 and 2, and 1 and 3, hold the same slices: nothing keeps them alike but equal sums."""
    results = pool.train(4, [*ARO, *GATED, *INSTANCES], inspect=optimizer_state)
    assert all(same(other.weights, results[0].weights) for other in results)
    for one, other in (results[0], results[2]), (results[1], results[3]):
        assert one.grad_norms == other.grad_norms
        assert same(one.inspected, other.inspected)
    assert not same(results[0].inspected, results[1].inspected)


def test_two_runs_are_bit_identical(pool: Pool, one_process: TrainResult) -> None:
    """Same seed, same bits: losses, weights, momenta and rotations."""
    again = pool.train(1, [*ARO, *GATED], inspect=optimizer_state)[0]
    assert again.losses == one_process.losses
    assert same(again.weights, one_process.weights)
    assert same(again.inspected, one_process.inspected)


@pytest.mark.parametrize("flags", [[], DISTRIBUTED], ids=["replicated", "distributed"])
def test_bf16_follows_float32(pool: Pool, one_process: TrainResult, flags: list[str]) -> None:
    """bf16 with float32 main parameters: losses within bf16's 2^-8 of float32's."""
    result = pool.train(2, [*ARO, *GATED, "--bf16", *flags])[0]
    assert result.losses == pytest.approx(one_process.losses, rel=2**-8)
    assert all(w.dtype == torch.bfloat16 for w in result.weights.values())


def test_the_table_shows_all_stages_and_experts(pool: Pool) -> None:
    """Rank 0 names parameters that it does not hold: those of the last stage, of other experts.

    Exceptions by name may fit on one rank alone.
    """
    argv = [*ARO, *MOE, *PP2, *EP2, "--micro-batch-size", "1", "--train-iters", "1"]
    argv += ["--aro-override", "decoder.layers.1.*router*=left,*_experts.3.linear_fc2*=right"]
    rank = pool.train(4, [*argv, "--lr-warmup-iters", "0"])[0]
    table = rank.stdout.partition("the optimizer of each trainable parameter")[2]
    lines = [line.split() for line in table.splitlines() if "  A" in line]
    rows = {(name, by, side): count for name, count, _, by, side, *_ in lines}
    assert rows["decoder.final_layernorm.weight", "AdamW", "-"] == "1"
    fc2 = "decoder.layers.*.mlp.experts.local_experts.*.linear_fc2.weight"
    assert (rows[fc2, "ARO", "rows"], rows[fc2, "ARO", "columns"]) == ("6", "2")
    router = "decoder.layers.*.mlp.router.weight"
    assert (rows[router, "ARO", "columns"], rows[router, "ARO", "rows"]) == ("1", "1")


def test_an_exception_that_fits_nothing_is_refused(pool: Pool) -> None:
    """On all stages alike, though one pattern fits on the other one alone."""
    argv = [*ARO, *DEEP, *PP2, "--aro-override", "*.layers.3.*=left,*.layers.4.*=left"]
    for rank in pool.train(2, argv):
        assert rank.exit_status == 2
    assert "--aro-override *.layers.4.*=left fits no matrix of ARO in this model" in rank.stderr


@pytest.mark.parametrize(
    ("model", "pattern", "named"),
    [
        ([*DEEP, *PP2], "decoder.layers.3.*linear_proj*", "self_attention.linear_proj"),
        ([*MOE, *EP2], "*local_experts.3.linear_fc2*", "mlp.experts.linear_fc2"),
        ([*DEEP, "--aro-mode", "full-model"], "*.0.input_layernorm.weight", "input_layernorm"),
    ],
    ids=["a layer", "an expert", "a norm"],
)
def test_adamw_gets_a_parameter_in_all_layers_or_none(
    pool: Pool, model: list[str], pattern: str, named: str
) -> None:
    """Checkpoints cannot hold the second moments of some: refused at the start, not at a save."""
    argv = [*ARO, *model, "--micro-batch-size", "1", "--aro-override", f"{pattern}=adamw"]
    for rank in pool.train(2, argv):
        assert rank.exit_status == 2 and not rank.losses
    assert f"--aro-override sends {named} to AdamW in some layers or experts" in rank.stderr


@pytest.mark.parametrize("flags", [[], DISTRIBUTED], ids=["replicated", "distributed"])
def test_experts_train_without_expert_parallelism(pool: Pool, flags: list[str]) -> None:
    """Routers and each expert's gate, up and down projections are ARO's; DP 2 is one process."""
    argv = [*ARO, *MOE]
    alone = pool.train(1, argv, inspect=optimizer_state)[0]
    shared = pool.train(2, [*argv, *flags])[0]
    rotations = [name for name in alone.inspected if ".rotation." in name]
    assert sum("local_experts" in name for name in rotations) == 2 * 4 * 3
    assert sum("router" in name for name in alone.inspected if ".rotation." in name) == 2
    assert alone.losses[-1] < alone.losses[0]
    assert shared.losses == pytest.approx(alone.losses, abs=1e-4)


def test_adamw_keeps_the_rest(pool: Pool, one_process: TrainResult) -> None:
    """Vocabulary and vectors have Adam's two moments; nothing is ARO's too."""
    state = one_process.inspected
    assert sum(key.startswith("0.") for key in state) == 2 * 4  # exp_avg of 4 weights per layer
    # per layer two norms (weight and bias); final norm; word and position embeddings
    assert sum(key.endswith("exp_avg_sq") for key in state) == 2 * 4 + 2 + 2
    table = one_process.stdout.partition("the optimizer of each trainable parameter")[2]
    assert "linear_qkv.weight" in table and "q, k, v" in table
    (line,) = (x for x in table.splitlines() if "word_embeddings" in x)
    assert "AdamW" in line


def test_a_model_without_matrices_is_refused(pool: Pool) -> None:
    """Nothing to rotate is no reason for a traceback."""
    (rank,) = pool.run_ranks(1, train_without_matrices, ARO)
    assert rank.value == 2 and "finds no trainable matrix" in rank.stderr


@pytest.mark.parametrize("flags", [[], DISTRIBUTED], ids=["replicated", "distributed"])
def test_decay_and_clipping_are_as_for_adam(pool: Pool, flags: list[str]) -> None:
    """Vectors are not decayed, matrices are; the norm that clips is that of all gradients.

    The norm is adam's at the first step, where weights are the same, to a float32 rounding.
    """
    argv = [*TINY, *GATED, *flags, "--clip-grad", "0.1"]
    aro = pool.train(2, [*argv, "--optimizer", "aro"], inspect=decay_by_dimension)
    adam = pool.train(2, [*argv, "--optimizer", "adam"])
    assert aro[0].grad_norms[0] == pytest.approx(adam[0].grad_norms[0], rel=1e-6)
    decays = [
        (dim, decay) for rank in aro for dim, found in rank.inspected.items() for decay in found
    ]
    assert set(decays) == {(2, 1.0), (1, 0.0)}  # a rank may hold slices of one kind only


def test_a_parameter_without_optimizer_is_fatal(pool: Pool) -> None:
    """The start-up check counts parameters; a fault in the routing does not train."""
    (rank,) = pool.run_ranks(1, train_with_lost_parameter, ARO)
    assert rank.value != 0
    assert "1 trainable parameters have no optimizer" in rank.stderr


@pytest.mark.parametrize(
    ("poisoned", "flags"),
    [
        ([0], []),
        ([3], [*TP2, *DISTRIBUTED]),
        ([0, 1], ["--bf16"]),
        ([0], DETACHED),
        ([3], [*TP2, *DISTRIBUTED, "--aro-sharing", "chain"]),
        ([1], [*DISTRIBUTED, "--aro-mode", "full-model"]),
    ],
    ids=[
        *("one process", "one shard of one rank", "replicated bf16", "detached MTP"),
        *("one shard of shared rotations", "full-model"),
    ],
)
def test_a_nan_gradient_changes_nothing_on_any_rank(
    pool: Pool, poisoned: list[int], flags: list[str]
) -> None:
    """Weights, momenta, moments and rotations stay bit for bit; the step counts as skipped."""
    argv = [*ARO, *flags, "--no-check-for-nan-in-loss-and-grad"]
    ranks = pool.run_ranks(max(poisoned) + 1, train_with_poisoned_gradient, argv, 2, poisoned)
    for rank in ranks:
        assert rank.error == "" and rank.value["exit_status"] == 0, rank.stderr
        assert rank.value["returned"] == [True, True, False, True, True]
        assert same(rank.value["before"], rank.value["after"])
        assert all(w.isfinite().all() for w in rank.value["weights"].values())
    assert "number of skipped iterations:   1" in "".join(rank.stdout for rank in ranks)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_registering_changes_no_other_optimizer(pool: Pool, optimizer: str) -> None:
    """The same bits with and without megatron_aro.register()."""
    argv = [*TINY, "--optimizer", optimizer]
    with_ = pool.train(1, argv)[0]
    (without,) = pool.run(1, "aro_runs:train_unregistered", argv)
    assert same(with_.weights, without)
