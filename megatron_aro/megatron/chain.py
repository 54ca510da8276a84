"""The chain of ARO's and AdamW's optimizers, as Megatron steps, saves and loads it."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.optimizer import optimizer as megatron_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer

from megatron_aro.megatron import checkpoint
from megatron_aro.megatron.monitor import Monitor
from megatron_aro.megatron.report import report_fallbacks, report_phases
from megatron_aro.runtime.matrix_optimizer import MatrixOptimizer

# 0.18 has none.
SEPARATE_GRAD_NORM_GROUPS = getattr(megatron_optimizer, "SEPARATE_GRAD_NORM_GROUPS", ())


class AROChainedOptimizer(ChainedOptimizer):
    """The chain of ARO and AdamW.

    A step whose gradient norm is NaN or Inf changes nothing, on all ranks, and counts as skipped
    in Megatron's log: a rotation cannot recover from a poisoned momentum.
    """

    def __init__(self, optimizers: list[MegatronOptimizer]):
        super().__init__(optimizers)
        self.matrices = [
            wrapped.optimizer
            for wrapped in optimizers
            if isinstance(wrapped.optimizer, MatrixOptimizer)
        ]
        for matrices in self.matrices:
            matrices.together = self.matrices
        self._gradients_finite = True
        self._source: checkpoint.Source | None = None  # of the checkpoint that is being loaded
        self._steps = 0
        self.monitor: Monitor | None = None

    def state_dict(self) -> dict[str, Any]:
        return checkpoint.plain_state(self.chained_optimizers)

    def sharded_state_dict(
        self,
        model_sharded_state_dict: dict[str, Any],
        is_loading: bool = False,
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        self._synchronize_steps()
        metadata = metadata or {}
        self._source = metadata.get(checkpoint.SOURCE) if is_loading else None
        return checkpoint.sharded_state(
            self.chained_optimizers, model_sharded_state_dict, is_loading, metadata
        )

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        checkpoint.load(self.chained_optimizers, state_dict, self._source)
        self._synchronize_steps()

    def get_grad_norm(self) -> float:
        # Reduced over all ranks, so that they agree. Python floats already: no further sync.
        norm = super().get_grad_norm()
        # Detached MTP heads are not in that norm.
        apart = [
            self._get_grad_norm_for_group(detached)
            for detached in SEPARATE_GRAD_NORM_GROUPS
            if self.has_grad_norm_group(detached)
        ]
        self._gradients_finite = all(math.isfinite(float(x)) for x in [norm, *apart])
        return norm

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        if not self._gradients_finite:
            return False
        self._steps += 1
        if self.monitor is not None:
            self.monitor.before_step(self._steps)
        success = super().step_with_ready_grads()
        if self.monitor is not None:
            self.monitor.after_step()
        interval = getattr(self.config, "report_interval", None)
        if interval and self._steps % interval == 0:
            report_fallbacks(self.matrices, interval)
            if self.config.report_phases:
                report_phases(self.matrices)
        return success
