"""What is supported: Megatron versions, layouts and flags, and how the rest is refused."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

from megatron.core.package_info import __version__ as megatron_version

from megatron_aro.config import ADAMW, flag
from megatron_aro.megatron import arguments
from megatron_aro.version import TESTED

OVERRIDE = "MEGATRON_ARO_ALLOW_UNTESTED"
ADAM_ONLY = megatron_version.startswith("0.18.")  # what its distributed optimizer takes


class RefusedError(ValueError):
    """Settings that cannot work; the message is one sentence that says what to do."""


def check_megatron_version() -> None:
    """Refuse a megatron-core that the hooks were not tested on.

    Raises:
        RuntimeError: unless the environment variable MEGATRON_ARO_ALLOW_UNTESTED is 1.
    """
    found = megatron_version.partition("+")[0]  # a git checkout adds its commit
    tested = TESTED["megatron-core"]
    if found not in tested and os.environ.get(OVERRIDE) != "1":
        raise RuntimeError(
            f"megatron-aro is tested with megatron-core {', '.join(tested)} and found "
            f"{found}: install a tested version, or set {OVERRIDE}=1 to try this one."
        )


class Refusal(NamedTuple):
    flag: str
    applies: Callable[[Any], bool]
    reason: str
    way_out: str


def _is_set(name: str) -> Callable[[Any], bool]:
    return lambda args: bool(getattr(args, name, None))


_REFUSALS = (
    Refusal(
        "--num-distributed-optimizer-instances with --aro-sharing",
        lambda args: (
            getattr(args, "aro_sharing", "none") != "none"
            and getattr(args, "num_distributed_optimizer_instances", 1) > 1
        ),
        "a rotation is shared over all ranks, and each instance has all of its matrices",
        "drop one of the flags",
    ),
    Refusal(
        "--aro-param-layout whole without --use-distributed-optimizer",
        lambda args: args.aro_param_layout == "whole" and not args.use_distributed_optimizer,
        "parameters are then replicated and nothing cuts them",
        "add the latter or drop the former",
    ),
    Refusal(
        "--aro-param-layout whole with --aro-mode full-model",
        lambda args: args.aro_param_layout == "whole" and args.aro_mode == "full-model",
        "a rank would hold a whole vocabulary matrix",
        "use packed",
    ),
    Refusal(
        "--fp16", _is_set("fp16"), "ARO has no loss scaling", "use --bf16, or float32 without it"
    ),
    Refusal(
        "--use-megatron-fsdp",
        _is_set("use_megatron_fsdp"),
        "its sharded parameters are not Megatron's flat buffers",
        "use --use-distributed-optimizer",
    ),
    Refusal(
        "--use-torch-fsdp2",
        _is_set("use_torch_fsdp2"),
        "its sharded parameters are not Megatron's flat buffers",
        "use --use-distributed-optimizer",
    ),
    Refusal(
        "--use-precision-aware-optimizer",
        _is_set("use_precision_aware_optimizer"),
        "ARO keeps main parameters and momentum in float32",
        "drop the flag",
    ),
    Refusal(
        "--optimizer-cpu-offload",
        _is_set("optimizer_cpu_offload"),
        "ARO's step runs where the gradients are",
        "drop the flag",
    ),
    Refusal(
        "--moe-mlp-glu-interleave-size",
        _is_set("moe_mlp_glu_interleave_size"),
        "ARO does not split interleaved gates yet",
        "drop the flag",
    ),
    Refusal(
        "--moe-shared-expert-glu-interleave-size",
        _is_set("moe_shared_expert_glu_interleave_size"),
        "ARO does not split interleaved gates yet",
        "drop the flag",
    ),
    Refusal(
        "--dump-param-to-param-group-map",
        _is_set("dump_param_to_param_group_map"),
        "the map is of one optimizer, and ARO has AdamW beside it",
        "read the table printed at start-up",
    ),
    Refusal(
        "--rl-offload-optimizer-during-inference",
        _is_set("rl_offload_optimizer_during_inference"),
        "the rotations would stay behind",
        "drop the flag",
    ),
    Refusal(
        "--optimizer-cuda-graph",
        _is_set("optimizer_cuda_graph"),
        "ARO reads a flag from the GPU in each step",
        "drop the flag",
    ),
    Refusal(
        "--cuda-graph-impl full_iteration",
        lambda args: getattr(args, "cuda_graph_impl", None) == "full_iteration",
        "ARO reads a flag from the GPU in each step",
        "use another implementation of CUDA graphs",
    ),
    Refusal(
        "--fp8-param-gather",
        _is_set("fp8_param_gather"),
        "ARO is not tested with quantized parameters",
        "drop the flag",
    ),
    Refusal(
        "--fp4-param-gather",
        _is_set("fp4_param_gather"),
        "ARO is not tested with quantized parameters",
        "drop the flag",
    ),
    Refusal(
        "--overlap-param-gather-with-optimizer-step",
        _is_set("overlap_param_gather_with_optimizer_step"),
        "ARO steps all model chunks together",
        "drop the flag; --overlap-param-gather works",
    ),
    Refusal(
        "--yaml-cfg",
        lambda args: getattr(args, "yaml_cfg", None) is not None,
        "Megatron's YAML configuration has no place for ARO's settings",
        "use flags",
    ),
    Refusal(
        "--non-persistent-ckpt-type local",
        lambda args: getattr(args, "non_persistent_ckpt_type", None) == "local",
        "ARO is not tested with checkpoints in memory",
        "use global",
    ),
    Refusal(
        "--ckpt-format",
        lambda args: args.ckpt_format not in ("torch", "torch_dist"),
        "ARO saves rotations in torch_dist and torch checkpoints",
        "use torch_dist",
    ),
)


_NOT_NEGATIVE = (
    "lr",
    "min_lr",
    "decoupled_lr",
    "decoupled_min_lr",
    "lr_warmup_init",
    "weight_decay",
    "start_weight_decay",
    "end_weight_decay",
    "clip_grad",
    "adam_eps",
    "init_method_std",
)
_BELOW_ONE = ("adam_beta1", "adam_beta2", "hidden_dropout", "attention_dropout")
_AT_LEAST_ONE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "seq_length",
    "max_position_embeddings",
    "vocab_size",
    "micro_batch_size",
    "global_batch_size",
    "log_interval",
)


def check_numbers(args: argparse.Namespace) -> None:
    """Refuse rates, decays and sizes out of range, for any optimizer.

    Megatron lets some of them train, and others end in a division by zero.

    Raises:
        RefusedError: naming flag, value and rule.
    """
    for names, limit in ((_NOT_NEGATIVE, math.inf), (_BELOW_ONE, 1.0)):
        for name in names:
            value = getattr(args, name, None)
            if value is not None and not 0 <= value < limit:
                rule = "finite" if limit == math.inf else "below 1"
                megatrons = "--" + name.replace("_", "-")
                raise RefusedError(f"{megatrons} is {value}: it must be {rule} and not negative.")
    for name in _AT_LEAST_ONE:
        value = getattr(args, name, None)
        if value is not None and value < 1:
            megatrons = "--" + name.replace("_", "-")
            raise RefusedError(f"{megatrons} is {value}: it must be at least 1.")
    try:
        arguments.aro_config(args)
    except ValueError as error:
        raise RefusedError(str(error)) from None


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse what ARO cannot do right, before anything is built.

    Raises:
        RefusedError: one sentence that names the flag, the reason and the way out.
    """
    for refusal in _REFUSALS:
        if refusal.applies(args):
            raise RefusedError(
                f"--optimizer aro does not work with {refusal.flag}: {refusal.reason}; "
                f"{refusal.way_out}."
            )
    if args.lr is None:
        raise RefusedError("--optimizer aro needs a learning rate: give --lr.")


