"""The parameters of a Megatron GPT from its sizes alone: names, shapes, layouts, ARO's matrices.

In the order in which Megatron's modules list them, for a rank of a pipeline stage. Names, splits
and orientations are those of `megatron_aro.megatron.matrices`; a test compares both with real
models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from megatron_aro.config import AROConfig
from megatron_aro.sharding import rules
from megatron_aro.sharding.geometry import Layout
from megatron_aro.sharding.logical import LogicalMatrix

WORDS = "embedding.word_embeddings.weight"
By = Literal["adamw", "matrices", "columns", "vector"]


@dataclass(frozen=True, kw_only=True)
class GPT:
    """Sizes of a GPT, in Megatron's meaning.

    Attributes:
        hidden, ffn, heads, groups: of a dense layer; groups are query groups (heads without GQA).
        head: elements of an attention head (kv_channels).
        vocabulary: rows of the embedding, padding included.
        tied: the output layer is the embedding.
        positions: rows of learned position embeddings, 0 for none.
        gated: fc1 is gate and up.
        attention_gate: QKV holds a gate as large as Q.
        norm_bias, linear_bias, qkv_bias: which layers have a bias; qk_norm: norms of Q and K.
        moe: which layers have experts.
        experts, moe_ffn: of such a layer; shared_ffn: of its shared expert, 0 for none;
            shared_gate: that has a gate.
        grouped: transformer-engine's order and names of experts (weight0..N).
        aro: by which its matrices are split and oriented.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head: int
    vocabulary: int
    tied: bool = True
    positions: int = 0
    gated: bool = False
    attention_gate: bool = False
    norm_bias: bool = False
    linear_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    moe: tuple[bool, ...] = ()
    experts: int = 0
    moe_ffn: int = 0
    shared_ffn: int = 0
    shared_gate: bool = False
    grouped: bool = False
    aro: AROConfig = AROConfig()


@dataclass(frozen=True)
class Chunk:
    """What one model chunk of a pipeline stage builds.

    Attributes:
        layers: indices in the whole model.
        first, last: it has the embedding; the final norm and the output layer.
    """

    layers: tuple[int, ...]
    first: bool
    last: bool


@dataclass(frozen=True, kw_only=True)
class Split:
    """How parameters are spread over the ranks of one pipeline stage, data parallelism aside.

    Attributes:
        tp, etp: tensor-parallel ranks of dense parameters and of experts.
        ep: ranks that have a share of the experts each.
    """

    tp: int = 1
    etp: int = 1
    ep: int = 1

    @property
    def experts_apart(self) -> bool:
        """Whether experts have groups and flat buffers of their own; else they count as dense."""
        return self.ep > 1 or self.etp != self.tp


@dataclass(frozen=True)
class Parameter:
    """A stored parameter.

    Attributes:
        shape: of the whole, before tensor parallelism.
        layout: its tensor-parallel cut; rows are shape[0].
        expert: it lives in the experts' groups and buffers.
        matrices: ARO's that have an owner.
        by: what steps it, as in `megatron_aro.megatron.matrices.Placement`.
        hidden: it is ARO's, or would be without an exception by name.
        shared: word embeddings that several pipeline stages have.
    """

    name: str
    shape: tuple[int, ...]
    layout: Layout
    expert: bool = False
    matrices: tuple[LogicalMatrix, ...] = ()
    by: By = "adamw"
    hidden: bool = False
    shared: bool = False

    @property
    def is_copy(self) -> bool:
        """Whether another stage steps it, and sends the update."""
        return self.shared and self.name != WORDS

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def shard(self) -> int:
        """Elements that one rank stores."""
        return self.numel if self.layout.axis is None else self.numel // self.layout.size


def even_pipeline(layers: int, pp: int, vpp: int = 1) -> list[list[Chunk]]:
    """Megatron's default pipeline: the chunks of each stage, equal numbers of layers in each.

    Raises:
        ValueError: the layers do not divide.
    """
    if layers % (pp * vpp):
        raise ValueError(f"{layers} layers do not divide over {pp} stages of {vpp} chunks.")
    size = layers // (pp * vpp)
    return [
        [
            Chunk(
                tuple(range((v * pp + p) * size, (v * pp + p + 1) * size)),
                first=p == v == 0,
                last=p == pp - 1 and v == vpp - 1,
            )
            for v in range(vpp)
        ]
        for p in range(pp)
    ]


