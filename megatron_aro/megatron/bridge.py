"""ARO in a recipe of Megatron-Bridge: `use_aro`. docs/examples/bridge_recipe.py has one whole.

Megatron-Bridge builds the optimizer by ``recipe.optimizer.provide(...)`` where there is such a
method, and runs ``recipe.model``'s hooks before it wraps the model in DDP. Nothing here imports it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_aro.config import AROConfig
from megatron_aro.megatron import arguments, hooks, optimizer


@dataclasses.dataclass
class AROOptimizerConfig(optimizer.AROOptimizerConfig):
    """Megatron's OptimizerConfig, ARO's settings, and how Megatron-Bridge makes the optimizer.

    Like Bridge's own it is checked by `finalize`, when recipe and overrides have set all fields.
    """

    optimizer: str = arguments.NAME

    def __post_init__(self) -> None:
        pass

    def finalize(self) -> None:
        """Megatron's own checks of the settings; Megatron-Bridge calls this."""
        super().__post_init__()

    def provide(
        self,
        model_chunks: torch.nn.Module | list[torch.nn.Module],
        config_overrides: dict[Any, Any] | None = None,
        use_gloo_process_groups: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> MegatronOptimizer:
        """The optimizer; arguments as Megatron-Bridge's `setup_optimizer` gives them.

        Raises:
            as `get_aro_optimizer`.
        """
        self.use_gloo_process_groups = use_gloo_process_groups
        chunks = model_chunks if isinstance(model_chunks, list) else [model_chunks]
        return optimizer.get_aro_optimizer(self, chunks, config_overrides, pg_collection)

    def tag(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """A hook for before DDP: ARO's matrices get flat buffers of their own."""
        optimizer.tag_parameters(chunks, self.aro)
        return chunks


def use_aro(recipe: Any, aro: AROConfig | None = None) -> None:
    """Train a recipe with ARO: its matrices by ARO, all else by AdamW, or by ARO too.

    Learning rate, schedule, weight decay and clipping stay the recipe's, which fit if they were
    AdamW's. Call it last: later changes of ``recipe.model`` or ``recipe.optimizer`` as a whole
    would undo it. In full-model mode set ``recipe.optimizer.vocabulary`` to the tokenizer's size:
    rows that pad it would count as tokens.

    Args:
        recipe: Megatron-Bridge's ConfigContainer.
        aro: ARO's settings; by default the paper's.

    Raises:
        RuntimeError: as `megatron_aro.register`.
    """
    hooks.register()  # for param_layout whole
    settings: OptimizerConfig = recipe.optimizer
    recipe.optimizer = config = AROOptimizerConfig.extend(
        settings, aro=aro or AROConfig(), report_interval=recipe.logger.log_interval
    )
    config.optimizer = arguments.NAME
    if hasattr(recipe.model, "register_pre_wrap_hook"):  # a model provider
        recipe.model.register_pre_wrap_hook(config.tag)
    else:
        recipe.model.pre_wrap_hooks.append(config.tag)
