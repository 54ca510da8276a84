"""ARO (Adaptively Rotated Optimization, arXiv 2602.09006) for Megatron-LM and plain torch."""

from typing import TYPE_CHECKING, Any

from megatron_aro.config import AROConfig
from megatron_aro.version import __version__

if TYPE_CHECKING:
    from megatron_aro.optimizer import ARO

# For training loops of one's own on megatron-core; see docs/examples/own_loop.py.
_ON_CORE = ("AROOptimizerConfig", "get_aro_optimizer", "tag_parameters")
__all__ = ["ARO", "AROConfig", *_ON_CORE, "__version__", "register"]


def register() -> None:
    """Make Megatron know ``--optimizer aro``: see `megatron_aro.megatron.hooks.register`."""
    from megatron_aro.megatron import hooks

    hooks.register()


def __getattr__(name: str) -> Any:
    if name == "ARO":  # imports torch, without which the commands are to say so in a sentence
        from megatron_aro.optimizer import ARO

        return ARO
    if name in _ON_CORE:  # imports Megatron, which plain torch does without
        from megatron_aro.megatron import optimizer

        return getattr(optimizer, name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