def check_configs(*configs: Any) -> None:
    """The same for those who have Megatron's configuration objects, not its command line.

    Args:
        configs: of optimizer, DDP and model; their fields are called as Megatron's arguments are.

    Raises:
        RefusedError: as `check_arguments`.
    """
    fields = {name: value for config in configs for name, value in vars(config).items()}
    check_arguments(argparse.Namespace(**{"ckpt_format": "torch_dist", **fields}))


# Settings that decide what a rotation or a moment is of. The rest may change in mid-training.
_FIXED = ("projection", "rotation", "orientation", "override", "split", "sharing")
# What fixes pieces of flat buffers, and the files of format torch.
_LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "use_distributed_optimizer",
    "aro_param_layout",
    "num_distributed_optimizer_instances",
)


def check_checkpoint(args: argparse.Namespace, state: dict[str, Any]) -> None:
    """Refuse to load optimizer state that this run cannot take over.

    Args:
        state: the part of the checkpoint that is read first: with "args", those of the run that
            saved, and, in torch_dist, Megatron's "content_metadata".

    Raises:
        RefusedError: before any weight changes.
    """
    saved = state["args"]
    bare = saved.no_save_optim or args.no_save_optim
    if args.finetune or args.no_load_optim:
        return
    if bare and arguments.NAME in (args.optimizer, saved.optimizer):
        raise RefusedError(
            "One of the two runs has --no-save-optim, with which Megatron neither saves nor loads "
            "optimizer state: drop it, or take the weights alone with --no-load-optim."
        )
    if saved.no_save_optim or arguments.NAME not in (args.optimizer, saved.optimizer):
        return
    if args.optimizer != saved.optimizer:
        _check_change(args, saved, state.get("content_metadata"))
    if args.use_checkpoint_opt_param_scheduler and args.lr != saved.lr:
        raise RefusedError(
            f"--use-checkpoint-opt-param-scheduler takes the checkpoint's schedule, whose --lr is "
            f"{saved.lr}, and --lr is {args.lr}: give the same, or "
            "--override-opt-param-scheduler."
        )
    _check_layout(args, saved, state.get("content_metadata"))
    changed = changed_settings(args, saved)
    before, now = _adamws(saved), _adamws(args)
    if saved.optimizer == args.optimizer and before != now:
        raise RefusedError(
            f"The checkpoint's run sent {before} to AdamW with --aro-override, this one {now}: go "
            "on as it was, since a parameter has the state of one optimizer, or take the weights "
            "alone with --no-load-optim."
        )
    modes = [arguments.aro_config(x).mode for x in (saved, args)]
    if saved.optimizer == args.optimizer and modes[0] != modes[1]:
        raise RefusedError(
            f"The checkpoint's run had --aro-mode {modes[0]}, this one {modes[1]}: go on as it "
            "was, since a parameter has the state of one optimizer, or take the weights alone "
            "with --no-load-optim."
        )
    restartable = args.aro_init_rotation and state.get("content_metadata") is not None
    if changed and not restartable:
        raise RefusedError(
            f"The checkpoint's rotations are not of this run's settings, which change "
            f"{', '.join(changed)}: go back to them, keep the momenta and start other rotations "
            "with --aro-init-rotation identity (or qr; not in format torch), or take the weights "
            "alone with --no-load-optim."
        )


