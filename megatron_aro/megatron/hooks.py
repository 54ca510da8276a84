"""Every Megatron name that is wrapped, each with its reason. On a GPU nothing else replaces one.

Tested on the versions in `megatron_aro.version.TESTED`. The wrappers that concern the optimizer
pass through untouched when it is not ARO. The CPU mode, which stands in for torch.cuda, is apart
in `cpu_mode`.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from megatron_aro.megatron import arguments, support
from megatron_aro.version import TESTED

Original = Callable[..., Any]


def _add_megatron_arguments(original: Original, parser: Any) -> Any:
    return arguments.add_arguments(original(parser))


def _validate_args(original: Original, args: Any, *rest: Any, **kwargs: Any) -> Any:
    # First: Megatron's own assertions often have no text.
    support.check_numbers(args)
    for sentence in arguments.ineffective_flags(args):
        warnings.warn(sentence, stacklevel=2)
    if args.optimizer != arguments.NAME:
        return original(args, *rest, **kwargs)
    support.check_arguments(args)
    args.optimizer = "adam"
    args.aro_validating = True
    try:
        return original(args, *rest, **kwargs)
    finally:
        args.optimizer = arguments.NAME
        del args.aro_validating


def _print_args(original: Original, title: str, args: Any) -> None:
    shown = copy.copy(args)
    if hasattr(shown, "aro_validating"):
        shown.optimizer = arguments.NAME
        del shown.aro_validating
    original(title, shown)


def _load_base_checkpoint(
    original: Original, load_dir: Any, args: Any, *rest: Any, **kwargs: Any
) -> Any:
    from megatron.training import global_vars

    load = functools.partial(original, load_dir, args, *rest, **kwargs)
    if args.optimizer != arguments.NAME:
        loaded = load()
    else:
        from megatron_aro.megatron import checkpoint, faults

        loaded = faults.told(load, load_dir, args)
    state, name = loaded[:2]
    # --use-checkpoint-args reads before the arguments are validated and made global.
    validated = global_vars._GLOBAL_ARGS is not None
    if validated and state is not None and state.get("args") is not None:
        support.check_checkpoint(args, state)
        if args.finetune or args.no_load_optim:
            return loaded
        if args.optimizer != arguments.NAME:
            if kwargs.get("rank0") and state["args"].optimizer == arguments.NAME:
                from megatron_aro.megatron import to_adam

                to_adam.describe(state, args, name)
        elif kwargs.get("rank0"):
            checkpoint.describe(state, args, name)
        elif Path(name).is_file():  # of format torch, below the folder of the iteration
            read = functools.partial(checkpoint.read_matrices, Path(name).parent.parent)
            size = state["args"].world_size
            state["optimizer"][checkpoint.MATRICES] = faults.told(
                lambda: read(size), load_dir, args
            )
    return loaded


def _load_checkpoint(
    original: Original, ddp_model: Any, optimizer: Any, *rest: Any, **kwargs: Any
) -> Any:
    from megatron.training import get_args

    args = get_args()
    exp_avg = getattr(args, "aro_init_exp_avg", None)
    if optimizer is not None and args.optimizer == arguments.ADAM and exp_avg:
        from megatron_aro.megatron import to_adam

        optimizer = to_adam.Loader(optimizer, exp_avg)
    return original(ddp_model, optimizer, *rest, **kwargs)


def _save_checkpoint(
    original: Original, iteration: int, model: Any, optimizer: Any, *rest: Any, **kwargs: Any
) -> Any:
    from megatron.training import get_args
    from megatron.training.checkpointing import get_checkpoint_name

    args = get_args()
    if args.optimizer == arguments.NAME and args.ckpt_format == "torch" and not args.no_save_optim:
        from megatron_aro.megatron import checkpoint

        folder = Path(get_checkpoint_name(args.save, iteration, return_base_dir=True))
        checkpoint.save_matrices(optimizer.chained_optimizers, folder)
    return original(iteration, model, optimizer, *rest, **kwargs)


def _get_megatron_optimizer_config(original: Original, args: Any) -> Any:
    config, overrides = original(args)
    if args.optimizer == arguments.NAME:
        from megatron_aro.megatron.optimizer import AROOptimizerConfig

        config = AROOptimizerConfig.extend(
            config,
            aro=arguments.aro_config(args),
            report_interval=args.log_interval,
            report_phases=args.timing_log_level > 0,
            use_gloo_process_groups=args.use_gloo_process_groups,
            vocabulary=_true_vocabulary(args),
        )
    return config, overrides


def _true_vocabulary(args: Any) -> int | None:
    """Without padding: the tokenizer's where Megatron has made one."""
    from megatron.training import global_vars

    tokenizer = global_vars._GLOBAL_TOKENIZER
    return args.vocab_size if tokenizer is None else tokenizer.vocab_size


