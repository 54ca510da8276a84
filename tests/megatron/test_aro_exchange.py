"""The exchange in real runs: how many collectives, how many bytes, and plans that disagree."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from aro_runs import ARO, DISTRIBUTED, GATED, MOE
from pool import Pool
from runs import TINY

TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
CP2 = ["--context-parallel-size", "2"]
EP2 = ["--expert-model-parallel-size", "2"]


def train_counting(argv: list[str]) -> list[Counter]:
    """Train and count, for each step of ARO, collectives by name and elements sent by hop."""
    import runs
    import torch.distributed as dist

    from megatron_aro.runtime.exchange import Exchange
    from megatron_aro.runtime.matrix_optimizer import MatrixOptimizer

    steps: list[Counter] = []
    inside = [False]
    step, exchange = MatrixOptimizer.step, Exchange._all_to_all

    def counted(name: str) -> None:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if inside[0]:
                steps[-1][name] += 1
            return original(*args, **kwargs)

        setattr(dist, name, call)

    for name in ("all_to_all_single", "all_gather_into_tensor", "all_reduce", "broadcast"):
        counted(name)

    def step_counted(self: MatrixOptimizer, closure: None = None) -> None:
        steps.append(Counter())
        inside[0] = True
        step(self, closure)
        inside[0] = False

    def elements_counted(self: Exchange, group: Any, send: list, receive: list) -> None:
        exchange(self, group, send, receive)  # which empties what the rank keeps
        hop = "tp" if group is self._tp_group else "dp"
        steps[-1][hop] += sum(x.numel() for to in send for x in to)

    MatrixOptimizer.step = step_counted  # type: ignore[method-assign]
    Exchange._all_to_all = elements_counted  # type: ignore[method-assign]
    assert runs.train(argv).exit_status == 0
    return steps


@pytest.mark.parametrize(
    "flags",
    [[*GATED, *TP2, *DISTRIBUTED], [*GATED, *TP2], [*GATED, *DISTRIBUTED], [*GATED]],
    ids=["TP 2 x DP 2", "TP 2 x DP 2 replicated", "DP 4", "DP 4 replicated"],
)
def test_the_number_of_collectives_does_not_depend_on_the_model(
    pool: Pool, flags: list[str]
) -> None:
    """One a hop and direction at most, for two layers as for four, the same on every rank.

    Without a matrix that a range boundary cuts there is none over data-parallel ranks.
    """
    for layers in ("2", "4"):
        argv = [*ARO, *flags, "--micro-batch-size", "1", "--num-layers", layers]
        ranks = pool.run(4, train_counting, argv)
        counts = [
            {k: v for k, v in step.items() if k not in ("dp", "tp")}
            for steps in ranks
            for step in steps
        ]
        assert all(count == counts[0] for count in counts)
        cut = any(step["dp"] for steps in ranks for step in steps)
        hops = (TP2[0] in flags) + cut
        expected = {"all_to_all_single": 2 * hops} if hops else {}
        if "--use-distributed-optimizer" not in flags:
            expected["all_gather_into_tensor"] = 1
        assert counts[0] == expected


@pytest.mark.parametrize(
    ("sizes", "flags"),
    [
        (["--tp", "2"], [*GATED, *TP2, *DISTRIBUTED]),
        ([], [*GATED, *DISTRIBUTED]),
        (["--cp", "2", "--tp", "2"], [*GATED, *CP2, *TP2, *DISTRIBUTED]),
        (["--ep", "2"], [*MOE, *EP2, *DISTRIBUTED]),
    ],
    ids=["TP 2 x DP 2", "DP 4", "CP 2 x TP 2", "EP 2 x DP 2"],
)
def test_bytes_are_those_that_the_plan_command_predicts(
    pool: Pool, sizes: list[str], flags: list[str]
) -> None:
    """Each rank sends over DP and over TP what `megatron-aro plan` says, float32, both ways."""
    model = [flag for flag in (*TINY, *flags) if flag != "--sequence-parallel"]
    for unwanted in (TP2[0], CP2[0], EP2[0]):
        if unwanted in model:
            at = model.index(unwanted)
            del model[at : at + 2]
    model = [flag for flag in model if flag not in DISTRIBUTED]
    command = [sys.executable, "-m", "megatron_aro.cli.main", "plan", "--world-size", "4", *sizes]
    said = subprocess.run([*command, "--json", "--", *model], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr[-2000:]
    predicted = json.loads(said.stdout[said.stdout.index("{") :])

    ranks = pool.run(4, train_counting, [*ARO, *flags, "--micro-batch-size", "1"])
    optimizers = len(ranks[0]) // 5  # dense, and experts
    for hop in ("dp", "tp"):
        sent = [4 * sum(step[hop] for step in steps[:optimizers]) for steps in ranks]
        wanted = predicted["per_rank"][f"{hop}_sent"]
        assert (min(sent), sum(sent) / 4, max(sent)) == (
            wanted["min"],
            wanted["mean"],
            wanted["max"],
        )


@pytest.mark.parametrize(
    "flags",
    [[*MOE, *TP2, *DISTRIBUTED], [*GATED], [*MOE, *EP2]],
    ids=["TP 2 x DP 2", "DP 4 replicated", "EP 2 x DP 2 replicated"],
)
def test_a_bf16_exchange_keeps_replicas_alike(pool: Pool, flags: list[str]) -> None:
    """Losses are float32's to bf16's 2^-8, and every copy of a weight has the same bits.

    Also where the owner's own copy has not travelled, over data and over tensor parallel ranks.
    """
    argv = [*ARO, *flags, "--micro-batch-size", "1"]
    wide = pool.train(4, argv)
    narrow = pool.train(4, [*argv, "--aro-exchange-dtype", "bf16"])
    assert narrow[0].losses == pytest.approx(wide[0].losses, rel=2**-8)
    assert narrow[0].losses != wide[0].losses
    copies: dict[tuple, list[torch.Tensor]] = {}
    for rank in narrow:
        for name, shard in rank.shards.items():
            where = shard.rank if shard.dim is not None else None
            copies.setdefault((name, where), []).append(rank.weights[name])
    assert all(torch.equal(first, other) for first, *rest in copies.values() for other in rest)


def make_exchange(matching: bool) -> str:
    import torch.distributed as dist

    from megatron_aro.runtime.exchange import Exchange
    from megatron_aro.sharding.geometry import Layout, parts
    from megatron_aro.sharding.logical import LogicalMatrix
    from megatron_aro.sharding.plan import Batch, Plan, Sharded

    matrix = LogicalMatrix("w", "w", ((0, 2),), 3, False)
    sharded = Sharded(matrix, parts(matrix, Layout(2, 1, None)), True, ((0, 6), (0, 6)))
    owner = 0 if matching else dist.get_rank()
    batch = Batch((0, owner), 0, matrix.stored, (0,))
    plan = Plan(1, 2, (sharded,), ((0, owner),), (batch,), ((0.0, 0.0),))
    try:
        Exchange(plan, None, dist.group.WORLD, torch.device("cpu"))
    except RuntimeError as error:
        return str(error)
    return ""


def test_plans_that_disagree_stop_every_rank(pool: Pool) -> None:
    """Before the first collective that would hang or mix up matrices."""
    assert pool.run(2, make_exchange, True) == ["", ""]
    for message in pool.run(2, make_exchange, False):
        assert "different plans" in message
