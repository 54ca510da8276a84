"""ARO (Adaptively Rotated Optimization, arXiv 2602.09006) for Megatron-LM and plain torch."""

from megatron_aro.config import AROConfig
from megatron_aro.optimizer import ARO
from megatron_aro.version import __version__

__all__ = ["ARO", "AROConfig", "__version__", "register"]


def register() -> None:
    """Make Megatron know ``--optimizer aro``: see `megatron_aro.megatron.hooks.register`."""
    from megatron_aro.megatron import hooks

    hooks.register()