def _get_megatron_emerging_optimizer(
    original: Original, config: Any, *rest: Any, **kwargs: Any
) -> Any:
    if config.optimizer != arguments.NAME:
        return original(config, *rest, **kwargs)
    from megatron_aro.megatron.optimizer import get_aro_optimizer

    return get_aro_optimizer(config, *rest, **kwargs)


def _wrap_with_ddp(original: Original, *rest: Any, **kwargs: Any) -> Any:
    from megatron.training import global_vars

    args = global_vars._GLOBAL_ARGS  # None in programs that do without Megatron's command line
    if args is not None and args.optimizer == arguments.NAME:
        from megatron_aro.megatron.optimizer import tag_parameters

        chunks = rest[0] if rest else next(iter(kwargs.values()))
        tag_parameters(chunks, arguments.aro_config(args))
    return original(*rest, **kwargs)


def _compute_per_buffer_param_layout(original: Original, *rest: Any, **kwargs: Any) -> Any:
    from megatron_aro.megatron import param_layout

    return param_layout.compute(original, *rest, **kwargs)


def _compile_helpers(original: Original) -> None:
    from megatron.core.datasets import utils

    if Path(utils.__file__).with_name("Makefile").exists():
        original()
    else:
        importlib.import_module("megatron.core.datasets.helpers")


class Hook(NamedTuple):
    """A wrapped name.

    Attributes:
        name: or Class.name.
        parameters: what the wrapper takes the original for: the names of its parameters in order;
            "..." at the end where it may have more, which are handed on as they are.
    """

    module: str
    name: str
    parameters: str
    wrapper: Callable[..., Any]
    reason: str


