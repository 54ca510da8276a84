"""The monitor in real Megatron: through its writers, the same in every layout, changing nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from aro_runs import ARO, DISTRIBUTED, GATED, MOE, same, train_with_poisoned_gradient
from monitored import given, train_on_given_gradients, train_read
from pool import Pool

from megatron_aro.config import AROConfig
from megatron_aro.megatron.monitor import group_scalars, sampled, table, time_scalars
from megatron_aro.megatron.names import group_name
from megatron_aro.rotation import (
    MatrixBatch,
    compute_updates,
    initial_rotation,
    new_fallback_counts,
)

TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
PP2 = ["--pipeline-model-parallel-size", "2"]
EP2 = ["--expert-model-parallel-size", "2"]
DEEP = ["--num-layers", "4", *GATED]
INSTANCES = [*DISTRIBUTED, "--num-distributed-optimizer-instances", "2"]
EVERY = ["--aro-monitor-interval", "1"]
SECOND = ["--aro-monitor-interval", "2"]
DENSE = {
    *(f"self_attention.linear_qkv.{part}" for part in "qkv"),
    *("self_attention.linear_proj", "mlp.linear_fc1.gate", "mlp.linear_fc1.up", "mlp.linear_fc2"),
}
# A setting in which some orthonormalisations of tiny matrices fall back: sign(X) may be singular.
STEEP = ["--aro-projection", "sign"]


def without_times(readings: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    return {
        iteration: {k: v for k, v in scalars.items() if not k.startswith("aro-time")}
        for iteration, scalars in readings.items()
    }


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [(1, GATED), (4, [*GATED, *TP2, *DISTRIBUTED]), (4, [*GATED, *TP2]), (4, [*MOE, *EP2])],
    ids=["one process", "TP 2 x DP 2", "TP 2 x DP 2 replicated", "EP 2 x DP 2"],
)
def test_reading_every_step_changes_no_bit(
    pool: Pool, tmp_path: Path, ranks: int, flags: list[str]
) -> None:
    """Losses, weights, momenta, moments, rotations and counts of all ranks, on and off."""
    argv = [*ARO, *flags, "--micro-batch-size", "1"]
    on, off = (pool.run(ranks, train_read, [*argv, *extra], str(tmp_path)) for extra in (EVERY, []))
    for watched, plain in zip(on, off, strict=True):
        assert watched["result"].losses == plain["result"].losses
        assert same(watched["result"].weights, plain["result"].weights)
        assert same(watched["result"].inspected, plain["result"].inspected)
        assert plain["calls"] == {"measured": 0, "gathered": 0}
        assert watched["calls"]["gathered"] == 5
    assert list(on[-1]["readings"]) == [1, 2, 3, 4, 5] and not off[-1]["readings"]


def test_what_is_written_and_when(pool: Pool, tmp_path: Path) -> None:
    """At the interval, by the last rank, the same to both writers and to the log.

    Between readings nothing is measured and no collective runs. W&B drops what comes at an earlier
    step than something before: Megatron's own values of the iteration come later.
    """
    ranks = pool.run_ranks(2, train_read, [*ARO, *GATED, *TP2, *SECOND], str(tmp_path))
    first, last = (rank.value for rank in ranks)
    assert first["readings"] == {} and first["wandb"] == []
    assert list(last["readings"]) == [2, 4]
    assert all(rank["calls"]["gathered"] == 2 for rank in (first, last))
    steps = [step for step, _ in last["wandb"]]
    assert steps == sorted(steps)
    for iteration, scalars in last["readings"].items():
        assert any(scalars.items() <= data.items() for at, data in last["wandb"] if at == iteration)
        groups = {tag.split("/")[1] for tag in scalars if not tag.startswith("aro-time")}
        assert groups == DENSE
        for group in DENSE:
            assert scalars[f"aro-update-rms/{group}"] == pytest.approx(0.2, rel=1e-5)
            assert scalars[f"aro-orthogonality-error/{group}"] < 1e-2
            assert 0 < scalars[f"aro-objective/{group}"] <= 1
            assert scalars[f"aro-objective-ratio/{group}"] == pytest.approx(1.0, abs=0.2)
            assert scalars[f"aro-fallbacks/{group}"] >= 0
        for phase in (
            "momentum",
            "gather",
            "rotate",
            "climb",
            "update",
            "return",
            "weights",
            "step",
        ):
            mean, slowest = (scalars[f"aro-time{x}/{phase}-ms"] for x in ("-mean", ""))
            assert 0 < mean <= slowest
        assert f"> ARO at iteration {iteration}:" in ranks[1].stdout
    assert "mlp.linear_fc2" in ranks[1].stdout and "> ARO at iteration" not in ranks[0].stdout
    # No step lies before the first, so no iteration's time is known at the second.
    assert "aro-time/share" not in last["readings"][2]
    assert 0 < last["readings"][4]["aro-time/share"] < 1


LAYOUTS = {
    "DP 2": (DEEP, 2, DISTRIBUTED),
    "DP 2 replicated": (DEEP, 2, []),
    "DP 4, two instances": (DEEP, 4, INSTANCES),
    "TP 2": (DEEP, 2, TP2),
    "TP 2 x DP 2": (DEEP, 4, [*TP2, *DISTRIBUTED]),
    "PP 2 x TP 2": (DEEP, 4, [*PP2, *TP2, *DISTRIBUTED]),
    "PP 2, virtual": (DEEP, 2, [*PP2, "--num-layers-per-virtual-pipeline-stage", "1"]),
    "PP 3, the last stage without layers": (
        DEEP,
        3,
        ["--pipeline-model-parallel-size", "3", "--pipeline-model-parallel-layout", "Ett|tt|L"],
    ),
    "EP 2 x DP 2": (MOE, 4, [*EP2, *DISTRIBUTED]),
    "EP 2, expert TP 2": (MOE, 4, [*TP2, *EP2, *DISTRIBUTED]),
    "EP 2 x PP 2": (MOE, 4, [*EP2, *PP2]),
}


@pytest.fixture(scope="module")
def one_process(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """Readings by model (its flags, joined)."""
    folder = str(tmp_path_factory.mktemp("one"))
    return {
        " ".join(model): pool.run(
            1, train_on_given_gradients, [*ARO, *STEEP, *model, *SECOND], folder
        )[0]["readings"]
        for model in (DEEP, MOE)
    }


@pytest.mark.parametrize(("model", "ranks", "flags"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_reads_what_one_process_does(
    pool: Pool, tmp_path: Path, one_process: dict[str, dict], model: list, ranks: int, flags: list
) -> None:
    """On the same gradients, to the bit: the same sample, the same momenta, each counted once.

    A rank that owns nothing, or has other groups than the rest, takes part and does not hang.
    """
    argv = [*ARO, *STEEP, *model, *SECOND, "--micro-batch-size", "1", *flags]
    last = pool.run(ranks, train_on_given_gradients, argv, str(tmp_path))[-1]
    expected = without_times(one_process[" ".join(model)])
    assert without_times(last["readings"]) == expected
    assert list(expected) == [2, 4]
    # It has what could differ: fall-backs, ratios, and groups that are not measured whole.
    assert any(v > 0 for k, v in expected[2].items() if k.startswith("aro-fallbacks"))
    experts = {"mlp.experts.linear_fc1.gate", "mlp.router"}
    assert {k.split("/")[1] for k in expected[2]} >= (experts if model is MOE else DENSE)


def test_the_objectives_are_those_of_the_step(pool: Pool, tmp_path: Path) -> None:
    """J of the frame that each step chose, on its momentum, and of an eigen step from the old one.

    In float64, from the same gradients; float32's rounding turns the frames by 1e-5 or less here.
    """
    run = pool.run(1, train_on_given_gradients, [*ARO, *GATED, *EVERY], str(tmp_path))[0]
    names = [f"decoder.layers.{i}.mlp.linear_fc2.weight" for i in range(2)]
    shape = tuple(run["result"].weights[names[0]].shape)
    config, momentum = AROConfig(), torch.zeros(2, *shape, dtype=torch.float64)
    r = initial_rotation(2, *shape, dtype=torch.float64, device="cpu")
    for iteration, scalars in run["readings"].items():
        gradient = torch.stack([given(name, shape, iteration) for name in names]).double()
        momentum = 0.95 * momentum + 0.05 * gradient
        for tag, rotation in ("-eigen", "eigen"), ("", "aro"):
            batch = MatrixBatch(momentum, r.clone(), new_fallback_counts(2, "cpu"))
            (update,) = compute_updates([batch], replace(config, rotation=rotation, qr="qr"))
            norms = momentum.norm(dim=(1, 2)) * update.norm(dim=(1, 2))
            j = (momentum * update).sum((1, 2)) / norms
            read = scalars[f"aro-objective{tag}/mlp.linear_fc2"]
            assert read == pytest.approx(float(j.mean()), rel=1e-5), (iteration, tag)
        r = batch.rotation


def test_a_resumed_run_reads_on(pool: Pool, tmp_path: Path) -> None:
    """Iterations go on, and fall-backs are counted from the checkpoint, not from the beginning."""
    argv = [*ARO, *STEEP, *GATED, *DISTRIBUTED, *SECOND]
    saved = ["--save", str(tmp_path), "--load", str(tmp_path), "--save-interval", "2"]
    whole = pool.run(2, train_read, argv, str(tmp_path))[-1]["readings"]
    begun = pool.run(2, train_read, [*argv, *saved, "--exit-interval", "2"], str(tmp_path))
    resumed = pool.run(2, train_read, [*argv, *saved], str(tmp_path))
    assert list(whole) == [2, 4]
    assert any(v > 0 for k, v in whole[2].items() if k.startswith("aro-fallbacks"))
    both = {**begun[-1]["readings"], **resumed[-1]["readings"]}
    assert without_times(both) == without_times(whole)


def test_a_skipped_step_is_not_read(pool: Pool) -> None:
    """A NaN gradient: no reading and no hang, and the next one comes."""
    argv = [*ARO, *EVERY, "--no-check-for-nan-in-loss-and-grad"]
    ranks = pool.run_ranks(2, train_with_poisoned_gradient, argv, 2, [0, 1])
    assert all(rank.error == "" and rank.value["exit_status"] == 0 for rank in ranks)
    read = [i for i in range(1, 6) if f"> ARO at iteration {i}:" in ranks[1].stdout]
    assert read == [1, 2, 4, 5]


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("decoder.layers.3.self_attention.linear_qkv.weight#q", "self_attention.linear_qkv.q"),
        ("decoder.layers.11.mlp.linear_fc2.weight", "mlp.linear_fc2"),
        (
            "decoder.layers.0.mlp.experts.local_experts.7.linear_fc1.weight#gate",
            "mlp.experts.linear_fc1.gate",
        ),
        ("decoder.layers.0.mlp.experts.linear_fc2.weight12", "mlp.experts.linear_fc2"),
        ("decoder.layers.0.mlp.experts.weight1#expert3#up", "mlp.experts.up"),
        ("mtp.layers.0.eh_proj.weight", "mtp.layers.eh_proj"),
    ],
)
def test_groups_are_called_as_users_know_them(name: str, group: str) -> None:
    """No layer, no expert, nothing that TensorBoard replaces."""
    assert group_name(name) == group


def test_the_sample_is_bounded_and_spans_layers_and_experts() -> None:
    """Three of a group, by number and not by spelling."""
    names = [
        f"decoder.layers.{layer}.mlp.experts.linear_fc2.weight{expert}"
        for layer in range(12)
        for expert in range(10)
    ]
    name = "decoder.layers.{}.mlp.experts.linear_fc2.weight{}".format
    assert sampled(names[::-1]) == [name(0, 0), name(6, 0), name(11, 9)]
    assert sampled(names[:1]) == names[:1]


def test_statistics_of_a_group() -> None:
    """Means over what was measured; shares of all orthonormalisations; a zero update shows."""
    nothing = -math.inf
    values = torch.tensor(
        [
            # RMS, orthogonality, J, J eigen, factorizations, extra pass, Householder, kept
            [0.2, 1e-6, 0.6, 0.5, 10, 1, 2, 1],
            [0.0, nothing, nothing, nothing, 10, 0, 0, 0],
            [0.2, 3e-6, 0.4, 0.5, 20, 0, 1, 0],
        ],
        dtype=torch.float64,
    )
    names = [f"decoder.layers.{i}.mlp.linear_fc2.weight" for i in range(3)]
    scalars = group_scalars(names, values)
    expected = {
        "update-rms": 0.4 / 3,
        "update-rms-min": 0.0,
        "orthogonality-error": 3e-6,
        "objective": 0.5,
        "objective-eigen": 0.5,
        "objective-ratio": 1.0,
        "objective-ratio-min": 0.8,
        "fallbacks": 4 / 40,
        "householder": 3 / 40,
        "kept": 1 / 40,
    }
    tagged = {f"aro-{k}/mlp.linear_fc2": v for k, v in expected.items()}
    assert scalars == pytest.approx(tagged)


def test_statistics_of_times() -> None:
    """The slowest rank and the mean; what no rank knows is not written, and the log says so."""
    nothing = -math.inf
    ranks = torch.full((2, 10), nothing, dtype=torch.float64)
    ranks[:, 2], ranks[:, 7] = torch.tensor([4.0, 6.0]), torch.tensor([10.0, 14.0])
    scalars = time_scalars(ranks)
    assert scalars == {
        "aro-time/rotate-ms": 6.0,
        "aro-time-mean/rotate-ms": 5.0,
        "aro-time/step-ms": 14.0,
        "aro-time-mean/step-ms": 12.0,
    }
    assert table(7, scalars)[-1] == "    step of the slowest rank 14.00 ms: rotate 6.00"
    ranks[:, 9] = 0.25
    assert "14.00 ms, 25.0% of the iteration: " in table(7, time_scalars(ranks))[-1]
