"""Work, bytes and memory of a layout: they add up, and they are those of the exchange."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import Grid, grids
from hypothesis import given, settings
from peak import Peak
from test_exchange import Ranks

from megatron_aro.config import AROConfig
from megatron_aro.rotation import (
    MatrixBatch,
    compute_updates,
    initial_rotation,
    new_fallback_counts,
)
from megatron_aro.runtime.columns import Columns
from megatron_aro.runtime.sharing import Sharing
from megatron_aro.sharding.account import Figures, Run, account
from megatron_aro.sharding.buffers import everywhere
from megatron_aro.sharding.column_account import add_columns
from megatron_aro.sharding.columns import ByColumns
from megatron_aro.sharding.cost import (
    H100,
    batch_seconds,
    members_bytes,
    rates_of,
    seconds,
    step_work,
    turn_bytes,
    workspace_bytes,
)
from megatron_aro.sharding.gpt import GPT, Split, even_pipeline
from megatron_aro.sharding.groups import Member, plan_groups
from megatron_aro.sharding.logical import LogicalMatrix
from megatron_aro.sharding.traffic import traffic

QWEN = GPT(
    layers=36,
    hidden=4096,
    ffn=12288,
    heads=20,
    groups=20,
    head=128,
    vocabulary=151936,
    tied=False,
    gated=True,
    qk_norm=True,
)
SIGMA = GPT(
    layers=22,
    hidden=1024,
    ffn=512,
    heads=16,
    groups=16,
    head=64,
    vocabulary=128256,
    tied=False,
    gated=True,
    moe=(True,) * 22,
    experts=46,
    moe_ffn=512,
    shared_ffn=512,
)
LAYOUTS = {
    "one rank": (QWEN, Run(ranks=1)),
    "DP": (QWEN, Run(ranks=48)),
    "TP, PP, DP": (QWEN, Run(ranks=64, stages=4, split=Split(tp=4, etp=4))),
    "replicated": (QWEN, Run(ranks=16, split=Split(tp=2, etp=2), distributed=False)),
    "experts": (SIGMA, Run(ranks=16)),
    "EP": (SIGMA, Run(ranks=16, stages=2, split=Split(tp=2, etp=1, ep=2))),
    "whole": (QWEN, Run(ranks=64, param_layout="whole", bucket_size=64_000_000)),
    "whole, EP": (SIGMA, Run(ranks=16, stages=2, split=Split(ep=2), param_layout="whole")),
    "ranks without work": (QWEN, Run(ranks=4096, split=Split(tp=4, etp=4))),
}


@pytest.mark.parametrize(("gpt", "run"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_all_ranks_together_do_the_work_of_one(gpt: GPT, run: Run) -> None:
    """Each matrix is owned once, whatever the layout; what is sent is received."""
    one = account(gpt, even_pipeline(gpt.layers, 1), Run(ranks=1)).ranks[0]
    result = account(gpt, even_pipeline(gpt.layers, run.stages), run)
    total = {name: sum(getattr(f, name) for f in result.ranks) for name in vars(Figures())}
    # Each TP rank has a copy of the routers' momentum; EP and TP share the rest.
    copies = 22 * 46 * 1024 * 4 * (run.split.tp - 1) if gpt is SIGMA else 0
    if not run.distributed:
        copies += one.momentum * (run.per_stage // run.split.tp - 1)
    assert total["matrices"] == one.matrices == result.matrices
    assert total["flops"] == pytest.approx(one.flops)
    assert total["milliseconds"] >= one.milliseconds * (1 - 1e-9)  # batches cost beside
    assert total["rotation"] == one.rotation
    assert total["momentum"] == one.momentum + copies == 4 * result.aro_parameters + copies
    assert total["dp_sent"] == total["dp_received"]
    assert total["tp_sent"] == total["tp_received"]
    assert len(result.ranks) == run.ranks


@pytest.mark.parametrize(
    "run",
    [
        Run(ranks=8),
        Run(ranks=32, stages=2, split=Split(tp=2), bucket_size=40_000_000),
        Run(ranks=8, split=Split(tp=2), distributed=False),
    ],
    ids=["DP 8", "PP 2, TP 2, buckets", "TP 2, replicated"],
)
@pytest.mark.parametrize("tied", [True, False])
def test_full_model_mode_leaves_nothing_to_adamw(tied: bool, run: Run) -> None:
    """Momentum of every element; each column is stepped once, and each rotation turned once.

    All ranks of a stage keep the rotations of its vocabulary matrices.
    """
    gpt = replace(QWEN, tied=tied, positions=2048, aro=AROConfig(mode="full-model"))
    one = account(gpt, even_pipeline(gpt.layers, 1), Run(ranks=1))
    result = account(gpt, even_pipeline(gpt.layers, run.stages), run)
    total = {name: sum(getattr(f, name) for f in result.ranks) for name in vars(Figures())}
    assert result.aro_parameters == result.parameters and not total["adamw"]
    assert total["momentum"] >= 4 * result.parameters
    assert total["matrices"] == one.matrices == result.matrices == 252 + (2 if tied else 3)
    assert total["flops"] == pytest.approx(one.ranks[0].flops)
    assert total["dp_sent"] == total["dp_received"]
    hybrid = account(replace(gpt, aro=AROConfig()), even_pipeline(gpt.layers, run.stages), run)
    kept = total["rotation"] - sum(f.rotation for f in hybrid.ranks)
    of_stage = {1: [2 if tied else 3], 2: [2, 0 if tied else 1]}[run.stages]
    square, thin = 4 * 4096**2, 4 * 4096 * 2048
    expected = [square * (n - (n > 1)) + thin * (i == 0) for i, n in enumerate(of_stage)]
    assert kept == sum(expected) * run.per_stage
    assert (min(f.summed for f in result.ranks) > 0) == (not tied or run.stages == 1)
    assert hybrid.spread("summed") == (0, 0, 0)


@pytest.mark.parametrize("rows", [700, 96])
def test_workspace_of_columns_is_what_they_take(rows: int) -> None:
    """Against the tensors that a step makes, two at once; at most 5% more, as masks are."""
    torch.manual_seed(0)
    held = everywhere(rows * 96, 1)
    matrices = [ByColumns(name, rows, 96, rows, 1, True, held) for name in "ab"]
    momenta = {name: torch.randn(rows * 96) for name in "ab"}
    gradients = {name: torch.empty(rows * 96) for name in "ab"}
    columns = Columns(
        matrices, [], [], (0, 0), (0, 0), momenta, None, None, torch.device("cpu"), AROConfig()
    )
    with Peak([*momenta.values(), *gradients.values()]) as peak:
        columns.start(momenta)
        columns.finish(momenta, gradients)
    figure = Figures()
    add_columns(matrices, (0, 0), [[figure]], H100["fp32"])
    assert all(update.square().mean().sqrt() == pytest.approx(0.2) for update in gradients.values())
    assert 0.8 * figure.workspace <= peak.bytes <= 1.05 * figure.workspace + 2**14


def test_the_recipes_have_the_known_sizes() -> None:
    """Parameters as the models built on the meta device have; matrices as in the paper's runs."""
    qwen = account(QWEN, even_pipeline(36, 1), Run(ranks=1))
    sigma = account(SIGMA, even_pipeline(22, 1), Run(ranks=1))
    assert (qwen.parameters, qwen.matrices) == (8_190_735_360, 252)
    assert (sigma.parameters, sigma.matrices) == (1_982_366_720, 3_212)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(grids(replicated=False))
