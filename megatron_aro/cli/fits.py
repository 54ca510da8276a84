"""Which layouts of some GPUs hold a model, for `megatron-aro plan --fits`.

Megatron's own validation judges each layout. Its memory is the plan's (`sharding.account`) and an
estimate of activations (`cli.activations`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_aro.cli import activations, parsing, plan
from megatron_aro.sharding.account import Account, Figures, Run, account
from megatron_aro.sharding.cost import FP32
from megatron_aro.sharding.gpt import GPT

GIB = 2.0**30
# Kept free for CUDA, NCCL, cuBLAS and what the allocator cannot use: a guess.
RESERVE_GIB = 4.0
# Predicted times up to so many times the fastest count as equal; the model resolves no more.
BAND = 1.1
_SHOWN = 20
_REASONS = 6


class Layout(NamedTuple):
    """Ranks of each kind of parallelism."""

    tp: int
    pp: int
    ep: int
    distributed: bool
    cp: int

    def __str__(self) -> str:
        sizes = f"TP {self.tp}, PP {self.pp}, CP {self.cp}, EP {self.ep}"
        return f"{sizes}, {'distributed' if self.distributed else 'replicated'}"

    def flags(self) -> str:
        """Megatron's."""
        return (
            f"--tensor-model-parallel-size {self.tp} --pipeline-model-parallel-size {self.pp} "
            f"--context-parallel-size {self.cp} --expert-model-parallel-size {self.ep}"
        ) + (" --use-distributed-optimizer" if self.distributed else "")


@dataclass(frozen=True)
class Memory:
    """What a rank holds, in bytes.

    Attributes:
        optimizer: main parameters, AdamW's moments, ARO's momenta, rotations and CUDA graphs.
        step: what ARO's step takes for a while: gathered matrices, exchange, workspace, and
            gradients in float32 where they are kept in bf16.
        activations: estimated; they are gone when the step begins.
    """

    weights: float
    gradients: float
    optimizer: float
    step: float
    activations: float

    @property
    def kept(self) -> float:
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return self.kept + max(self.step, self.activations)


@dataclass(frozen=True)
class Measured:
    """A layout that Megatron takes.

    Attributes:
        dp: data-parallel ranks.
        memory: of the fullest rank.
        milliseconds: ARO's step of the slowest rank, predicted for H100s.
        idle: share of the time that a rank waits in the pipeline.
        tokens: "micro batch x sequence".
    """

    layout: Layout
    dp: int
    memory: Memory
    milliseconds: float
    idle: float
    tokens: str


@dataclass
class Search:
    """What came of all layouts.

    Attributes:
        fits: the best first.
        others: that do not hold the model, those that lack least first.
        refused: reason -> layouts.
        parameters: of the model.
    """

    fits: list[Measured]
    others: list[Measured]
    refused: Counter[str]
    parameters: int


def run(args: argparse.Namespace, flags: Sequence[str], gpus: int, per_machine: int) -> int:
    """Search and print; 1 if nothing fits.

    Args:
        args: the command's.
        flags: Megatron's.
        per_machine: GPUs.

    Raises:
        ValueError, AssertionError: no layout can be measured.
    """
    if args.gib <= RESERVE_GIB:
        raise ValueError(
            f"--gib {args.gib:g}: {RESERVE_GIB:g} GiB of a GPU are kept free; give more."
        )
    fixed = {name: getattr(args, name) for name in ("tp", "pp", "ep", "cp")}
    found = search(
        flags, gpus, args.gib, fixed=fixed, most_tp=per_machine, replicated=args.replicated
    )
    if args.json:
        print(json.dumps(as_json(found, gpus, args.gib), indent=2))
    else:
        print(as_text(found, gpus, args.gib, args.tp or per_machine))
    return 0 if found.fits else 1