def changed_settings(args: argparse.Namespace, saved: argparse.Namespace) -> list[str]:
    """The settings that decide what a rotation is of, as "flag from this to that"."""
    if not saved.optimizer == args.optimizer == arguments.NAME:
        return []
    before, now = (asdict(arguments.aro_config(x)) for x in (saved, args))
    return [
        f"{flag(name)} from {before[name]} to {now[name]}"
        for name in _FIXED
        if before[name] != now[name]
    ]


def _adamws(args: argparse.Namespace) -> str:
    exceptions = arguments.aro_config(args).exceptions
    return ", ".join(sorted(pattern for pattern, rule in exceptions if rule == ADAMW)) or "nothing"


def _check_change(
    args: argparse.Namespace, saved: argparse.Namespace, metadata: dict[str, Any] | None
) -> None:
    """From AdamW's or Muon's state to ARO's, and back to AdamW's, only as the flags say it."""
    change = f"The checkpoint's optimizer is {saved.optimizer}, this run's is {args.optimizer}: "
    if args.optimizer not in (arguments.NAME, arguments.ADAM):
        raise RefusedError(
            change + "go on with its optimizer or with AdamW, or take its weights alone with "
            "--no-load-optim."
        )
    if metadata is None:
        raise RefusedError(
            change + "of a checkpoint of format torch take the weights alone with --no-load-optim."
        )
    if args.optimizer == arguments.ADAM and not args.aro_init_exp_avg:
        raise RefusedError(
            change + "say what AdamW starts from, --aro-init-exp-avg momentum (or zero), or take "
            "its weights alone with --no-load-optim."
        )
    if args.optimizer == arguments.NAME and not (args.aro_init_momentum and args.aro_init_rotation):
        raise RefusedError(
            change + "say what ARO starts from, --aro-init-momentum exp_avg (or zero) and "
            "--aro-init-rotation identity (or qr), or take its weights alone with --no-load-optim."
        )


def _in_model_space(metadata: dict[str, Any]) -> bool:
    return metadata.get("distrib_optim_sharding_type") == "fully_reshardable"


def _check_layout(
    args: argparse.Namespace, saved: argparse.Namespace, metadata: dict[str, Any] | None
) -> None:
    if args.bf16 != saved.bf16:
        raise RefusedError(
            f"The checkpoint's run had --bf16 {'on' if saved.bf16 else 'off'}, this one has not: "
            "go on with its precision, or take its weights alone with --no-load-optim."
        )
    if metadata is None:
        reason, way_out = "is of format torch, a file a rank", "--ckpt-format torch_dist"
    elif saved.use_distributed_optimizer and not _in_model_space(metadata):
        reason = "has optimizer state in pieces of flat buffers"
        way_out = "--dist-ckpt-optim-fully-reshardable"
    else:
        return
    moved = [
        f"{name} from {before} to {getattr(args, name)}"
        for name in _LAYOUT
        if (before := getattr(saved, name, None)) != getattr(args, name)
    ]
    if moved:
        raise RefusedError(
            f"The checkpoint was saved with another layout, {', '.join(moved)}, and {reason}: "
            f"resume it as it was and save with {way_out}, or take its weights by --no-load-optim."
        )
