"""`--aro-param-layout whole`: no matrix is cut or travels over data parallelism, for padding."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import test_aro_checkpoints as checkpoints
import test_aro_training as layouts
from aro_runs import ARO, DISTRIBUTED, GATED, MOE
from pool import Pool
from runs import TINY
from test_aro_exchange import train_counting

WHOLE = ["--aro-param-layout", "whole"]
VIRTUAL = ["--num-layers-per-virtual-pipeline-stage", "1"]
RESHARDABLE = checkpoints.RESHARDABLE
DEEP, EP2, OVERLAP, PP2, TP2 = (
    getattr(layouts, name) for name in ("DEEP", "EP2", "OVERLAP", "PP2", "TP2")
)
# (ranks, model, flags)
LAYOUTS = {
    "DP 2": (2, GATED, DISTRIBUTED),
    "DP 3": (3, GATED, [*DISTRIBUTED, "--global-batch-size", "6"]),
    "DP 4, overlap, small buckets": (4, DEEP, [*DISTRIBUTED, *OVERLAP]),
    "TP 2 x DP 2": (4, GATED, [*TP2, *DISTRIBUTED]),
    "EP 2 x DP 2": (4, MOE, [*EP2, *DISTRIBUTED]),
    "PP 2, virtual, x DP 2": (4, DEEP, [*PP2, *VIRTUAL, *DISTRIBUTED]),
    "TP 2 x DP 2, overlap, small buckets": (4, DEEP, [*TP2, *DISTRIBUTED, *OVERLAP]),
}


@pytest.mark.parametrize(("world_size", "model", "flags"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_steps_as_the_single_process_optimizer(
    pool: Pool, world_size: int, model: list[str], flags: list[str]
) -> None:
    """To the bit, as with Megatron's own layout."""
    layouts.test_every_layout_steps_as_the_single_process_optimizer(
        pool, world_size, model, [*flags, *WHOLE]
    )


CUT = {name: case for name, case in LAYOUTS.items() if name not in ("DP 2", "TP 2 x DP 2")}


@pytest.mark.parametrize(("world_size", "model", "flags"), CUT.values(), ids=CUT.keys())
def test_nothing_travels_over_data_parallelism(
    pool: Pool, world_size: int, model: list[str], flags: list[str]
) -> None:
    """No element, in no collective; over tensor parallelism there is one a direction as ever."""
    argv = [*ARO, *model, *flags, "--micro-batch-size", "1"]
    expected = {"all_to_all_single": 2} if TP2[0] in flags else {}
    for steps in pool.run(world_size, train_counting, [*argv, *WHOLE]):
        for step in steps:
            assert step["dp"] == 0
            counts = {name: n for name, n in step.items() if name not in ("dp", "tp")}
            assert counts == expected
    packed = pool.run(world_size, train_counting, argv)
    assert any(step["dp"] for steps in packed for step in steps)