def search(
    flags: Sequence[str],
    gpus: int,
    gib: float,
    *,
    fixed: Mapping[str, int | None],
    most_tp: int,
    replicated: bool,
) -> Search:
    """Measure every layout.

    Context parallelism shrinks nothing but activations: a larger one is tried only where a smaller
    one leaves too little for them.

    Args:
        flags: Megatron's; their layout is overridden.
        fixed: sizes by name of `Layout`, None to try all.
        most_tp: the largest TP tried unless it is fixed.
        replicated: try no distributed optimizer.

    Raises:
        ValueError: there is no layout, or Megatron takes none; then the reason of the first.
    """
    validate = parsing.validator(flags, gpus)
    room = (gib - RESERVE_GIB) * GIB
    found: list[Measured] = []
    refused: Counter[str] = Counter()
    gpt: GPT | None = None
    parameters = 0
    settled = None  # the layout whose larger CPs are not worth trying
    for layout in _layouts(gpus, fixed, most_tp, replicated):
        uneven = gpt and layout.ep > 1 and (not gpt.experts or gpt.experts % layout.ep)
        if settled == layout[:-1] or uneven:
            continue
        try:
            if gpt:
                check_division(gpt, layout)
            args = validate(_override(layout))
            plan.check_optimizer(args)
            config = plan.transformer_config(args)
            gpt = plan.gpt_sizes(args, config)
            check_division(gpt, layout)
            check_training(gpt, args)
            stages, run = plan.pipeline(config), plan.run_settings(args)
        except (ValueError, AssertionError) as error:
            refused[" ".join(str(error).split()) or repr(error)] += 1
            continue
        given = activations.Settings.of(args, config)
        of_stage = [
            sum(activations.stage_bytes(gpt, chunks, stage, given))
            for stage, chunks in enumerate(stages)
        ]
        result = account(gpt, stages, run)
        parameters = result.parameters
        measured = Measured(
            layout,
            args.data_parallel_size,
            max(of_ranks(result, run, args, of_stage), key=lambda memory: memory.total),
            result.spread("milliseconds")[2],
            idle=(layout.pp - 1) / (given.virtual * given.micro_batches + layout.pp - 1),
            tokens=f"{args.micro_batch_size} x {args.seq_length:,}",
        )
        if measured.memory.total <= room or measured.memory.kept + measured.memory.step > room:
            settled = layout[:-1]
        found.append(measured)
    if not found:
        raise ValueError(next(iter(refused), f"{gpus} GPUs do not divide by the sizes given."))
    fits = [m for m in found if m.memory.total <= room]
    fastest = min((m.milliseconds for m in fits), default=1.0) or 1.0

    def rank(m: Measured) -> tuple[int, float]:
        band = math.floor(math.log(max(m.milliseconds, fastest) / fastest, BAND))
        return band, m.memory.total

    others = [m for m in found if m.memory.total > room]
    others.sort(key=lambda m: m.memory.total)
    return Search(sorted(fits, key=rank), others, refused, parameters)


def check_division(gpt: GPT, layout: Layout) -> None:
    """Refuse what Megatron would refuse only while it builds or trains the model.

    Raises:
        ValueError: naming the size that does not divide.
    """
    for what, size in {
        "attention heads": gpt.heads,
        "query groups": gpt.groups,
        "elements of the MLP": gpt.ffn,
        "elements of the shared expert": gpt.shared_ffn,
    }.items():
        if size % layout.tp:
            raise ValueError(f"{size:,} {what} do not divide by TP {layout.tp}.")


def check_training(gpt: GPT, args: argparse.Namespace) -> None:
    """The same of what depends on more of Megatron's validated arguments.

    Raises:
        ValueError: naming the size or the flag.
    """
    tp, etp = args.tensor_model_parallel_size, args.expert_tensor_parallel_size
    tokens = args.seq_length // args.context_parallel_size
    if args.sequence_parallel and tokens % tp:
        raise ValueError(f"{tokens:,} tokens of a sequence do not divide by TP {tp}.")
    if gpt.experts and gpt.moe_ffn % etp:
        raise ValueError(f"{gpt.moe_ffn:,} elements of an expert do not divide by expert TP {etp}.")
    if gpt.experts and tp > 1 and not args.sequence_parallel:
        raise ValueError("Experts train with TP only if --sequence-parallel is given.")


