"""What ARO costs each rank of a layout: work, bytes, memory; from integers alone.

Per step and rank. Stages that hold the same layers get the same plan, and so do all shares of the
experts, so each is planned once.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from megatron_aro.config import ParamLayout
from megatron_aro.sharding.buffers import everywhere, lay_out, lay_out_whole
from megatron_aro.sharding.column_account import add_columns
from megatron_aro.sharding.columns import ByColumns
from megatron_aro.sharding.cost import (
    FP32,
    H100,
    Rates,
    batch_limit,
    batch_seconds,
    member_work,
    members_bytes,
    recorded,
    rotation_bytes,
    seconds,
    step_work,
    turn_bytes,
    turn_seconds,
    turn_work,
    turning_seconds,
    workspace_bytes,
)
from megatron_aro.sharding.geometry import Layout, Part, parts
from megatron_aro.sharding.gpt import GPT, Chunk, Parameter, Split, chunk_parameters
from megatron_aro.sharding.groups import Member, plan_groups
from megatron_aro.sharding.logical import Interval, LogicalMatrix
from megatron_aro.sharding.plan import Plan, Sharded, make_plan
from megatron_aro.sharding.rules import check_used, unused
from megatron_aro.sharding.traffic import traffic


@dataclass(frozen=True, kw_only=True)
class Run:
    """How a model is trained, as far as ARO's work depends on it.

    Attributes:
        ranks: in all.
        stages: of the pipeline.
        split: of a stage.
        distributed: --use-distributed-optimizer; else parameters are replicated.
        bucket_size: elements, of the first chunk of the first stage, None for one bucket; other
            chunks have one bucket always.
        for_bandwidth: --ddp-pad-buckets-for-high-nccl-busbw.
        param_layout: of ARO's parameters; "whole" needs `distributed`.
        gradient_bytes: an element of the gradient buffers.
        exchange_bytes: an element that is gathered or returned.
        workspace: bytes that stepping a batch may take; one matrix always goes.
        graphs: whether small batches are CUDA graphs.
        rates: of the GPU.
    """

    ranks: int
    stages: int = 1
    split: Split = Split()
    distributed: bool = True
    bucket_size: int | None = None
    for_bandwidth: bool = False
    param_layout: ParamLayout = "packed"
    gradient_bytes: int = FP32
    exchange_bytes: int = FP32
    workspace: int = 2 << 30
    graphs: bool = True
    rates: Rates = H100["fp16x3"]

    def __post_init__(self) -> None:
        for product, what in (
            (self.stages * self.split.tp, "stages x TP"),
            (self.stages * self.split.etp * self.split.ep, "stages x expert TP x EP"),
        ):
            if self.ranks % product:
                raise ValueError(f"{self.ranks} ranks do not divide by {what} = {product}.")
        if self.param_layout == "whole" and not self.distributed:
            raise ValueError("Param layout whole is one of the distributed optimizer.")

    @property
    def per_stage(self) -> int:
        return self.ranks // self.stages

    def seconds(self, matrix: LogicalMatrix) -> float:
        """Predicted seconds of one step of a matrix."""
        return seconds(matrix, self.rates)


@dataclass
class Figures:
    """Of one rank, per step where it is not memory. Bytes, unless the name says otherwise.

    Attributes:
        dp_sent, dp_received: over data parallelism, elements of cut matrices to their owners and
            updates back; tp_sent, tp_received: parts over tensor parallelism, both ways.
        gradients: sent by a ring reduce-scatter of all gradients (an all-reduce where parameters
            are replicated), to compare with.
        stored: elements of all parameters (of all gradients: as many), padding included.
        buffered: elements of ARO's flat buffers (of one of each kind: gradients, parameters),
            padding included; padding: how many of them param layout "whole" adds to "packed".
        summed: of sums over all ranks of a stage, and of rotations that go to them, in full-model
            mode; what completes rows is in dp_sent and dp_received.
        adamw: elements of AdamW's parameters whose moments are kept here (a tied output layer's
            bucket of its own is left out: a few are then on other ranks of the last stage).
        shared_sent: shares of what is orthonormalised for several matrices, and their rotations.
        rotation: with copies of shared ones, where members are.
        gathered: the matrices it owns, whole, while they are stepped.
        exchange: buffers of what travels, at their peak.
        workspace: of the largest batch, beside its matrices.
        graphs: of gathered and workspace, what stays allocated between steps on GPUs.
    """

    matrices: int = 0
    flops: float = 0.0
    milliseconds: float = 0.0
    dp_sent: int = 0
    dp_received: int = 0
    tp_sent: int = 0
    tp_received: int = 0
    summed: int = 0
    gradients: float = 0.0
    stored: int = 0
    buffered: int = 0
    padding: int = 0
    adamw: int = 0
    shared_sent: int = 0
    momentum: int = 0
    rotation: int = 0
    gathered: int = 0
    exchange: int = 0
    workspace: int = 0
    graphs: int = 0

    def __add__(self, other: Figures) -> Figures:
        total = {name: value + getattr(other, name) for name, value in vars(self).items()}
        for name in ("exchange", "workspace"):  # one after the other
            total[name] = max(getattr(self, name), getattr(other, name))
        return Figures(**total)


@dataclass(frozen=True)
class Account:
    """The whole run.

    Attributes:
        parameters, matrices: of the model, each once; aro_parameters: of them in matrices.
        largest: predicted milliseconds of its most expensive matrix.
        ranks: figures by rank, of the stage, then of the rank in its stage.
        rotations: of the model, each once.
    """

    parameters: int
    aro_parameters: int
    matrices: int
    largest: float
    ranks: tuple[Figures, ...]
    rotations: int

    def spread(self, name: str) -> tuple[float, float, float]:
        """(min, mean, max) of a figure over all ranks."""
        values = [getattr(figures, name) for figures in self.ranks]
        return min(values), sum(values) / len(values), max(values)

    @property
    def imbalance(self) -> float:
        """Predicted time of the slowest rank over the mean."""
        _, mean, slowest = self.spread("milliseconds")
        return slowest / mean if mean else 1.0

    @property
    def best_imbalance(self) -> float:
        """What no assignment of whole matrices could go below: the largest takes its time."""
        _, mean, _ = self.spread("milliseconds")
        return max(1.0, self.largest / mean) if mean else 1.0


def account(gpt: GPT, pipeline: Sequence[Sequence[Chunk]], run: Run) -> Account:
    """Plan every stage and add up what its ranks do.

    Args:
        pipeline: the chunks of each stage.

    Raises:
        ValueError: an exception by name fits nothing, or a matrix does not lie in a rank as one.
    """
    planned: dict[tuple, tuple[list[Figures], list[Member]]] = {}
    ranks: list[Figures] = []
    members: list[Member] = []
    shares = gpt.aro.sharing != "none"  # so names count, and no stage is like another
    for number, chunks in enumerate(pipeline):
        moe = gpt.moe or (False,) * gpt.layers
        layers = tuple(
            (tuple(moe[layer] for layer in chunk.layers), chunk.first, chunk.last)
            for chunk in chunks
        )
        key = (number if shares else number == 0, layers)  # the first stage alone has buckets
        if key not in planned:
            planned[key] = _stage(gpt, chunks, run, run.bucket_size if number == 0 else None)
        figures, of_stage = planned[key]
        members += [member._replace(rank=len(ranks) + member.rank) for member in of_stage]
        # Stages planned once must not share figures that groups add to.
        ranks += [replace(figure) for figure in figures]
    groups = _add_groups(ranks, members, run)
    whole = Chunk(tuple(range(gpt.layers)), first=True, last=True)
    everything = chunk_parameters(gpt, whole, Split())
    check_used(unused(gpt.aro, ((p.name, p.matrices) for p in everything if p.hidden)))
    aro = [parameter for parameter in everything if parameter.by != "adamw"]
    return Account(
        parameters=sum(parameter.numel for parameter in everything),
        aro_parameters=sum(parameter.numel for parameter in aro),
        matrices=sum(len(p.matrices) + (p.by == "columns") for p in aro),
        largest=max(
            (1e3 * _seconds([matrix], run) for parameter in aro for matrix in parameter.matrices),
            default=0.0,
        ),
        ranks=tuple(ranks),
        rotations=groups + sum(not x.group for parameter in aro for x in parameter.matrices),
    )


def _stage(
    gpt: GPT, chunks: Sequence[Chunk], run: Run, bucket_size: int | None
) -> tuple[list[Figures], list[Member]]:
    """The ranks of a stage, in Megatron's order: TP, then CP, EP and DP, the last slowest.

    And the matrices that share rotations, with their owners' ranks in the stage.
    """
    split, size = run.split, run.per_stage
    figures = [Figures()] * size
    members: list[Member] = []
    # Dense parameters, then the experts of each expert-parallel rank, whose ranks have the dense
    # ones to step already.
    for expert, tp, ep in ((False, split.tp, 1), (True, split.etp, split.ep)):
        for e in range(ep):
            stored = [chunk_parameters(gpt, chunk, split, e) for chunk in chunks]
            kind = [[p for p in parameters if p.expert == expert] for parameters in stored]
            if not any(kind):
                continue
            ranks = [[(d * ep + e) * tp + t for d in range(size // (tp * ep))] for t in range(tp)]
            loads = [[figures[rank].milliseconds / 1e3 for rank in row] for row in ranks]
            planned, plan = _grid(kind, loads, run, bucket_size)
            for row, of_row in zip(ranks, planned, strict=True):
                for rank, figure in zip(row, of_row, strict=True):
                    figures[rank] += figure
            members += [
                Member(s.matrix.group, s.matrix.name, s.matrix.shape, ranks[t][d])
                for s, (t, d) in zip(plan.sharded, plan.owners, strict=True)
                if s.matrix.group
            ]
    return figures, members


def _add_groups(ranks: list[Figures], members: list[Member], run: Run) -> int:
    """Add what shared rotations take to the figures of all ranks; how many there are."""
    loads = [figure.milliseconds / 1e3 for figure in ranks]
    turn = functools.partial(turn_seconds, rates=run.rates)
    plan = plan_groups(members, loads, turn)
    buffers = [0] * len(ranks)
    turned: list[Counter[tuple[int, int]]] = [Counter() for _ in ranks]
    for group in plan.groups:
        m, k = group.shape
        owner, others, size = ranks[group.owner], len(group.ranks) - 1, FP32 * m * k
        owner.flops += turn_work(m, k).flops
        owner.milliseconds += 1e3 * turn(m, k)
        owner.shared_sent += others * size
        buffers[group.owner] += (others + 1) * size
        turned[group.owner][m, k] += turn_bytes(m, k)
        for rank in group.ranks:
            ranks[rank].rotation += size
            if rank != group.owner:
                ranks[rank].shared_sent += size
                buffers[rank] += 2 * size
    elements: dict[int, Counter[str]] = {}
    for member in members:
        of_groups = elements.setdefault(member.rank, Counter())
        of_groups[member.group] += member.shape[0] * member.shape[1]
    for rank, of_groups in elements.items():
        of_turns = max(turned[rank].values(), default=0)
        of_members = members_bytes(of_groups.total(), max(of_groups.values()))
        at_once = max(of_members, of_turns)
        ranks[rank].workspace = max(ranks[rank].workspace, buffers[rank] + at_once)
    return len(plan.groups)


def _grid(
    chunks: Sequence[Sequence[Parameter]],
    loads: Sequence[Sequence[float]],
    run: Run,
    bucket_size: int | None,
) -> tuple[list[list[Figures]], Plan]:
    """Figures of the positions [tp][dp] that share these parameters, chunk by chunk.

    Args:
        loads: seconds of work that the positions have already.
    """
    tp, dp = len(loads), len(loads[0])
    sharded: list[Sharded] = []
    columns: list[ByColumns] = []
    cut: dict[tuple[tuple[Interval, ...], int, Layout], tuple[Part, ...]] = {}
    buffered = 0  # elements of all gradient buffers
    buffered_aro = padding = 0
    # Of what ARO (True) and AdamW have elements of, from one data-parallel rank to the next.
    changes = {aro: [0] * (dp + 1) for aro in (True, False)}
    for number, parameters in enumerate(chunks):
        for aro in (True, False):
            mine = [p for p in parameters if (p.by != "adamw") == aro]
            sizes = [p.shard for p in mine]
            settings = (sizes, dp, None if number else bucket_size, run.for_bandwidth)
            alone = {i for i, p in enumerate(mine) if p.shared}
            packed = buffer = lay_out(*settings, alone)
            if aro and run.param_layout == "whole":
                buffer = lay_out_whole(*settings)
            numel = buffer.numel if run.distributed else sum(sizes)
            buffered += numel
            if aro:
                buffered_aro += numel
                padding += buffer.numel - packed.numel
            for i, parameter in enumerate(mine):
                held = buffer.held(i) if run.distributed else everywhere(sizes[i], dp)
                for first, last, (start, stop) in held.runs:
                    changes[aro][first] += stop - start
                    changes[aro][last] -= stop - start
                if parameter.by == "columns" and not parameter.is_copy:
                    rows, width = parameter.shape
                    stored, replicated = sizes[i] // width, parameter.layout.axis is None
                    columns.append(
                        ByColumns(parameter.name, rows, width, stored, tp, replicated, held)
                    )
                for matrix in parameter.matrices:
                    key = (matrix.intervals, matrix.columns, parameter.layout)
                    if key not in cut:
                        cut[key] = parts(matrix, parameter.layout)
                    replicated = parameter.layout.axis is None
                    sharded.append(Sharded(matrix, cut[key], replicated, held))
    at_most = functools.partial(batch_limit, workspace=run.workspace)
    turning = turning_seconds((matrix.shape for matrix in columns), run.rates)
    plan = make_plan(sharded, tp, dp, run.seconds, loads, at_most, turning)
    held_by = [list(accumulate(changes[aro]))[:dp] for aro in (True, False)]
    figures = [
        [Figures(momentum=FP32 * of_aro, adamw=rest) for of_aro, rest in zip(*held_by, strict=True)]
        for _ in range(tp)
    ]
    directions = 1 if run.distributed else 2
    for row in figures:
        for figure in row:
            figure.stored, figure.buffered, figure.padding = buffered, buffered_aro, padding
            figure.gradients = directions * buffered * run.gradient_bytes * (dp - 1) / dp
    _add_work(plan, figures, run)
    for row, of_row in zip(figures, traffic(plan), strict=True):
        for figure, moved in zip(row, of_row, strict=True):
            figure.dp_sent = moved.sent("data", run.exchange_bytes)
            figure.dp_received = moved.received("data", run.exchange_bytes)
            figure.tp_sent = moved.sent("tensor", run.exchange_bytes)
            figure.tp_received = moved.received("tensor", run.exchange_bytes)
            figure.exchange = moved.buffers(run.exchange_bytes)
    if columns:
        add_columns(columns, plan.turner, figures, run.rates)
    return figures, plan


def _add_work(plan: Plan, figures: list[list[Figures]], run: Run) -> None:
    batches: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for batch in plan.batches:
        (t, d), (count, m, n) = batch.owner, batch.shape
        matrices = [plan.sharded[i].matrix for i in batch.members]
        figure, shares = figures[t][d], bool(matrices[0].group)
        figure.matrices += count
        figure.flops += count * (member_work if shares else step_work)(m, n).flops
        figure.milliseconds += 1e3 * _seconds(matrices, run)
        figure.gathered += count * FP32 * m * n
        if shares:  # rotation and workspace go with the groups
            continue
        figure.rotation += count * rotation_bytes(m, n)
        figure.workspace = max(figure.workspace, count * workspace_bytes(m, n))
        batches.setdefault((t, d), []).append(batch.shape)
    for (t, d), of_owner in batches.items() if run.graphs else ():
        _, figures[t][d].graphs = recorded(of_owner)


def _seconds(matrices: Sequence[LogicalMatrix], run: Run) -> float:
    """Predicted seconds of a batch; of one that shares rotations without turning them."""
    if matrices[0].group:
        return sum(map(run.seconds, matrices))
    return batch_seconds(len(matrices), *matrices[0].shape, run.rates)