def test_bytes_are_those_of_the_exchange(grid: Grid) -> None:
    """Counted from the messages of the exchange that is carried out, both directions."""
    size = 4
    predicted = traffic(grid.plan)
    sent = {p: [0, 0] for p in grid.positions}
    received = {p: [0, 0] for p in grid.positions}

    def count(hop: int, sender: tuple[int, int], to: tuple[int, int], elements: int) -> None:
        sent[sender][hop] += size * elements
        received[to][hop] += size * elements

    over_data, over_tensor, _ = Ranks(grid).gather()
    for hop, messages in enumerate((over_data, over_tensor)):
        for (sender, to), message in messages.items():
            count(hop, sender, to, sum(len(values) for _, _, values in message))
    for s, (owner, home) in zip(grid.sharded, grid.plan.owners, strict=True):
        for t, part in enumerate(s.parts):
            if t != owner:
                count(1, (owner, home), (t, home), part.numel)
            for d in range(grid.plan.dp):
                if d != home:
                    back = sum(length for _, _, length in s.segments(t, d))
                    count(0, (t, home), (t, d), back)
    for t, d in grid.positions:
        moved = predicted[t][d]
        assert [moved.sent("data", size), moved.sent("tensor", size)] == sent[t, d]
        assert [moved.received("data", size), moved.received("tensor", size)] == received[t, d]


