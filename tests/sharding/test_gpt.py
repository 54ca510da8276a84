"""Parameters and flat buffers from integers are those that real Megatron builds."""

from __future__ import annotations

import pytest
from models import Built, build
from pool import Pool
from runs import TINY

from megatron_aro.sharding.buffers import lay_out, lay_out_whole
from megatron_aro.sharding.gpt import Parameter, chunk_parameters, even_pipeline

GATED = """--swiglu --disable-bias-linear --group-query-attention --num-query-groups 2
    --normalization RMSNorm --qk-layernorm --position-embedding-type rope
    --untie-embeddings-and-output-weights"""
MOE = """--num-experts 4 --moe-router-topk 2 --swiglu --disable-bias-linear
    --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 16 --moe-layer-freq [0,1]"""
WHOLE = "--aro-param-layout whole"
FULL = "--aro-mode full-model"
TWO = "--pipeline-model-parallel-size 2"
CASES = {
    "biases, tied": (1, "--aro-orientation min-side --aro-sharing global"),
    "gated, GQA, odd DP": (3, f"{GATED} --global-batch-size 6"),
    "small buckets": (4, f"{GATED} --overlap-grad-reduce --ddp-bucket-size 3000"),
    "padding for bandwidth": (2, "--ddp-pad-buckets-for-high-nccl-busbw"),
    "gated, TP over groups": (4, f"{GATED} --tensor-model-parallel-size 4 --aro-split gate-up"),
    "biases, TP x DP": (4, "--tensor-model-parallel-size 2"),
    "gated, CP x DP": (4, f"{GATED} --context-parallel-size 2"),
    "tied, PP x DP": (4, TWO + " --overlap-grad-reduce --ddp-bucket-size 3000"),
    "virtual PP": (2, f"{TWO} --num-layers 8 --num-layers-per-virtual-pipeline-stage 2"),
    "uneven PP": (2, TWO + " --num-layers 5 --decoder-first-pipeline-num-layers 2"),
    "custom PP": (2, "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tL"),
    "gated attention": (1, GATED + " --attention-output-gate --aro-split none"),
    "MoE": (2, MOE + " --aro-orientation left --aro-override *.router.weight=adamw"),
    "MoE, shared gate": (
        1,
        f"{MOE} --moe-shared-expert-gate --aro-override *_experts.*#up=left,*.1.linear_fc2*=right",
    ),
    "MoE, EP x DP": (4, MOE + " --expert-model-parallel-size 2 --aro-sharing chain"),
    "MoE, EP x CP": (2, MOE + " --expert-model-parallel-size 2 --context-parallel-size 2"),
    "MoE, EP x expert TP": (
        4,
        MOE + " --expert-model-parallel-size 2 --expert-tensor-parallel-size 2",
    ),
    "MoE, expert TP alone": (2, MOE + " --expert-tensor-parallel-size 2"),
    "full-model, TP x DP": (
        4,
        f"{FULL} --tensor-model-parallel-size 2 --aro-override *position*=adamw,*.bias=adamw",
    ),
    "full-model, tied, PP x DP": (4, f"{TWO} {FULL} --overlap-grad-reduce --ddp-bucket-size 900"),
    "full-model, tied, words to AdamW": (2, f"{TWO} {FULL} --aro-override *.word_emb*=adamw"),
    "full-model, untied, MoE, EP x DP": (
        4,
        f"{MOE} {FULL} --expert-model-parallel-size 2 --untie-embeddings-and-output-weights",
    ),
    "whole, small buckets": (
        4,
        f"{GATED} {WHOLE} --num-layers 6 --overlap-grad-reduce --ddp-bucket-size 3000",
    ),
    "whole, odd DP, padding for bandwidth": (
        3,
        f"{WHOLE} --global-batch-size 6 --ddp-pad-buckets-for-high-nccl-busbw",
    ),
    "whole, MoE, EP x DP": (4, f"{MOE} {WHOLE} --expert-model-parallel-size 2"),
    "whole, tied, PP x DP": (4, f"{TWO} {WHOLE}"),
}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def ranks(request: pytest.FixtureRequest, pool: Pool) -> list[Built]:
    world_size, flags = request.param
    distributed = ["--optimizer", "adam", "--use-distributed-optimizer"]
    return pool.run(world_size, build, [*TINY, *distributed, *flags.split()])


def predicted(rank: Built) -> list[list[Parameter]]:
    chunks = rank.stages[rank.at["pp"]]
    return [chunk_parameters(rank.gpt, c, rank.run.split, rank.at["ep"]) for c in chunks]


def test_names_shapes_cuts_and_matrices_are_those_of_the_model(ranks: list[Built]) -> None:
    """Each parameter of each rank, in order, with its matrices as `matrices.place` cuts them."""
    for rank in ranks:
        for parameters, reals in zip(predicted(rank), rank.chunks, strict=True):
            assert [p.name for p in parameters] == [r.name for r in reals]
            for parameter, real in zip(parameters, reals, strict=True):
                layout, shape = parameter.layout, list(parameter.shape)
                if layout.axis is not None:
                    shape[layout.axis] //= layout.size
                assert (tuple(shape), parameter.expert) == (real.shape, real.expert), real.name
                assert (parameter.matrices, parameter.by) == (real.matrices, real.by), real.name
                if parameter.matrices:
                    assert (layout.axis, layout.blocks) == (real.axis, real.stride), real.name


def test_ranges_are_those_of_the_distributed_optimizer(ranks: list[Built]) -> None:
    """Order, padding and buckets: what each rank holds of each parameter, ARO's apart."""
    for rank in ranks:
        numels = []
        for number, (parameters, reals) in enumerate(
            zip(predicted(rank), rank.chunks, strict=True)
        ):
            buckets = rank.run.bucket_size if rank.at["pp"] == number == 0 else None
            held = {real.name: real.held for real in reals}
            for expert in (False, True):
                for aro in (False, True):
                    mine = [p for p in parameters if (p.expert, p.by != "adamw") == (expert, aro)]
                    split = rank.run.split
                    by = split.etp * split.ep if expert else split.tp
                    d = rank.at["edp" if expert else "dp"]
                    if not mine:
                        continue
                    sizes, size = [p.shard for p in mine], rank.run.per_stage // by
                    whole = aro and rank.run.param_layout == "whole"
                    settings = (sizes, size, buckets, rank.run.for_bandwidth)
                    alone = {i for i, p in enumerate(mine) if p.shared}
                    buffer = lay_out_whole(*settings) if whole else lay_out(*settings, alone)
                    numels.append(buffer.numel)
                    for i, parameter in enumerate(mine):
                        assert buffer.held(i)[d] == held[parameter.name], parameter.name
        assert set(numels) <= set(rank.buffers)


def test_even_pipelines_are_megatrons(ranks: list[Built]) -> None:
    """The default rule, where a case uses it."""
    stages = ranks[0].stages
    layers = ranks[0].gpt.layers
    if layers % (len(stages) * len(stages[0])) == 0:
        assert even_pipeline(layers, len(stages), len(stages[0])) == stages