def chunk_parameters(gpt: GPT, chunk: Chunk, split: Split, ep_rank: int = 0) -> list[Parameter]:
    """All parameters of a chunk on the ranks with this share of the experts, in Megatron's order.

    A tied output layer appears where it is a copy of its own: in the last chunk unless that has
    the embedding too.
    """
    tp, hidden = split.tp, gpt.hidden
    found: list[Parameter] = []
    if chunk.first:
        words = (gpt.vocabulary, hidden)
        copied = gpt.tied and not chunk.last
        found.append(Parameter(WORDS, words, Layout(words[0], tp, 0), shared=copied))
        if gpt.positions:
            found.append(_whole("embedding.position_embeddings.weight", (gpt.positions, hidden)))
    for layer in chunk.layers:
        found += _layer(gpt, layer, split, ep_rank)
    if chunk.last:
        found += _norm(gpt, "decoder.final_layernorm", hidden)
        if not (gpt.tied and chunk.first):
            words, layout = (gpt.vocabulary, hidden), Layout(gpt.vocabulary, tp, 0)
            found.append(Parameter("output_layer.weight", words, layout, shared=gpt.tied))
    return [_in_mode(gpt, parameter) for parameter in found]


def _in_mode(gpt: GPT, parameter: Parameter) -> Parameter:
    """In full-model mode ARO steps all that is no hidden matrix, unless an exception says so."""
    if parameter.hidden or gpt.aro.mode != "full-model":
        return parameter
    by: By = "columns" if len(parameter.shape) == 2 else "vector"
    if rules.is_adamws(WORDS if parameter.shared else parameter.name, gpt.aro):
        by = "adamw"
    return replace(parameter, by=by, hidden=True)


def _layer(gpt: GPT, layer: int, split: Split, ep_rank: int) -> Iterator[Parameter]:
    prefix, hidden = f"decoder.layers.{layer}.", gpt.hidden
    yield from _norm(gpt, prefix + "input_layernorm", hidden)
    attention = prefix + "self_attention."
    queries = gpt.heads // gpt.groups * gpt.head
    yield from _columns(gpt, attention + "linear_proj", hidden, gpt.heads * gpt.head, split.tp)
    sizes = {"q": queries, "gate": queries, "k": gpt.head, "v": gpt.head}
    if not gpt.attention_gate:
        del sizes["gate"]
    yield from _rows(
        gpt,
        attention + "linear_qkv",
        rules.fused(gpt.aro, "qkv", sizes, repeats=gpt.groups),
        hidden,
        Layout(gpt.groups * sum(sizes.values()), split.tp, 0),
        bias=gpt.linear_bias or gpt.qkv_bias,
    )
    if gpt.qk_norm:
        yield from _norm(gpt, attention + "q_layernorm", gpt.head)
        yield from _norm(gpt, attention + "k_layernorm", gpt.head)
    yield from _norm(gpt, prefix + "pre_mlp_layernorm", hidden)
    if gpt.moe and gpt.moe[layer]:
        yield from _moe(gpt, prefix + "mlp.", split, ep_rank)
    else:
        yield from _fc1(gpt, prefix + "mlp.linear_fc1", gpt.ffn, split.tp)
        yield from _columns(gpt, prefix + "mlp.linear_fc2", hidden, gpt.ffn, split.tp)


