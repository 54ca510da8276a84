"""Every Megatron name that is wrapped, each with its reason. Nothing else replaces one.

Tested on the versions in `support.TESTED_MEGATRON`. The wrappers that concern the optimizer pass
through untouched when it is not ARO. The CPU mode, which stands in for torch.cuda, is apart in
`cpu_mode`.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from megatron_aro.megatron import arguments
from megatron_aro.megatron.support import check_arguments, check_megatron_version

Original = Callable[..., Any]


def _add_megatron_arguments(original: Original, parser: Any) -> Any:
    return arguments.add_arguments(original(parser))


def _validate_args(original: Original, args: Any, *rest: Any, **kwargs: Any) -> Any:
    if args.optimizer != arguments.NAME:
        for name in arguments.ineffective_flags(args):
            warnings.warn(f"{name} has no effect without --optimizer aro.", stacklevel=2)
        return original(args, *rest, **kwargs)
    arguments.aro_config(args)
    check_arguments(args)  # first: Megatron's own assertions often have no text
    args.optimizer = "adam"
    try:
        return original(args, *rest, **kwargs)
    finally:
        args.optimizer = arguments.NAME


def _get_megatron_optimizer_config(original: Original, args: Any) -> Any:
    config, overrides = original(args)
    if args.optimizer == arguments.NAME:
        from megatron_aro.megatron.optimizer import AROOptimizerConfig

        config = AROOptimizerConfig.extend(
            config, aro=arguments.aro_config(args), report_interval=args.log_interval
        )
    return config, overrides


def _get_megatron_optimizer(original: Original, config: Any, *rest: Any, **kwargs: Any) -> Any:
    if config.optimizer != arguments.NAME:
        return original(config, *rest, **kwargs)
    from megatron_aro.megatron.optimizer import get_aro_optimizer

    return get_aro_optimizer(config, *rest, **kwargs)


def _wrap_with_ddp(original: Original, model_chunks: Any, *rest: Any, **kwargs: Any) -> Any:
    from megatron.training.global_vars import get_args

    if get_args().optimizer == arguments.NAME:
        from megatron_aro.megatron.optimizer import tag_parameters

        tag_parameters(model_chunks)
    return original(model_chunks, *rest, **kwargs)


def _compile_helpers(original: Original) -> None:
    from megatron.core.datasets import utils

    if Path(utils.__file__).with_name("Makefile").exists():
        original()
    else:
        importlib.import_module("megatron.core.datasets.helpers")


class Hook(NamedTuple):
    module: str
    name: str
    wrapper: Callable[..., Any]
    reason: str


HOOKS = (
    Hook(
        "megatron.training.arguments",
        "add_megatron_arguments",
        _add_megatron_arguments,
        "The choices of --optimizer are fixed in the parser; the --aro-* flags go beside them.",
    ),
    Hook(
        "megatron.training.arguments",
        "validate_args",
        _validate_args,
        "It takes every name but adam and sgd for a layer-wise optimizer and clears "
        "--use-distributed-optimizer; ARO lives on Adam's layout and is validated as adam.",
    ),
    Hook(
        "megatron.training.training",
        "get_megatron_optimizer_config",
        _get_megatron_optimizer_config,
        "It copies the fields of OptimizerConfig only; ARO's settings must travel with them.",
    ),
    Hook(
        "megatron.training.training",
        "wrap_model_chunks_with_ddp",
        _wrap_with_ddp,
        "ARO's matrices need flat buffers of their own, decided by a tag before DDP makes them.",
    ),
    Hook(
        "megatron.training.models.dist_utils",
        "_ddp_wrap",
        _wrap_with_ddp,
        "The same for models that Megatron's configuration container builds.",
    ),
    Hook(
        "megatron.core.optimizer",
        "get_megatron_optimizer",
        _get_megatron_optimizer,
        "The factory that turns the name of an optimizer into one.",
    ),
    Hook(
        "megatron.training.training",
        "get_megatron_optimizer",
        _get_megatron_optimizer,
        "The same factory, which the training loop imported by name.",
    ),
    Hook(
        "megatron.core.datasets.utils",
        "compile_helpers",
        _compile_helpers,
        "It runs make and exits when that fails; Megatron's wheel ships the helpers compiled and "
        "without the Makefile.",
    ),
)


def register() -> None:
    """Make Megatron know ``--optimizer aro`` and the ``--aro-*`` flags. Idempotent.

    Raises:
        RuntimeError: megatron-core is of an untested version; the message says what to do.
        AttributeError: a hook's name is gone, which an untested version may do.
    """
    check_megatron_version()
    for hook in HOOKS:
        module = importlib.import_module(hook.module)
        original = getattr(module, hook.name)
        if not hasattr(original, "megatron_aro_hook"):
            wrapped = functools.wraps(original)(functools.partial(hook.wrapper, original))
            wrapped.megatron_aro_hook = hook  # type: ignore[attr-defined]
            setattr(module, hook.name, wrapped)
