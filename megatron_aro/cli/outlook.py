"""What a training run will be: parameters by class, tokens, ARO's memory and time."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

from megatron_aro.cli import plan
from megatron_aro.sharding.account import account
from megatron_aro.sharding.gpt import GPT, Chunk, Parameter, Split, chunk_parameters

_MATRIX_OPTIMIZERS = {"aro": "ARO", "muon": "Muon", "dist_muon": "Muon"}


@dataclass
class Class:
    """Parameters of a kind, through the whole model."""

    parameters: int = 0
    matrices: int = 0
    aro: bool = False


def classes(gpt: GPT) -> dict[str, Class]:
    """The model's parameters by class, with the matrices that ARO steps."""
    whole = Chunk(tuple(range(gpt.layers)), first=True, last=True)
    found: dict[str, Class] = {}
    for parameter in chunk_parameters(gpt, whole, Split()):
        of_kind = found.setdefault(_kind(parameter), Class())
        of_kind.parameters += parameter.numel
        of_kind.matrices += len(parameter.matrices) + (parameter.by == "columns")
        of_kind.aro |= parameter.by != "adamw"
    return found


def active(gpt: GPT, top_k: int) -> int:
    """Parameters that take part in computing one token, embeddings and output layer left out."""
    total = 0
    for kind, of_kind in classes(gpt).items():
        if kind == "experts":
            total += of_kind.parameters * top_k // gpt.experts
        elif kind not in ("embeddings", "output layer"):
            total += of_kind.parameters
    return total


def describe(args: argparse.Namespace) -> str:
    """Tables of parameters, tokens and ARO's plan for Megatron's validated arguments."""
    try:
        config = plan.transformer_config(args)
    except ValueError as error:
        return f"No count of parameters and no plan: {error}"
    gpt = plan.gpt_sizes(args, config)
    parts = [_parameters(gpt, args), _tokens(gpt, args)]
    if args.optimizer == "aro":
        parts.append(_plan(gpt, config, args))
    else:
        parts.append(f"No plan of memory and time: it is ARO's, and this is {args.optimizer}.")
    return "\n\n".join(parts)


def _kind(parameter: Parameter) -> str:
    name = parameter.name
    if not parameter.matrices and len(parameter.shape) == 1:
        return "norms and biases"
    for part, kind in {
        "embedding.": "embeddings",
        "output_layer.": "output layer",
        ".self_attention.": "attention",
        ".router.": "routers",
        ".shared_experts.": "shared experts",
        ".experts.": "experts",
    }.items():
        if part in name:
            return kind
    return "MLP"


def _parameters(gpt: GPT, args: argparse.Namespace) -> str:
    found = classes(gpt)
    matrix_optimizer = _MATRIX_OPTIMIZERS.get(args.optimizer, args.optimizer)
    rest = "AdamW" if args.optimizer in ("adam", *_MATRIX_OPTIMIZERS) else args.optimizer
    lines = [f"{'class':18} {'parameters':>15} {'matrices':>9}  optimizer"]
    for kind, of_kind in found.items():
        by = matrix_optimizer if of_kind.aro and args.optimizer != "adam" else rest
        matrices = f"{of_kind.matrices:,}" if of_kind.matrices else "-"
        lines.append(f"{kind:18} {of_kind.parameters:15,} {matrices:>9}  {by}")
    total = sum(of_kind.parameters for of_kind in found.values())
    in_all = sum(of_kind.matrices for of_kind in found.values())
    lines.append(f"{'all':18} {total:15,} {in_all:9,}")
    if gpt.experts:
        share = active(gpt, args.moe_router_topk)
        lines.append(f"{share:,} are active in a token, beside embeddings and output layer")
    return "\n".join(lines)


def _tokens(gpt: GPT, args: argparse.Namespace) -> str:
    total = sum(of_kind.parameters for of_kind in classes(gpt).values())
    batch, length = args.global_batch_size, args.seq_length
    samples = args.train_samples or args.train_iters * batch
    tokens = samples * length
    if args.train_samples:
        steps = f"{samples:,} sequences"
    else:
        steps = f"{args.train_iters:,} iterations x {batch:,} sequences"
    return (
        f"{steps} x {length:,} tokens = {tokens:,} tokens, {tokens / total:.1f} a parameter; "
        f"{batch * length:,} tokens an iteration"
    )


def _plan(gpt: GPT, config: object, args: argparse.Namespace) -> str:
    began = time.perf_counter()
    try:
        settings = plan.run_settings(args)
    except ValueError as error:
        return f"No plan of memory and time: {error}"
    result = account(gpt, plan.pipeline(config), settings)
    slowest = result.spread("milliseconds")[2]
    text = plan.as_text(result, settings, time.perf_counter() - began)
    if args.train_iters:
        hours = slowest * args.train_iters / 3.6e6
        text += (
            f"\nARO's own work, on H100s as predicted: {slowest:,.1f} ms an iteration, "
            f"{hours:,.1f} hours in all {args.train_iters:,}"
        )
    return text