def buffers(model: list, optimizer: Any) -> list[dict[str, Any]]:
    """Each flat buffer of this rank, and what Megatron's own rule says of it."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    rule = DistributedOptimizer._compute_per_buffer_param_layout.__wrapped__
    found = []
    for number, chunk in enumerate(model):
        names = {parameter: name for name, parameter in chunk.named_parameters()}
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            ranks = buffer.data_parallel_group.size()
            size = chunk.bucket_size
            own = rule(buffer.params, size, ranks, chunk.ddp_config, buffer.param_indices)
            found.append(
                {
                    "aro": buffer.params[0].is_managed_by_layer_wise_optimizer,
                    "chunk": number,
                    "ranks": ranks,
                    "numel": buffer.grad_data.numel(),
                    "buckets": [tuple(bounds) for bounds in buffer.bucket_indices],
                    "spans": {names[p]: tuple(at) for p, at in buffer.param_index_map.items()},
                    "megatrons": {names[p]: tuple(at) for p, at in own.param_index_map.items()},
                    "megatrons_numel": own.bucket_indices[-1][1],
                }
            )
    return found


PADDED = {
    "TP 2 x DP 2, overlap": (4, ["--tp", "2"], [*DEEP, *DISTRIBUTED, *OVERLAP]),
    "DP 4, overlap": (4, [], [*DEEP, *DISTRIBUTED, *OVERLAP]),
    "EP 2 x DP 2": (4, ["--ep", "2"], [*MOE, *DISTRIBUTED]),
    "PP 2 x DP 2, uneven": (
        4,
        ["--pp", "2"],
        [*GATED, *DISTRIBUTED, "--num-layers", "3", "--decoder-first-pipeline-num-layers", "1"],
    ),
    "PP 2, virtual, x DP 2": (4, ["--pp", "2"], [*DEEP, *VIRTUAL, *DISTRIBUTED]),
}
FLAG_OF = {"--tp": TP2, "--ep": EP2, "--pp": PP2}


@pytest.mark.parametrize(("world_size", "sizes", "flags"), PADDED.values(), ids=PADDED.keys())
def test_padding_is_what_the_log_and_the_plan_command_say(
    pool: Pool, world_size: int, sizes: list[str], flags: list[str]
) -> None:
    """Of the real buffers; AdamW's are Megatron's own, and ARO's cut no parameter."""
    layout = FLAG_OF[sizes[0]] if sizes else []
    argv = [*ARO, *flags, *layout, *WHOLE, "--micro-batch-size", "1", "--train-iters", "2"]
    ranks = pool.train(world_size, argv, inspect=buffers)
    numels, paddings = [], []
    for rank in ranks:
        assert rank.exit_status == 0
        for buffer in rank.inspected:
            if not buffer["aro"]:
                assert buffer["spans"] == buffer["megatrons"]
                continue
            assert buffer["spans"].keys() == buffer["megatrons"].keys()
            for start, stop, bucket in buffer["spans"].values():
                first, last = buffer["buckets"][bucket]
                share = (last - first) // buffer["ranks"]
                assert (start - first) // share == (stop - 1 - first) // share
        aro = [buffer for buffer in rank.inspected if buffer["aro"]]
        numels.append(sum(buffer["numel"] for buffer in aro))
        paddings.append(numels[-1] - sum(buffer["megatrons_numel"] for buffer in aro))
    if OVERLAP[0] in flags:
        assert all(len(buffer["buckets"]) > 1 for buffer in ranks[0].inspected if buffer["aro"])
    at = paddings.index(max(paddings))
    percent = 100 * paddings[at] / (numels[at] - paddings[at])
    sentence = (
        "--aro-param-layout whole pads the flat buffers of ARO's matrices by up to "
        f"{max(paddings):,} elements a rank ({percent:.1f}% more than packed)"
    )
    assert f"> ARO: {sentence}\n" in ranks[0].stdout

    model = [flag for flag in (*TINY, *flags, *WHOLE) if flag not in DISTRIBUTED]
    command = [sys.executable, "-m", "megatron_aro.cli.main", "plan", *sizes]
    command += ["--world-size", str(world_size)]
    said = subprocess.run([*command, "--json", "--", *model], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr[-2000:]
    predicted = json.loads(said.stdout[said.stdout.index("{") :])["per_rank"]
    for name, real in (("buffered", numels), ("padding", paddings)):
        spread = {"min": min(real), "mean": sum(real) / world_size, "max": max(real)}
        assert predicted[name] == spread


ONE_LAYER = ["--num-layers", "1"]  # of fewer matrices than ranks
CHECKPOINTS = {
    "DP 2": (2, [*GATED, "--bf16"]),
    "DP 4, overlap": (4, [*DEEP, *OVERLAP]),
    "DP 3, padded buckets, fully reshardable": (
        3,
        [*DEEP, *checkpoints.PADDED, *RESHARDABLE],
    ),
    "DP 4, ranks without": (4, [*MOE, *EP2, *ONE_LAYER]),
    "DP 4, ranks without, fully reshardable": (4, [*MOE, *EP2, *ONE_LAYER, *RESHARDABLE]),
    "TP 2 x DP 2, fully reshardable": (4, [*GATED, *TP2, "--bf16", *RESHARDABLE]),
    "PP 2, virtual, x DP 2, fully reshardable": (4, [*DEEP, *PP2, *VIRTUAL, *RESHARDABLE]),
}


@pytest.mark.parametrize(("world_size", "flags"), CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
def test_a_resumed_run_is_bit_identical(
    pool: Pool, tmp_path: Path, world_size: int, flags: list[str]
) -> None:
    """In both formats of the distributed optimizer, and where a rank holds no matrix at all."""
    argv = [*flags, *DISTRIBUTED, *WHOLE, "--micro-batch-size", "1"]
    checkpoints.test_a_resumed_run_is_bit_identical(pool, tmp_path, world_size, argv)


def test_a_checkpoint_of_the_other_layout_is_refused(pool: Pool, tmp_path: Path) -> None:
    """Its slices are other slices; the weights alone can be taken."""
    argv = [*ARO, *GATED, *DISTRIBUTED]
    save = ["--save", str(tmp_path), "--save-interval", "5"]
    assert pool.train(2, [*argv, *WHOLE, *save])[0].exit_status == 0
    refused = pool.train(2, [*argv, "--load", str(tmp_path)])[0]
    assert refused.exit_status == 2
    assert "aro_param_layout from whole to packed" in refused.stderr
    weights = ["--load", str(tmp_path), "--no-load-optim", "--finetune"]
    assert pool.train(2, [*argv, *weights])[0].exit_status == 0


def train_tagged_otherwise(argv: list[str]) -> int:
    """Train with ARO's parameters tagged as a program of one's own would that forgot the layout."""
    import runs

    from megatron_aro.megatron import optimizer

    tag = optimizer.tag_parameters
    optimizer.tag_parameters = lambda chunks, layout: tag(chunks)
    return runs.train(argv).exit_status


def test_buffers_of_another_layout_are_refused(pool: Pool) -> None:
    """A setting that did not reach the buffers does not train silently."""
    ranks = pool.run_ranks(2, train_tagged_otherwise, [*ARO, *DISTRIBUTED, *WHOLE])
    assert ranks[0].value == 2
    assert "param_layout is whole, but its flat buffers were laid out packed" in ranks[0].stderr
