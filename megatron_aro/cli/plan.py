"""Show what ARO costs each rank of a layout, without a GPU and without starting processes.

    megatron-aro plan --world-size 64 --tp 4 -- <Megatron's model flags>
    megatron-aro plan --config configs/qwen3_8b.yaml configs/parallel/64_gpus.yaml
    megatron-aro plan --fits --gpus 8 --gib 80 --config configs/qwen3_8b.yaml

Megatron's own parser reads the flags. Times are predictions for H100s, for ARO's work alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Sequence
from typing import Any

from megatron_aro.cli import configs, parsing
from megatron_aro.sharding.account import Account, Run, account
from megatron_aro.sharding.buffers import padding_note
from megatron_aro.sharding.cost import rates_of
from megatron_aro.sharding.gpt import GPT, Chunk, Split

# Before the user's flags; they say nothing about the plan, but Megatron wants them.
_DEFAULTS = """--seq-length 4096 --max-position-embeddings 4096 --lr 1e-4 --train-iters 1
    --tokenizer-type NullTokenizer --optimizer aro""".split()
# What would change a GPT's parameters in ways that `sharding.gpt` does not know.
_UNKNOWN = {
    "multi_latent_attention": "--multi-latent-attention",
    "mtp_num_layers": "--mtp-num-layers",
    "hybrid_layer_pattern": "--hybrid-layer-pattern",
    "hybrid_override_pattern": "--hybrid-override-pattern",
    "is_hybrid_model": "--is-hybrid-model",
    "experimental_attention_variant": "--experimental-attention-variant",
    "heterogeneous_layers_config_path": "--heterogeneous-layers-config-path",
    "heterogeneous_layers_config_encoded_json": "--heterogeneous-layers-config-encoded-json",
    "moe_latent_size": "--moe-latent-size",
    "use_megatron_fsdp": "--use-megatron-fsdp",
    "use_torch_fsdp2": "--use-torch-fsdp2",
}
# Kernels that this machine may lack; parameters are the same without.
_KERNELS = ("apply_rope_fusion", "moe_permute_fusion", "moe_router_fusion")
_GPUS_OF_A_MACHINE = 8  # where no --config says
# Figure -> (title, what one shown unit is).
_ROWS = {
    "matrices": ("matrices owned", 1.0),
    "flops": ("TFLOP", 1e12),
    "milliseconds": ("predicted ms", 1.0),
    "dp_sent": ("MiB sent over DP", 2.0**20),
    "dp_received": ("MiB received over DP", 2.0**20),
    "tp_sent": ("MiB sent over TP", 2.0**20),
    "tp_received": ("MiB received over TP", 2.0**20),
    "summed": ("MiB summed over ranks", 2.0**20),
    "shared_sent": ("MiB of rotations sent", 2.0**20),
    "gradients": ("MiB of gradients sent", 2.0**20),
    "buffered": ("M elements, ARO buffers", 1e6),
    "padding": ("  of them padded by whole", 1e6),
    "momentum": ("MiB momentum", 2.0**20),
    "rotation": ("MiB rotations", 2.0**20),
    "gathered": ("MiB gathered matrices", 2.0**20),
    "exchange": ("MiB exchange buffers", 2.0**20),
    "workspace": ("MiB workspace", 2.0**20),
    "graphs": ("MiB of CUDA graphs", 2.0**20),
}


def add_parser(commands: Any) -> None:
    """Add `plan` to the subcommands of an argparse parser."""
    parser = commands.add_parser(
        "plan", help="what ARO costs each rank of a layout", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--world-size",
        "--gpus",
        type=_positive,
        metavar="N",
        help="ranks; by default those of --config",
    )
    parser.add_argument(
        "--fits",
        action="store_true",
        help="list the layouts that fit into --gib, in place of one layout's plan; sizes given by "
        "--tp and the others are kept",
    )
    parser.add_argument("--gib", type=_positive_number, metavar="M", help="memory of a GPU")
    parser.add_argument(
        "--config", nargs="+", default=[], metavar="FILE", help="as for megatron-aro train"
    )
    for name, what in {
        "tp": "tensor",
        "pp": "pipeline",
        "cp": "context",
        "ep": "expert",
        "etp": "expert-tensor",
    }.items():
        parser.add_argument(
            f"--{name}", type=_positive, metavar="N", help=f"{what}-parallel size; Megatron's flag"
        )
    parser.add_argument(
        "--replicated", action="store_true", help="without Megatron's distributed optimizer"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes and operations")
    parser.add_argument("flags", nargs="*", help="Megatron's model flags, after --")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan and print.

    Returns:
        1 if no layout fits, else 0.

    Raises:
        ValueError, AssertionError: settings that Megatron or the plan cannot do.
    """
    given = parsing.read_configs(args.config, unset=lambda name, where: None)
    if args.world_size is None and not given.launch:
        raise ValueError("How many ranks? Give --world-size, or a --config with LAUNCH.")
    if args.fits != (args.gib is not None):
        raise ValueError("--fits and --gib go together: --fits --gpus 8 --gib 80, say.")
    if args.replicated:
        for flag in ("--use-distributed-optimizer", "--overlap-param-gather"):
            given.flags.pop(flag, None)
    flags = _megatron_flags(args, configs.arguments(given))
    ranks = args.world_size or given.world_size
    if args.fits:
        from megatron_aro.cli import fits  # which imports this file

        per_machine = given.integer("gpus_per_node", _GPUS_OF_A_MACHINE)
        return fits.run(args, flags, ranks, per_machine)
    megatron, config = parse(flags, ranks)
    check_optimizer(megatron)
    began = time.perf_counter()
    settings = run_settings(megatron)
    result = account(gpt_sizes(megatron, config), pipeline(config), settings)
    took = time.perf_counter() - began
    if args.json:
        print(json.dumps(as_json(result, settings, took), indent=2))
    else:
        print(as_text(result, settings, took))
    return 0