@pytest.mark.parametrize(("gpt", "run"), LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize(("sharing", "rotations"), [("global", 1), ("chain", 0)])
def test_rotations_of_groups_are_counted_once(
    gpt: GPT, run: Run, sharing: str, rotations: int
) -> None:
    """One a group and a copy where members are; less work than a rotation a matrix, and all of it.

    Products of all members, and a rotation of the residual dimension a group.
    """
    shared = replace(gpt, aro=AROConfig(sharing=sharing))
    run = replace(run, ranks=min(run.ranks, 256))
    one = account(shared, even_pipeline(gpt.layers, 1), Run(ranks=1))
    result = account(shared, even_pipeline(gpt.layers, run.stages), run)
    alone = account(gpt, even_pipeline(gpt.layers, run.stages), run)
    assert result.rotations == one.rotations == (rotations or gpt.layers + 1)
    assert alone.rotations == alone.matrices == result.matrices
    size = 4 * gpt.hidden**2
    assert one.ranks[0].rotation == one.rotations * size and one.ranks[0].shared_sent == 0
    copies = sum(f.rotation for f in result.ranks) // size - one.rotations
    assert sum(f.shared_sent for f in result.ranks) == 2 * copies * size
    flops = [sum(f.flops for f in x.ranks) for x in (one, result, alone)]
    assert flops[0] == pytest.approx(flops[1])
    h = gpt.hidden
    turns = one.rotations * (8 * h**3 + 2 * h**3 / 3)
    hidden = sum(f.momentum for f in one.ranks) / 4
    assert flops[0] == pytest.approx(8 * hidden * h + turns)
    assert gpt is not QWEN or flops[1] < flops[2]


@pytest.mark.parametrize(("d", "widths"), [(128, [128] * 6), (128, [512] * 3), (160, [40, 30])])
def test_stacks_take_the_memory_that_is_reckoned(d: int, widths: list[int]) -> None:
    """Within 20%: two groups on one rank, members larger and smaller than the rotation."""
    aro = AROConfig(sharing="chain")
    members = [Member(g, f"{g}{i}", (d, n), 0) for g in "ab" for i, n in enumerate(widths)]
    sharing = Sharing(
        plan_groups(members, [0.0], lambda m, k: 1.0), 0, None, torch.device("cpu"), aro
    )
    momenta = {member.name: torch.randn(member.shape) for member in members}
    with Peak([*momenta.values(), *sharing.state().values()]) as peak:
        sharing.rotate(momenta, dict.fromkeys(momenta))
        sharing.updates()
    k = min(d, sum(widths))
    reckoned = max(members_bytes(2 * d * sum(widths), d * sum(widths)), 2 * turn_bytes(d, k))
    assert peak.bytes == pytest.approx(reckoned + 2 * 4 * d * k, rel=0.2)


def test_the_plan_follows_splits_and_exceptions() -> None:
    """Routers sent to AdamW are not ARO's, QKV in one counts once, a side changes the rotation."""
    of = {
        name: account(replace(SIGMA, aro=AROConfig(**aro)), even_pipeline(22, 1), Run(ranks=8))
        for name, aro in {
            "plain": {},
            "routers": {"override": "*.router.weight=adamw"},
            "whole": {"split": "gate-up"},
            "turned": {"override": "*.linear_proj.weight=right,*.experts.*.linear_fc2.*=right"},
        }.items()
    }
    plain = of["plain"]
    assert of["routers"].matrices == plain.matrices - 22
    assert of["routers"].aro_parameters == plain.aro_parameters - 22 * 46 * 1024
    assert of["whole"].matrices == plain.matrices - 2 * 22
    assert of["turned"].matrices == plain.matrices
    # fc2 of an expert turned is 512 x 1024 with a square rotation, which has half the elements.
    kept = [sum(rank.rotation for rank in result.ranks) for result in (plain, of["turned"])]
    assert kept[0] - kept[1] == 4 * 22 * 46 * (1024 * 512 - 512 * 512)
    for override in ("*.router.bias=adamw", "decoder.layers.22.*=left"):
        nothing = replace(SIGMA, aro=AROConfig(override=override))
        with pytest.raises(ValueError, match="--aro-override .* fits no"):
            account(nothing, even_pipeline(22, 1), Run(ranks=8))


def test_boundary_only_gathering_moves_little() -> None:
    """Over DP at most the owned share moves each way; the gradients are many times that."""
    result = account(QWEN, even_pipeline(36, 1), Run(ranks=64, split=Split(tp=4, etp=4)))
    gradients = result.spread("gradients")[2]
    assert result.spread("dp_sent")[2] < 0.01 * gradients
    for figures in result.ranks:
        assert figures.dp_sent <= 2 * figures.momentum
        assert figures.tp_sent <= 2 * figures.momentum


@pytest.mark.parametrize(
    ("gpt", "run"), [LAYOUTS[name] for name in ("whole", "whole, EP", "TP, PP, DP")]
)
def test_whole_parameters_cost_padding_and_move_nothing(gpt: GPT, run: Run) -> None:
    """No byte over DP; padding is the difference of the buffers, and gradients travel with it."""
    whole, packed = (
        account(gpt, even_pipeline(gpt.layers, run.stages), replace(run, param_layout=layout))
        for layout in ("whole", "packed")
    )
    assert whole.spread("dp_sent") == whole.spread("dp_received") == (0, 0, 0)
    assert packed.spread("padding") == (0, 0, 0) and packed.spread("dp_sent")[2] > 0
    for padded, plain in zip(whole.ranks, packed.ranks, strict=True):
        assert padded.padding == padded.buffered - plain.buffered > 0
        assert padded.buffered - padded.padding >= plain.momentum / 4
        assert padded.gradients > plain.gradients


def test_whole_parameters_need_the_distributed_optimizer() -> None:
    """Replicated parameters are whole anyway."""
    with pytest.raises(ValueError, match="distributed optimizer"):
        Run(ranks=2, distributed=False, param_layout="whole")


def test_small_buckets_on_many_ranks_take_seconds() -> None:
    """Each of QWEN's matrices then lies in up to a hundred ranges."""
    began = time.process_time()
    account(QWEN, even_pipeline(36, 1), Run(ranks=4096, bucket_size=40_000_000))
    assert time.process_time() - began < 30


def test_large_runs_take_seconds() -> None:
    """4096 ranks and 101,200 matrices; nothing is quadratic in either."""
    large = GPT(
        layers=100,
        hidden=1024,
        ffn=512,
        heads=16,
        groups=16,
        head=64,
        vocabulary=128256,
        moe=(True,) * 100,
        experts=336,
        moe_ffn=512,
        gated=True,
    )
    default = 4096 * 1_000_000  # Megatron's size of a bucket for so many ranks
    for run in (Run(ranks=4096), Run(ranks=4096, param_layout="whole", bucket_size=default)):
        began = time.process_time()
        result = account(large, even_pipeline(100, 1), run)
        assert result.matrices == 100 * (3 + 1 + 1 + 3 * 336)
        assert time.process_time() - began < 30


@pytest.mark.parametrize("run", [dict(ranks=6, stages=4), dict(ranks=6, split=Split(ep=4))])
def test_ranks_that_do_not_divide_are_refused(run: dict) -> None:
    """Named, not rounded."""
    with pytest.raises(ValueError, match="6 ranks do not divide"):
        Run(**run)


def test_imbalance_is_compared_with_what_no_plan_can_beat() -> None:
    """One of the largest matrices takes its time, however many ranks there are."""
    result = account(QWEN, even_pipeline(36, 1), Run(ranks=4096, split=Split(tp=4, etp=4)))
    largest = 1e3 * batch_seconds(1, 4096, 12288)
    assert result.best_imbalance == pytest.approx(largest / result.spread("milliseconds")[1])
    assert 1 <= result.best_imbalance <= result.imbalance


def test_the_work_of_a_step_is_what_the_specification_says() -> None:
    """About 8 m^2 n + 4.3 m^3 for m <= n (the facts' figure is for one pass); thin if m > n."""
    wide, tall = step_work(64, 256), step_work(256, 64)
    assert wide.products == tall.products == 8 * 64 * 64 * 256
    assert wide.factors == pytest.approx((8 + 2 / 3) * 64**3)
    assert tall.factors == pytest.approx((8 * 4 + 2 / 3) * 64**3)
    assert wide.columns == tall.columns == 64


# Milliseconds of a whole step on an H100, 2026-11-28, device time: matrices, rows, columns.
FLOAT32 = [
    (1, 1536, 1536, 4.41),
    (12, 1536, 1536, 25.9),
    (12, 1536, 512, 5.56),
    (12, 1536, 4096, 42.2),
    (1, 4096, 4096, 25.9),
    (1, 4096, 12288, 50.3),
    (4, 4096, 2560, 58.6),
    (48, 768, 768, 15.5),
    (64, 1024, 512, 13.2),
    (16, 2048, 6144, 118.0),
]
HALVES = Path(__file__).parents[2] / "docs/results/2026-11-28-rates-h200.json"


def test_rates_reproduce_what_was_measured() -> None:
    """Within the third that the fits allow themselves."""
    measured = [("fp32", matrices, ms) for *matrices, ms in FLOAT32]
    for row in json.loads(HALVES.read_text())["rows"]:
        measured.append((row["precision"], row["matrices"], row["ms"]))
    for precision, matrices, ms in measured:
        found = 1e3 * batch_seconds(*matrices, H100[precision])
        assert found == pytest.approx(ms, rel=0.33), (precision, matrices)


@pytest.mark.parametrize(("m", "n"), [(128, 512), (128, 128), (512, 128), (256, 96)])
def test_workspace_is_what_a_step_takes(m: int, n: int) -> None:
    """Against the tensors that `compute_updates` really makes.

    It is the larger of two implementations; the one in halves, which takes a seventh more for
    square matrices, is measured on the GPU (tests/kernels/test_fast.py).
    """
    torch.manual_seed(0)
    k = min(m, n)
    left, right = (torch.linalg.qr(torch.randn(size, k)).Q for size in (m, n))
    momentum = (left * torch.linspace(1.0, 0.3, k) @ right.T)[None].contiguous()
    rotation = initial_rotation(1, m, n, dtype=torch.float32, device="cpu")
    batch = MatrixBatch(momentum, rotation, new_fallback_counts(1, "cpu"))
    with Peak() as peak:
        compute_updates([batch], AROConfig())
    assert batch.fallbacks.tolist() == [[1, 0, 0, 0]]
    assert peak.bytes == pytest.approx(workspace_bytes(m, n) * (6 / 7 if m == n else 1), rel=0.01)


def test_seconds_grow_with_work_and_fall_with_rates() -> None:
    """One more matrix costs no launches; halves are quicker than float32."""
    matrix = LogicalMatrix("w", "w", ((0, 4096),), 12288, False)
    more = batch_seconds(2, 4096, 12288) - batch_seconds(1, 4096, 12288)
    assert seconds(matrix) == pytest.approx(more)
    assert seconds(matrix, H100["fp16"]) < seconds(matrix) < seconds(matrix, H100["fp32"])


def test_steps_without_halves_take_the_time_of_their_products() -> None:
    """What fp16 and fp16x3 mean for settings that `rotation.fast` does not cover."""
    assert rates_of(AROConfig(precision="fp16x3")) == H100["fp16x3"]
    assert rates_of(AROConfig(precision="fp16x3", rotation="eigen")) == H100["fp16x3"]
    assert rates_of(AROConfig(precision="fp16x3", rotation="polar")) == H100["fp32"]
    assert rates_of(AROConfig(precision="fp16", projection="sign")) == H100["tf32"]
    assert rates_of(AROConfig(precision="tf32")) == H100["tf32"]