HOOKS = (
    Hook(
        "megatron.training.arguments",
        "add_megatron_arguments",
        "parser",
        _add_megatron_arguments,
        "The choices of --optimizer are fixed in the parser; the --aro-* flags go beside them.",
    ),
    Hook(
        "megatron.training.arguments",
        "validate_args",
        "args ...",
        _validate_args,
        "It takes every name but adam and sgd for a layer-wise optimizer and clears "
        "--use-distributed-optimizer; ARO lives on Adam's layout and is validated as adam.",
    ),
    Hook(
        "megatron.training.arguments",
        "_print_args",
        "title args",
        _print_args,
        "Validation prints the arguments while the optimizer reads adam.",
    ),
    Hook(
        "megatron.training.checkpointing",
        "_load_base_checkpoint",
        "load_dir args rank0 ...",
        _load_base_checkpoint,
        "It knows the arguments of the run that saved before anything is loaded; what is not this "
        "run's optimizer state fails much later, with a list of missing keys, or not at all. What "
        "it cannot read ends in a traceback a rank, or in exit status 0.",
    ),
    Hook(
        "megatron.training.training",
        "load_checkpoint",
        "ddp_model optimizer ...",
        _load_checkpoint,
        "Only with --aro-init-exp-avg, by which AdamW takes over ARO's checkpoint: what to ask "
        "for, and second moments that are not in it, are decided around AdamW's own loading.",
    ),
    Hook(
        "megatron.training.training",
        "save_checkpoint",
        "iteration model optimizer ...",
        _save_checkpoint,
        "In the torch format one data-parallel rank writes the optimizer's state for all, and each "
        "has rotations of its own.",
    ),
    Hook(
        "megatron.training.training",
        "get_megatron_optimizer_config",
        "args",
        _get_megatron_optimizer_config,
        "It copies the fields of OptimizerConfig only; ARO's settings must travel with them.",
    ),
    Hook(
        "megatron.training.training",
        "wrap_model_chunks_with_ddp",
        "model_chunks ...",
        _wrap_with_ddp,
        "ARO's matrices need flat buffers of their own, decided by a tag before DDP makes them.",
    ),
    Hook(
        "megatron.training.models.dist_utils",
        "_ddp_wrap",
        "model ...",
        _wrap_with_ddp,
        "The same for models that Megatron's configuration container builds.",
    ),
    Hook(
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer._compute_per_buffer_param_layout",
        "params bucket_size data_parallel_world_size ddp_config param_indices",
        _compute_per_buffer_param_layout,
        "The step of compute_full_param_layout at which the flat buffer of ARO's parameters can be "
        "laid out without cutting any; whoever makes DDP calls it, and no argument leads there.",
    ),
    Hook(
        "megatron.core.optimizer",
        "_get_megatron_emerging_optimizer",
        "config model_chunks config_overrides pg_collection",
        _get_megatron_emerging_optimizer,
        "Where Megatron's factory sends every name but adam and sgd. The factory itself is "
        "imported by name and wrapped by others; this is called through its module.",
    ),
    Hook(
        "megatron.core.datasets.utils",
        "compile_helpers",
        "",
        _compile_helpers,
        "It runs make and exits when that fails; Megatron's wheel ships the helpers compiled and "
        "without the Makefile.",
    ),
)


_in_place: set[Hook] = set()


def register() -> None:
    """Make Megatron know ``--optimizer aro`` and the ``--aro-*`` flags. Idempotent.

    Raises:
        RuntimeError: megatron-core is of an untested version, or a hook is not where it was, which
            an untested version may do; the message says what to do. Nothing is wrapped then.
    """
    support.check_megatron_version()
    moved = [what for hook in HOOKS if hook not in _in_place and (what := _moved(hook))]
    if moved:
        raise RuntimeError(
            f"megatron-aro's hooks do not fit megatron-core {support.megatron_version}: "
            f"{'; '.join(moved)}. Install megatron-core {' or '.join(TESTED['megatron-core'])}."
        )
    for hook in HOOKS:
        owner, name = _place(hook)
        if hook not in _in_place:  # whoever wrapped the name since then still calls ours
            original = getattr(owner, name)
            wrapped: Any = functools.wraps(original)(functools.partial(hook.wrapper, original))
            setattr(owner, name, staticmethod(wrapped) if inspect.isclass(owner) else wrapped)
            _in_place.add(hook)


def _place(hook: Hook) -> tuple[Any, str]:
    """(module or class, attribute)."""
    module = importlib.import_module(hook.module)
    path, _, name = hook.name.rpartition(".")
    return (getattr(module, path) if path else module), name


def _moved(hook: Hook) -> str:
    """What of a hook is not as the wrapper takes it for; empty if all is."""
    where = f"{hook.module}.{hook.name}"
    try:
        owner, name = _place(hook)
        found = list(inspect.signature(getattr(owner, name)).parameters.values())
    except (ImportError, AttributeError) as error:
        return f"{where} is gone ({error})"
    if any(p.kind is p.VAR_POSITIONAL for p in found):  # a wrapper that does not say what it wraps
        return ""
    expected, names = hook.parameters.split(), [p.name for p in found]
    more = expected[-1:] == ["..."]
    if (names[: len(expected) - 1] if more else names) == expected[: len(expected) - more]:
        return ""
    return f"{where} takes ({', '.join(names)}), not ({', '.join(expected)})"
