"""Shared rotations in real Megatron: every layout gives what one process gives on whole stacks."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from aro_runs import ARO, DISTRIBUTED, GATED, MOE, check_resumes, same, train_recorded, whole
from logical_state import logical, train_watched
from monitored import train_on_given_gradients, train_read
from pool import Pool
from shared_runs import train_in_double
from stepped import HIDDEN, first_and_last, given
from test_aro_exchange import train_counting

from megatron_aro.config import AROConfig
from megatron_aro.rotation import (
    MatrixBatch,
    advance_momentum,
    apply_updates,
    compute_updates,
    initial_rotation,
    new_fallback_counts,
)

CHAIN, GLOBAL = ["--aro-sharing", "chain"], ["--aro-sharing", "global"]
TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
PP2 = ["--pipeline-model-parallel-size", "2"]
PP3 = ["--pipeline-model-parallel-size", "3", "--pipeline-model-parallel-layout", "Et|t|L"]
VIRTUAL = [*PP2, "--num-layers-per-virtual-pipeline-stage", "1"]
CP2 = ["--context-parallel-size", "2"]
EP2 = ["--expert-model-parallel-size", "2"]
INSTANCES = [*DISTRIBUTED, "--num-distributed-optimizer-instances", "2"]
DEEP = ["--num-layers", "4", *GATED]
SHARED = [*MOE, "--moe-shared-expert-intermediate-size", "16", "--moe-shared-expert-gate"]
GATED_ATTENTION = [*GATED, "--attention-output-gate"]
MTP = ["--mtp-num-layers", "1", "--position-embedding-type", "rope"]
RMSNORM = ["--normalization", "RMSNorm"]
ADAM = ["--aro-projection", "adam"]
LEFT = ["--aro-orientation", "left"]
READS = ("linear_qkv", "linear_fc1", "router", "gate_weight")

LAYOUTS = {
    "chain, one process": (1, GATED, CHAIN),
    "chain, DP 3": (3, GATED, [*CHAIN, *DISTRIBUTED, "--global-batch-size", "6"]),
    "chain, TP 2 x DP 2": (4, GATED, [*CHAIN, *TP2, *DISTRIBUTED]),
    "chain, PP 2 x DP 2": (4, GATED, [*CHAIN, *PP2, *DISTRIBUTED]),
    "chain, PP 2, virtual": (2, DEEP, [*CHAIN, *VIRTUAL]),
    "chain, EP 2 x DP 2": (4, SHARED, [*CHAIN, *EP2, *DISTRIBUTED]),
    "chain, gated attention, DP 2": (2, GATED_ATTENTION, [*CHAIN, *DISTRIBUTED]),
    "chain, left, TP 2, whole QKV": (2, GATED, [*CHAIN, *LEFT, *TP2, "--aro-split", "gate-up"]),
    "chain, PP 3, a stage without layers": (3, GATED, [*CHAIN, *PP3]),
    "global, one process": (1, GATED, [*GLOBAL, "--aro-rotation", "eigen"]),
    "global, TP 2 x DP 2 replicated": (4, GATED, [*GLOBAL, *TP2]),
    "global, PP 2 x TP 2": (4, GATED, [*GLOBAL, *PP2, *TP2, *DISTRIBUTED]),
    "global, adam, EP 2": (2, MOE, [*GLOBAL, *EP2, *ADAM]),
    "chain, rownorm, EP 2, expert TP 2": (
        4,
        MOE,
        [*CHAIN, *TP2, *EP2, *DISTRIBUTED, "--aro-projection", "rownorm"],
    ),
    "chain, polar, CP 2 replicated": (2, GATED, [*CHAIN, *CP2, "--aro-rotation", "polar"]),
    "chain, multi-token prediction, CP 2 x PP 2": (
        4,
        [*GATED, *MTP],
        [*CHAIN, *CP2, *PP2, *DISTRIBUTED, "--aro-qr", "qr"],
    ),
}


def turned(name: str, flags: list[str]) -> bool:
    return LEFT[1] not in flags and any(kind in name for kind in READS)


def stack_of(name: str, flags: list[str]) -> str:
    """Whose rotation a matrix shares, by the words of the specification, layers from 1."""
    reads = any(kind in name for kind in READS)
    if reads and LEFT[1] in flags:
        return name  # its rows are no residual dimension
    if GLOBAL[1] in flags:
        return "all"
    layer = int(re.findall(r"layers\.(\d+)\.", name)[0]) + 1
    if name.startswith("mtp"):  # what joins two streams begins its chain
        return f"mtp {layer}, group {int(not reads and 'eh_proj' not in name)}"
    return f"group {layer - 1 if reads else layer}"


class Reference:
    """One process that steps whole stacks, in float64."""

    def __init__(self, first: dict[str, torch.Tensor], flags: list[str]):
        chosen = given(flags, "projection", "rotation", "qr")
        self.aro, self.flags = AROConfig(**chosen), flags
        self.weights = {name: matrix.double() for name, matrix in first.items()}
        self.momenta = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.stacks: dict[str, list[str]] = {}
        for name in first:
            self.stacks.setdefault(stack_of(name, flags), []).append(name)
        self.batches = {}
        for stack in self.stacks:
            m_mn = self._stacked(stack)
            m, n = m_mn.shape
            self.batches[stack] = MatrixBatch(
                m_mn[None],
                initial_rotation(1, m, n, dtype=torch.float64, device="cpu"),
                new_fallback_counts(1, "cpu"),
                torch.zeros(1, min(m, n), n).double() if ADAM[1] in flags else None,
            )

    def _stacked(self, stack: str) -> torch.Tensor:
        names = self.stacks[stack]
        return torch.cat([self._turned(name, self.momenta[name]) for name in names], dim=1)

    def _turned(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        return matrix.mT if turned(name, self.flags) else matrix

    def step(self, gradients: dict[str, torch.Tensor], lr: float, weight_decay: float) -> None:
        for name, momentum in self.momenta.items():
            advance_momentum([momentum], [gradients[name].double()], self.aro.momentum)
        for stack, batch in self.batches.items():
            batch.momentum = self._stacked(stack)[None]
            ((update,),) = compute_updates([batch], self.aro)
            sizes = [self._turned(name, self.weights[name]).shape[1] for name in self.stacks[stack]]
            for name, part in zip(self.stacks[stack], update.split(sizes, dim=1), strict=True):
                own = 0.2 * part / part.square().mean().sqrt().clamp(min=1e-30)
                apply_updates([self.weights[name]], [self._turned(name, own)], lr, weight_decay)


def check_steps(ranks: list[dict[str, Any]], flags: list[str]) -> None:
    """From Megatron's own gradients the weights are those of a float64 step on whole stacks.

    Members to 1e-6, where a step moves weights by 2e-3: float32 and another order of sums leave
    3e-8. What shares with nobody (under left, tall matrices) to 1e-4.
    """
    optimizers, first, last = first_and_last(ranks, flags)
    reference = Reference(first, flags)
    for step in zip(*(optimizer["steps"] for optimizer in optimizers), strict=True):
        gradients = whole(optimizers, [pieces for pieces, _, _ in step])
        reference.step(gradients, *step[0][1:])
    for names in reference.stacks.values():
        for name in names:
            assert (last[name] - first[name]).abs().max() > 5e-3
            error = (last[name].double() - reference.weights[name]).abs().max()
            assert error < (1e-6 if len(names) > 1 else 1e-4), name
    stacks = sum(len(names) > 1 for names in reference.stacks.values())
    assert stacks == 1 if GLOBAL[1] in flags else stacks > 1


@pytest.mark.parametrize(("world_size", "model", "flags"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_steps_whole_stacks(
    pool: Pool, world_size: int, model: list[str], flags: list[str]
) -> None:
    """As `check_steps` says; one rotation a group on one rank, and one orthonormalisation a step.

    RMSNorm: what LayerNorm gives has no part along (1, ..., 1), a row of nothing but rounding,
    which Sinkhorn makes as large as the others.
    """
    argv = [*ARO, *model, *RMSNORM, "--micro-batch-size", "1", *flags]
    ranks = pool.run(world_size, train_recorded, argv, states=True)
    check_steps(ranks, flags)
    kept = [name for rank in ranks for name in rank["state"] if "rotation." in name]
    layers = 4 if model is DEEP else 2
    groups = {"global"} if GLOBAL[1] in flags else {f"chain.{i}" for i in range(layers + 1)}
    if MTP[0] in model:
        groups |= {"mtp.0.chain.0", "mtp.0.chain.1"}
    if LEFT[1] in flags:  # nothing that reads is a member
        groups -= {"chain.0"}
    shared = [name for name in kept if ".layers." not in name]
    assert sorted(shared) == sorted(f"aro0.rotation.{group}" for group in groups)
    assert LEFT[1] in flags or kept == shared
    counts = [
        rank["state"][name.replace("rotation", "fallbacks")].tolist()
        for rank in ranks
        for name in rank["state"]
        if name in shared
    ]
    assert counts == [[5, 0, 0, 0]] * len(groups)


def test_signs_and_a_single_pass_are_those_of_whole_stacks(pool: Pool) -> None:
    """As `check_steps` says, where the run's step is in float64 as the reference's is.

    Of an entry that is almost zero rounding decides the sign, and a single pass of Cholesky QR
    squares the condition of A: in float32 either differs by percents of a step.
    """
    flags = [*CHAIN, "--aro-projection", "sign", "--aro-qr", "scqr"]
    argv = [*ARO, *GATED, *RMSNORM, "--micro-batch-size", "1", *flags]
    check_steps(pool.run(1, train_in_double, argv), flags)


@pytest.mark.slow
def test_eight_ranks_step_whole_stacks() -> None:
    """TP 2 x DP 2 x PP 2, a chain and one stack for all."""
    pool = Pool(size=8)
    for sharing in (CHAIN, GLOBAL):
        flags = [*sharing, *TP2, *PP2, *DISTRIBUTED]
        argv = [*ARO, *GATED, *RMSNORM, "--micro-batch-size", "1", *flags]
        check_steps(pool.run(8, train_recorded, argv), flags)
    pool.close()


def test_the_number_of_collectives_does_not_depend_on_the_model(pool: Pool) -> None:
    """13 small sums and a maximum, shares to the groups' owners and rotations back, on each rank.

    Beside the exchange's own: one there and back over TP; an all-gather of replicas' updates.
    Dense matrices and experts, two optimizers, meet in the same.
    """
    for model, flags, own in (
        (GATED, TP2, Counter(all_to_all_single=2)),
        (MOE, EP2, Counter(all_gather_into_tensor=1)),
    ):
        for layers in ("2", "4"):
            argv = [*ARO, *model, *flags, *CHAIN, "--num-layers", layers]
            for counted in pool.run(2, train_counting, argv):
                of_step = [Counter() for _ in range(5)]
                for i, counts in enumerate(counted):
                    calls = {k: n for k, n in counts.items() if k not in ("dp", "tp")}
                    of_step[i * 5 // len(counted)].update(calls)
                assert of_step == [own + Counter(all_reduce=14, all_to_all_single=2)] * 5


RUN = [*ARO, "--train-iters", "6", "--attention-dropout", "0.1", "--hidden-dropout", "0.1"]
RESUMED = {
    "chain, PP 2 x DP 2": (4, [*GATED, *CHAIN, *PP2, *DISTRIBUTED]),
    "global, adam, TP 2, torch": (2, [*GATED, *GLOBAL, *ADAM, *TP2, "--ckpt-format", "torch"]),
    "chain, EP 2, reshardable": (
        2,
        [*MOE, *CHAIN, *EP2, *DISTRIBUTED, "--dist-ckpt-optim-fully-reshardable"],
    ),
}


@pytest.mark.parametrize(("world_size", "flags"), RESUMED.values(), ids=RESUMED.keys())
def test_a_resumed_run_is_bit_identical(
    pool: Pool, tmp_path: Path, world_size: int, flags: list[str]
) -> None:
    """Weights, momenta, moments, shared rotations and counts after 3 + 3 steps.

    The rank that keeps a rotation reads it; those with members hear of it in the first step.
    """
    check_resumes(pool, tmp_path, world_size, [*RUN, *flags])


def test_another_layout_goes_on_and_other_sharing_is_refused(pool: Pool, tmp_path: Path) -> None:
    """PP 2 to DP 2 and one process: the state bit for bit, losses alike, and one sentence else."""
    argv = [*ARO, *GATED, *RMSNORM, "--micro-batch-size", "1", "--train-iters", "6"]
    save = ["--save", str(tmp_path), "--save-interval", "3", "--dist-ckpt-optim-fully-reshardable"]
    straight = pool.run(2, train_watched, [*argv, *CHAIN, *PP2, *save], iteration=3)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    saved = logical([rank.inspected for rank in straight])
    assert {name for name in saved if name.startswith("rotation.")} == {
        f"rotation.chain.{i}" for i in range(3)
    }
    load = ["--load", str(tmp_path)]
    losses = next(rank.losses for rank in straight if rank.losses)
    for ranks, flags in ((2, DISTRIBUTED), (1, [])):
        resumed = pool.run(ranks, train_watched, [*argv, *CHAIN, *flags, *load])
        assert same(logical([rank.inspected for rank in resumed]), saved)
        assert resumed[0].losses == pytest.approx(losses[3:], abs=1e-4)
    refused = pool.train(1, [*argv, *GLOBAL, *load])[0]
    assert refused.exit_status == 2
    assert "--aro-sharing from chain to global: go back" in refused.stderr
    for ranks, sharing, start in ((2, GLOBAL, "qr"), (1, [], "identity")):
        flags = [*sharing, "--aro-init-rotation", start]
        started = pool.run(ranks, train_watched, [*argv, *flags, *load])
        state = logical([rank.inspected for rank in started])
        momenta = [name for name in saved if name.endswith(".exp_avg")]
        assert momenta and all(torch.equal(saved[name], state[name]) for name in momenta)
        if sharing:
            counts, rotation = state["fallbacks.global"], state["rotation.global"]
            assert counts[0] == 3 and not torch.equal(rotation, torch.eye(HIDDEN))
        assert started[0].losses[-1] < started[0].losses[0] < losses[0]


def test_the_second_moment_of_a_stack_goes_to_another_layout(pool: Pool, tmp_path: Path) -> None:
    """PP 2 to TP 2, whose owners have other columns of the stack: bit for bit."""
    argv = [*ARO, *GATED, *RMSNORM, *GLOBAL, *ADAM, "--micro-batch-size", "1"]
    save = ["--save", str(tmp_path), "--save-interval", "3", "--dist-ckpt-optim-fully-reshardable"]
    straight = pool.run(2, train_watched, [*argv, *PP2, *save], iteration=3)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    saved = logical([rank.inspected for rank in straight])
    moments = [saved[name] for name in saved if name.startswith("second_moment.")]
    assert len(moments) == 2 * (3 + 1 + 2 + 1) and all(moment.any() for moment in moments)
    assert {len(moment) for moment in moments} == {HIDDEN}  # rows of the frame they share
    load = ["--load", str(tmp_path)]
    resumed = pool.run(2, train_watched, [*argv, *TP2, *load])
    assert same(logical([rank.inspected for rank in resumed]), saved)
    losses = next(rank.losses for rank in straight if rank.losses)
    assert resumed[0].losses == pytest.approx(losses[3:], abs=1e-4)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([*CHAIN, "--aro-rotation", "rgd"], "climbs on whole matrices"),
        ([*GLOBAL, "--aro-rotation", "none"], "has none to share"),
        ([*CHAIN, *INSTANCES], "--num-distributed-optimizer-instances with --aro-sharing:"),
    ],
)
def test_what_cannot_be_shared_is_refused(pool: Pool, flags: list[str], sentence: str) -> None:
    """One sentence at start-up."""
    refused = pool.train(2, [*ARO, *GATED, *flags])[0]
    assert refused.exit_status == 2 and sentence in refused.stderr


def test_start_up_says_what_is_shared(pool: Pool) -> None:
    """Once, of both stages and of both halves of the experts, and what is left alone by name."""
    turned_proj = ["--aro-override", "*.linear_proj.weight=right"]
    ranks = pool.train(4, [*ARO, *MOE, *PP2, *EP2, *CHAIN, *turned_proj, "--train-iters", "1"])
    said = [line for rank in ranks for line in rank.stdout.splitlines() if "ARO: shared" in line]
    assert said == [
        "> ARO: shared rotations: 3, of 4 to 16 matrices, 32 in all; matrices with a rotation "
        "of their own: decoder.layers.*.self_attention.linear_proj.weight"
    ]


def test_nothing_to_share_is_refused(pool: Pool) -> None:
    """Every matrix turned to its other side: none has the residual dimension as rows."""
    sides = "*.linear_proj.*=right,*.linear_fc2.*=right,*=left"
    (refused,) = pool.train(1, [*ARO, *GATED, *CHAIN, "--aro-override", sides])
    assert refused.exit_status == 2 and "--aro-sharing chain finds no matrix" in refused.stderr


def test_the_monitor_reads_groups(pool: Pool, tmp_path: Path) -> None:
    """Members have RMS 0.2 and a cosine with their momentum; a group's rotation is orthonormal.

    The same from two pipeline stages as from one process, on the same gradients, to the rounding
    of sums in another order.
    """
    argv = [*ARO, *GATED, *CHAIN, "--aro-monitor-interval", "2", "--micro-batch-size", "1"]
    one, four = (
        pool.run(ranks, train_on_given_gradients, [*argv, *flags], str(tmp_path))[-1]["readings"]
        for ranks, flags in ((1, []), (4, [*PP2, *DISTRIBUTED]))
    )
    assert list(one) == list(four) == [2, 4]
    for iteration, scalars in one.items():
        found = {name: value for name, value in scalars.items() if "aro-time" not in name}
        assert found["aro-update-rms/mlp.linear_fc2"] == pytest.approx(0.2)
        assert 0.1 < found["aro-objective/self_attention.linear_proj"] < 1.0
        assert 0.0 < found["aro-orthogonality-error/chain"] < 1e-4
        assert found["aro-fallbacks/chain"] == found["aro-kept/chain"] == 0.0
        assert "aro-fallbacks/mlp.linear_fc2" not in found  # which is its group's
        others = {name: four[iteration].get(name) for name in found}
        assert others == pytest.approx(found, abs=1e-4)


def test_reading_changes_no_bit(pool: Pool, tmp_path: Path) -> None:
    """Losses, weights, momenta, rotations and counts of all ranks, on and off."""
    argv = [*ARO, *GATED, *CHAIN, *TP2]
    on, off = (
        pool.run(2, train_read, [*argv, "--aro-monitor-interval", interval], str(tmp_path))
        for interval in ("1", "0")
    )
    for watched, plain in zip(on, off, strict=True):
        assert watched["result"].losses == plain["result"].losses
        assert same(watched["result"].weights, plain["result"].weights)
        assert same(watched["result"].inspected, plain["result"].inspected)
    assert list(on[-1]["readings"]) == [1, 2, 3, 4, 5]