def check_optimizer(args: argparse.Namespace) -> None:
    """Refuse to plan for another optimizer.

    Raises:
        ValueError: naming it.
    """
    if args.optimizer != "aro":
        raise ValueError(
            f"The plan is ARO's, and the config's optimizer is {args.optimizer}: add "
            "configs/optimizer/aro.yaml after it."
        )


def parse(flags: Sequence[str], world_size: int) -> tuple[argparse.Namespace, Any]:
    """Megatron's validated arguments and its TransformerConfig; its output is dropped.

    Raises:
        ValueError: a flag is unknown, or its effect on the parameters is.
    """
    args = parsing.validated(flags, world_size, _override_batch)
    return args, transformer_config(args)


def transformer_config(args: argparse.Namespace) -> Any:
    """Megatron's TransformerConfig of validated arguments.

    Raises:
        ValueError: what the flags do to the parameters is not known here.
    """
    for name, flag in _UNKNOWN.items():
        if getattr(args, name, None):
            raise ValueError(f"megatron-aro plan does not know the parameters under {flag}.")
    if args.vocab_size is None:
        raise ValueError("Give --vocab-size: no tokenizer is loaded here.")
    from megatron.training import arguments

    vars(args).update(dict.fromkeys(_KERNELS, False))
    with parsing.quiet():
        return arguments.core_transformer_config_from_args(args)


def _megatron_flags(args: argparse.Namespace, of_config: Sequence[str]) -> list[str]:
    sizes = {
        "--tensor-model-parallel-size": args.tp,
        "--pipeline-model-parallel-size": args.pp,
        "--context-parallel-size": args.cp,
        "--expert-model-parallel-size": args.ep,
        "--expert-tensor-parallel-size": args.etp,
    }
    layout = [word for flag, n in sizes.items() if n for word in (flag, str(n))]
    by_config = args.replicated or args.config
    distributed = [] if by_config else ["--use-distributed-optimizer"]
    data = [] if args.config else ["--mock-data"]
    return [*_DEFAULTS, *data, *of_config, *args.flags, *layout, *distributed]


def _override_batch(args: argparse.Namespace) -> None:
    """Batches have no effect on the plan, and need not fit the layout that is tried."""
    args.micro_batch_size, args.rampup_batch_size = 1, None
    args.global_batch_size = args.world_size // (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )


def gpt_sizes(args: argparse.Namespace, config: Any) -> GPT:
    """The model that Megatron would build from these arguments."""
    from megatron_aro.megatron.arguments import aro_config

    vocabulary = args.padded_vocab_size
    if not vocabulary:
        from megatron.training.vocab_utils import calculate_padded_vocab_size

        vocabulary = calculate_padded_vocab_size(
            args.vocab_size,
            args.make_vocab_size_divisible_by,
            args.tensor_model_parallel_size,
            logging_enabled=False,
        )
    frequency = args.moe_layer_freq
    if isinstance(frequency, int):
        frequency = [int(layer % frequency == 0) for layer in range(args.num_layers)]
    return GPT(
        layers=args.num_layers,
        hidden=config.hidden_size,
        ffn=config.ffn_hidden_size,
        heads=config.num_attention_heads,
        groups=config.num_query_groups,
        head=config.kv_channels,
        vocabulary=vocabulary,
        tied=not args.untie_embeddings_and_output_weights,
        positions=args.max_position_embeddings
        if args.position_embedding_type == "learned_absolute"
        else 0,
        gated=config.gated_linear_unit,
        attention_gate=bool(getattr(config, "attention_output_gate", False)),
        norm_bias=config.normalization == "LayerNorm",
        linear_bias=config.add_bias_linear,
        qkv_bias=config.add_qkv_bias,
        qk_norm=config.qk_layernorm,
        moe=tuple(map(bool, frequency)) if config.num_moe_experts else (),
        experts=config.num_moe_experts or 0,
        moe_ffn=config.moe_ffn_hidden_size or config.ffn_hidden_size,
        shared_ffn=config.moe_shared_expert_intermediate_size or 0,
        shared_gate=bool(getattr(config, "moe_shared_expert_gate", False)),
        grouped=bool(args.moe_grouped_gemm),
        aro=aro_config(args),
    )