def _moe(gpt: GPT, prefix: str, split: Split, ep_rank: int) -> Iterator[Parameter]:
    hidden = gpt.hidden
    yield from _rows(
        gpt,
        prefix + "router",
        {"": ((0, gpt.experts),)},
        hidden,
        Layout(gpt.experts, split.tp, None),
        bias=gpt.linear_bias,
    )
    local = gpt.experts // split.ep
    numbers = range(ep_rank * local, (ep_rank + 1) * local)
    fc1, fc2 = [], []
    for expert in numbers:
        names = [f"{prefix}experts.local_experts.{expert}.linear_fc{i}" for i in (1, 2)]
        if gpt.grouped:
            names = [f"{prefix}experts.linear_fc{i}" for i in (1, 2)]
        suffix, apart = str(expert) if gpt.grouped else "", split.experts_apart
        fc1.append(list(_fc1(gpt, names[0], gpt.moe_ffn, split.etp, apart, suffix)))
        fc2.append(list(_columns(gpt, names[1], hidden, gpt.moe_ffn, split.etp, apart, suffix)))
    in_order = (
        [*fc1, *fc2] if gpt.grouped else [x for pair in zip(fc1, fc2, strict=True) for x in pair]
    )
    for parameters in in_order:
        yield from parameters
    if gpt.shared_ffn:
        shared = prefix + "shared_experts."
        if gpt.shared_gate:
            layout = Layout(1, split.tp, None)
            yield _matrix(gpt, shared + "gate_weight", {"": ((0, 1),)}, hidden, layout)
        yield from _fc1(gpt, shared + "linear_fc1", gpt.shared_ffn, split.tp)
        yield from _columns(gpt, shared + "linear_fc2", hidden, gpt.shared_ffn, split.tp)


def _fc1(
    gpt: GPT, module: str, ffn: int, tp: int, expert: bool = False, suffix: str = ""
) -> Iterator[Parameter]:
    """Reads the residual stream."""
    parts: rules.Parts = {"": ((0, ffn),)}
    if gpt.gated:
        parts = rules.fused(gpt.aro, "gate-up", {"gate": ffn, "up": ffn})
    blocks = 2 if gpt.gated else 1
    layout = Layout(ffn * blocks, tp, 0, blocks)
    yield from _rows(
        gpt, module, parts, gpt.hidden, layout, gpt.linear_bias, expert=expert, suffix=suffix
    )


def _rows(
    gpt: GPT,
    module: str,
    parts: rules.Parts,
    columns: int,
    layout: Layout,
    bias: bool,
    expert: bool = False,
    suffix: str = "",
) -> Iterator[Parameter]:
    """A layer that reads the residual stream, cut by rows if at all."""
    yield _matrix(gpt, f"{module}.weight{suffix}", parts, columns, layout, expert)
    if bias:
        yield Parameter(f"{module}.bias{suffix}", (layout.rows,), layout, expert)


def _columns(
    gpt: GPT,
    module: str,
    rows: int,
    columns: int,
    tp: int,
    expert: bool = False,
    suffix: str = "",
) -> Iterator[Parameter]:
    """A layer that writes to the residual stream, cut by columns."""
    parts: rules.Parts = {"": ((0, rows),)}
    yield _matrix(gpt, f"{module}.weight{suffix}", parts, columns, Layout(rows, tp, 1), expert)
    if gpt.linear_bias:
        yield Parameter(f"{module}.bias{suffix}", (rows,), Layout(rows, tp, None), expert)


def _matrix(
    gpt: GPT, name: str, parts: rules.Parts, columns: int, layout: Layout, expert: bool = False
) -> Parameter:
    """A hidden matrix: ARO's, unless an exception sends it to AdamW."""
    shape = (layout.rows, columns)
    if rules.is_adamws(name, gpt.aro):
        return Parameter(name, shape, layout, expert, hidden=True)
    matrices, _ = rules.matrices(name, parts, columns, gpt.aro, gpt.hidden)
    return Parameter(name, shape, layout, expert, matrices, "matrices", hidden=True)


def _norm(gpt: GPT, module: str, size: int) -> Iterator[Parameter]:
    yield _whole(module + ".weight", (size,))
    if gpt.norm_bias:
        yield _whole(module + ".bias", (size,))


def _whole(name: str, shape: Sequence[int]) -> Parameter:
    """A parameter that every tensor-parallel rank has, and no hidden matrix."""
    return Parameter(name, tuple(shape), Layout(shape[0], 1, None))