def of_ranks(
    result: Account, run: Run, args: argparse.Namespace, of_stage: Sequence[float]
) -> list[Memory]:
    """What each rank holds.

    Args:
        args: Megatron's, validated.
        of_stage: bytes of activations by pipeline stage.
    """
    element = 2 if args.bf16 else FP32

    def memory(rank: int, figures: Figures) -> Memory:
        momentum = figures.momentum / FP32  # elements
        float32 = FP32 * (momentum + figures.adamw)
        optimizer: float = figures.momentum + 2 * FP32 * figures.adamw + figures.rotation
        optimizer += figures.graphs
        if args.bf16:
            optimizer += float32  # main parameters
        if args.aro_projection == "adam":
            optimizer += figures.gathered  # a second moment of its matrices, [k, n] each
        step: float = figures.gathered + figures.exchange + figures.workspace
        if run.gradient_bytes < FP32:
            step += float32
        return Memory(
            weights=element * figures.stored,
            gradients=run.gradient_bytes * figures.stored,
            optimizer=optimizer,
            step=step,
            activations=of_stage[rank // run.per_stage],
        )

    return [memory(rank, figures) for rank, figures in enumerate(result.ranks)]


def as_text(found: Search, gpus: int, gib: float, most_tp: int) -> str:
    """The table of what fits, and what its columns and its order mean."""
    shown = found.fits or found.others
    lines = [
        f"{found.parameters:,} parameters on {gpus} GPUs of {gib:g} GiB, {RESERVE_GIB:g} of them "
        f"kept free; micro batch {shown[0].tokens} tokens",
        "",
    ]
    if not found.fits:
        nearest = found.others[0]
        lacks = nearest.memory.total / GIB + RESERVE_GIB - gib
        lines.append(f"Nothing fits. The nearest, {nearest.layout}, lacks {lacks:.1f} GiB:")
        shown = [nearest]
    lines += _table(shown[:_SHOWN], gib)
    if found.fits:
        more = len(found.fits) - _SHOWN
        lines += [f"and {more} more"] if more > 0 else []
        lines += ["", f"The first as flags: {found.fits[0].layout.flags()}"]
        if found.others:
            lines.append(f"Too large for {gib:g} GiB, {len(found.others)}.")
    lines += [f"Refused, {n}: {why}" for why, n in found.refused.most_common(_REASONS)]
    lines += [
        "",
        f"GiB of the fullest rank. {RESERVE_GIB:g} GiB are kept free for CUDA, NCCL and the "
        "allocator: a guess. From the plan, element by element: weights; gradients; optimizer "
        "(main parameters, AdamW's moments, ARO's momenta, rotations and graphs); step (what ARO's "
        "step takes for a while). Estimated: activations (what the backward pass needs, with the "
        "recomputation that the flags ask for). They are gone when the step begins, so the larger "
        "of the two counts.",
        f"Order: the predicted time of ARO's step of the slowest rank, in bands of {BAND - 1:.0%}; "
        "within a band most memory left first. The model's own time is not in it: less TP and PP "
        f"is quicker as a rule, and idle is the pipeline's share of waiting. TP is at most "
        f"{most_tp}, the GPUs of a machine.",
    ]
    return "\n".join(lines)


def as_json(found: Search, gpus: int, gib: float) -> dict[str, Any]:
    """The search in bytes and milliseconds."""

    def entry(m: Measured) -> dict[str, Any]:
        return {
            **m.layout._asdict(),
            "dp": m.dp,
            "bytes": {**dataclasses.asdict(m.memory), "total": m.memory.total},
            "milliseconds": m.milliseconds,
            "idle": m.idle,
            "flags": m.layout.flags(),
        }

    return {
        "gpus": gpus,
        "gib": gib,
        "reserve_gib": RESERVE_GIB,
        "parameters": found.parameters,
        "fits": [entry(m) for m in found.fits],
        "too_large": [entry(m) for m in found.others],
        "refused": dict(found.refused),
    }


def _table(shown: Sequence[Measured], gib: float) -> list[str]:
    lines = [
        f"{'TP':>3} {'PP':>3} {'CP':>3} {'EP':>3} {'DP':>5}  {'parameters':11} {'weights':>7} "
        f"{'gradients':>9} {'optimizer':>9} {'step':>6} {'activations':>11} {'left':>6} "
        f"{'idle':>5} {'ARO ms':>8}"
    ]
    for m in shown:
        at, memory = m.layout, m.memory
        left = gib - RESERVE_GIB - memory.total / GIB
        lines.append(
            f"{at.tp:3} {at.pp:3} {at.cp:3} {at.ep:3} {m.dp:5}  "
            f"{'distributed' if at.distributed else 'replicated':11} {memory.weights / GIB:7.1f} "
            f"{memory.gradients / GIB:9.1f} {memory.optimizer / GIB:9.1f} "
            f"{memory.step / GIB:6.1f} {memory.activations / GIB:11.1f} {left:6.1f} "
            f"{m.idle:5.0%} {m.milliseconds:8.1f}"
        )
    return lines


def _layouts(
    gpus: int, fixed: Mapping[str, int | None], most_tp: int, replicated: bool
) -> Iterator[Layout]:
    """All that divide, larger CPs of a layout directly after smaller ones."""

    def sizes(name: str, of: int, most: int | None = None) -> list[int]:
        wanted = fixed[name]
        tried = [wanted] if wanted else range(1, min(of, most or of) + 1)
        return [n for n in tried if of % n == 0]

    for tp in sizes("tp", gpus, most_tp):
        for pp in sizes("pp", gpus // tp):
            for ep in sizes("ep", gpus // pp):
                alone = gpus == tp * pp  # nothing to distribute over
                for distributed in [False] if replicated else [True] if alone else [True, False]:
                    for cp in sizes("cp", gpus // (tp * pp)):
                        yield Layout(tp, pp, ep, distributed, cp)


def _override(layout: Layout) -> Callable[[argparse.Namespace], None]:
    def adjust(args: argparse.Namespace) -> None:
        args.tensor_model_parallel_size = layout.tp
        args.pipeline_model_parallel_size = layout.pp
        args.context_parallel_size = layout.cp
        args.expert_model_parallel_size = layout.ep
        args.use_distributed_optimizer = layout.distributed
        args.overlap_param_gather &= layout.distributed
        args.micro_batch_size = args.micro_batch_size or 1
        args.rampup_batch_size = None

    return adjust