def pipeline(config: Any) -> list[list[Chunk]]:
    """The chunks of each pipeline stage, by Megatron's own rules, custom layouts included."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    pp, vpp = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    custom = config.pipeline_model_parallel_layout
    stages: list[list[Chunk]] = [[] for _ in range(pp)]
    built = 0
    for v in range(vpp or 1):
        for p in range(pp):
            if custom is not None:
                kinds = custom.layout[p][v]
                count, offset = kinds.count(LayerType.decoder), built
                first, last = LayerType.embedding in kinds, LayerType.loss in kinds
            else:
                stage = v if vpp else None
                count = get_num_layers_to_build(config, stage, p)
                offset = get_transformer_layer_offset(config, stage, p)
                first, last = p == v == 0, p == pp - 1 and v == (vpp or 1) - 1
            stages[p].append(Chunk(tuple(range(offset, offset + count)), first, last))
            built += count
    return stages


def run_settings(args: argparse.Namespace) -> Run:
    """The layout and ARO's settings in Megatron's arguments."""
    from megatron_aro.megatron.arguments import aro_config

    aro = aro_config(args)
    if args.num_distributed_optimizer_instances > 1:
        raise ValueError(
            "Every instance of the distributed optimizer steps alike: plan one, with its share "
            "of --world-size and without --num-distributed-optimizer-instances."
        )
    ranks = args.world_size // (args.tensor_model_parallel_size * args.pipeline_model_parallel_size)
    bucket_size = None
    if args.overlap_grad_reduce:
        if args.ddp_num_buckets is not None:
            raise ValueError("megatron-aro plan takes --ddp-bucket-size, not --ddp-num-buckets.")
        bucket_size = args.ddp_bucket_size or max(40_000_000, 1_000_000 * ranks)
    in_fp32 = args.accumulate_allreduce_grads_in_fp32 or not args.bf16
    return Run(
        ranks=args.world_size,
        stages=args.pipeline_model_parallel_size,
        split=Split(
            tp=args.tensor_model_parallel_size,
            etp=args.expert_tensor_parallel_size,
            ep=args.expert_model_parallel_size,
        ),
        distributed=args.use_distributed_optimizer,
        bucket_size=bucket_size,
        for_bandwidth=args.ddp_pad_buckets_for_high_nccl_busbw,
        param_layout=aro.param_layout,
        gradient_bytes=4 if in_fp32 else 2,
        workspace=aro.workspace_mib << 20,
        graphs=aro.replays,
        rates=rates_of(aro),
        exchange_bytes={"fp32": 4, "bf16": 2}[aro.exchange_dtype],
    )


def as_text(result: Account, run: Run, took: float) -> str:
    """The table, one line a figure."""
    lines = [
        f"{result.parameters:,} parameters, of which {result.aro_parameters:,} in "
        f"{result.matrices:,} matrices with {result.rotations:,} rotations are ARO's; planned in "
        f"{took:.2f} s",
        f"{run.ranks} ranks: {run.stages} stages, TP {run.split.tp}, "
        f"DP x CP {run.per_stage // run.split.tp}, EP {run.split.ep}, expert TP {run.split.etp}",
        "",
        f"{'per rank and step':24} {'min':>12} {'mean':>12} {'max':>12}",
    ]
    for name, (title, unit) in _ROWS.items():
        shown = [f"{value / unit:12,.2f}" for value in result.spread(name)]
        lines.append(f"{title:24} {' '.join(shown)}")
    lines.append(f"{'imbalance (max / mean)':24} {result.imbalance:38.2f}")
    lines.append(f"{'  at best':24} {result.best_imbalance:38.2f}")
    if run.param_layout == "whole":
        buffers = ((f.buffered, f.buffered - f.padding) for f in result.ranks)
        lines.append(padding_note(buffers))
    return "\n".join(lines)


def as_json(result: Account, run: Run, took: float) -> dict[str, Any]:
    """Everything in the table, in bytes, operations and milliseconds."""
    spreads = {
        name: dict(zip(("min", "mean", "max"), result.spread(name), strict=True)) for name in _ROWS
    }
    return {
        "run": dataclasses.asdict(run),
        "parameters": result.parameters,
        "aro_parameters": result.aro_parameters,
        "matrices": result.matrices,
        "rotations": result.rotations,
        "per_rank": spreads,
        "imbalance": result.imbalance,
        "best_imbalance": result.best_imbalance,
        "planning_seconds": took,
    }


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def _positive_number(text: str) -> float:
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError("must be positive and finite")
    return float(text)
