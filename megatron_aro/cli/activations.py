"""An estimate of the memory of activations: what autograd keeps for the backward pass.

Counted tensor by tensor, as Korthikanti et al. (arXiv 2205.05198) do, with the model's own widths,
grouped queries, gates and experts, for Megatron's layers of transformer-engine (flash attention,
fused norms and activations) and its local ones. Experts are taken to get equal numbers of tokens.
Left out: what a kernel takes while it runs, buffers of communication, FP8, and modules of
selective recomputation other than core_attn, layernorm, mlp, moe and moe_act.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_aro.sharding.gpt import GPT, Chunk

FP32 = 4  # bytes


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What activations depend on beside the model.

    Attributes:
        tokens: of a micro batch on a rank: micro batch x sequence / CP.
        context: tokens that one attends to, the whole sequence.
        stages, virtual: of the pipeline; chunks of a stage.
        micro_batches: of an iteration, on a data-parallel rank.
        tp, etp: tensor-parallel ranks of dense layers and of experts.
        whole: 1 where each rank has all of what lies between tensor-parallel layers, else TP
            (sequence parallelism).
        element: bytes.
        top_k: experts of a token.
        turned: queries and keys get a norm or a rotary embedding.
        flash: attention scores are never stored.
        fused: activations; `norm`: bytes an element that a norm keeps of its input.
        dropout: hidden states and scores have masks of dropout, a byte an element.
        recompute: {"full"}, or the modules of selective recomputation.
        group: layers that are recomputed together; with `block` how many of a chunk are at all.
    """

    tokens: int
    context: int
    stages: int
    virtual: int
    micro_batches: int
    tp: int
    etp: int
    whole: int
    element: int
    top_k: int
    turned: bool
    flash: bool
    fused: bool
    norm: int
    dropout: bool
    recompute: frozenset[str]
    group: int
    block: bool

    @classmethod
    def of(cls, args: argparse.Namespace, config: Any) -> Settings:
        """From Megatron's validated arguments and its TransformerConfig."""
        modules = {
            "full": ["full"],
            "selective": args.recompute_modules or ["core_attn"],
        }.get(args.recompute_granularity, [])
        tp, element = args.tensor_model_parallel_size, 2 if args.bf16 else FP32
        local = args.transformer_impl == "local"
        micro_batch = args.micro_batch_size * args.data_parallel_size
        return cls(
            tokens=args.micro_batch_size * args.seq_length // args.context_parallel_size,
            context=args.seq_length,
            stages=args.pipeline_model_parallel_size,
            virtual=args.virtual_pipeline_model_parallel_size or 1,
            micro_batches=args.global_batch_size // micro_batch,
            tp=tp,
            etp=args.expert_tensor_parallel_size,
            whole=tp if args.sequence_parallel else 1,
            element=element,
            top_k=args.moe_router_topk,
            turned=args.qk_layernorm or args.position_embedding_type == "rope",
            flash=not local,
            fused=config.bias_activation_fusion,
            # torch's RMSNorm keeps its input and its result in float32.
            norm=2 * FP32 if local and args.normalization == "RMSNorm" else element,
            dropout=args.attention_dropout > 0 or args.hidden_dropout > 0,
            recompute=frozenset(modules),
            group=args.recompute_num_layers or 1,
            block=args.recompute_method == "block",
        )


class Activations(NamedTuple):
    """Bytes of a rank: kept, and of the layers that are being computed again."""

    kept: float
    again: float


def layer_bytes(gpt: GPT, layer: int, given: Settings) -> float:
    """Kept of one layer for one micro batch."""
    tp, e = given.tp, given.element
    hidden = gpt.hidden / given.whole
    queries, keys = gpt.heads * gpt.head / tp, gpt.groups * gpt.head / tp
    kept = {
        "norms": 2 * given.norm * hidden,  # their inputs
        "layernorm": 2 * e * hidden,  # their results, which QKV and the MLP read
        "projection": e * queries,
    }
    if given.flash or "core_attn" in given.recompute:
        kept["qkv"] = e * (queries + 2 * keys)
        if given.turned:
            kept["qkv"] += e * (queries + keys)
    else:
        kept["qkv"] = e * 3 * queries  # keys and values are repeated for each head
        scores = gpt.heads / tp * given.context
        kept["core_attn"] = (e + (e + 1) * given.dropout) * scores
    if gpt.attention_gate:
        kept["gate"] = e * 2 * queries
    if gpt.qk_norm and not given.flash:
        kept["norms"] += given.norm * (queries + keys)
    if given.dropout:
        kept["masks"] = 2 * hidden
    unfused = 2 if gpt.gated and not given.fused else 0  # the gate, before and after its activation
    reads = 2 if gpt.gated else 1  # what fc1 gives
    if gpt.moe and gpt.moe[layer]:
        pairs = given.top_k * given.etp / tp  # of a token and an expert
        kept["moe"] = e * pairs * gpt.hidden
        kept["moe"] += e * pairs * (reads + unfused + bool(unfused)) * gpt.moe_ffn / given.etp
        kept["moe"] += e * (reads + unfused + 1) * gpt.shared_ffn / tp
        if "moe" not in given.recompute:
            kept["moe_act"] = e * pairs * gpt.moe_ffn / given.etp
    else:
        kept["mlp"] = e * (reads + unfused + 1) * gpt.ffn / tp
    return given.tokens * sum(size for of, size in kept.items() if of not in given.recompute)


def stage_bytes(gpt: GPT, chunks: Sequence[Chunk], stage: int, given: Settings) -> Activations:
    """On a rank of a pipeline stage, at the peak.

    1F1B has as many micro batches under way at a stage as there are stages from it to the end;
    with virtual stages, as many as there are stages and a share more (Korthikanti et al.).
    """
    under_way = float(given.stages - stage)
    if given.virtual > 1:
        under_way = given.stages + (given.stages - 1) / given.virtual
    under_way = min(under_way, given.micro_batches)
    hidden = given.tokens * gpt.hidden / given.whole
    kept = again = 0.0
    for chunk in chunks:
        sizes = [layer_bytes(gpt, layer, given) for layer in chunk.layers]
        if "full" in given.recompute:
            recomputed = sizes[: given.group] if given.block else sizes
            step = 1 if given.block else given.group
            groups = [recomputed[i : i + step] for i in range(0, len(recomputed), step)]
            again = max([again, *map(sum, groups)])
            sizes = [given.element * hidden] * len(groups) + sizes[len(recomputed) :]
        kept += under_way * sum(sizes)
        if chunk.last:
            kept += (given.norm + given.element) * hidden  # last norm, output layer
            # The loss turns logits to float32 and keeps them; a gradient is as large as logits.
            logit = FP32 if given.element == FP32 else FP32 + given.element
            kept += logit * given.tokens * gpt.vocabulary / given.tp
    return Activations(kept, again)
