"""The torch optimizer of ARO's matrices on one rank.

Momentum and weights are stepped where they live (whole parameters or 1-D slices of them, as the
distributed optimizer cuts them); in between, an exchange makes whole matrices for the rotation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_aro.config import AROConfig
from megatron_aro.rotation import (
    FALLBACK_RUNGS,
    MatrixBatch,
    advance_momentum,
    apply_updates,
    compute_updates,
    initial_rotation,
    new_fallback_counts,
    second_moment_shape,
)
from megatron_aro.runtime.exchange import Exchange
from megatron_aro.sharding.plan import Sharded


class MatrixOptimizer(torch.optim.Optimizer):
    """ARO on the main parameters that one rank holds, stepped together with the other ranks.

    State per main parameter: ``exp_avg`` (its shape, float32), the momentum. The rotations belong
    to logical matrices, not to parameters or slices, and are kept by batch: see
    `rotation_state`.

    A wrapper (Megatron's mixed-precision or distributed optimizer) replaces the parameters in
    the groups by its main parameters; `bind` must be called after that and before `step`.
    """

    def __init__(
        self, param_groups: Sequence[dict[str, Any]], lr: float, weight_decay: float, aro: AROConfig
    ):
        super().__init__(param_groups, {"lr": lr, "weight_decay": weight_decay})
        self.aro = aro
        self.reported: dict[str, int] = {}  # fall-backs that a report has named already

    def bind(self, exchange: Exchange, main_parameters: Mapping[str, Tensor]) -> None:
        """Say what this rank owns, and what it holds.

        Args:
            exchange: moves pieces of all ranks to the owners of matrices, and updates back.
            main_parameters: float32 main parameter (whole, or a 1-D slice) by parameter name.
        """
        self._exchange, self._main = exchange, dict(main_parameters)
        device = exchange.device
        self._matrices = exchange.plan.batches(exchange.owned)
        self._batches = []
        for (m, n), members in self._matrices:
            moment = second_moment_shape(self.aro, m, n)
            self._batches.append(
                MatrixBatch(
                    momentum=torch.empty(0),  # each step's own
                    rotation=initial_rotation(
                        len(members), m, n, dtype=torch.float32, device=device
                    ),
                    second_moment=torch.zeros(len(members), *moment, device=device)
                    if moment
                    else None,
                )
            )
        self.fallbacks = new_fallback_counts(device)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("ARO computes each step from one gradient: closures are refused.")
        self.initialize_state()
        for group in self.param_groups:
            momenta = [self.state[p]["exp_avg"] for p in group["params"]]
            advance_momentum(momenta, [p.grad for p in group["params"]], self.aro.momentum)

        sharded = self._exchange.plan.sharded
        matrices = self._exchange.gather(
            {name: self.state[main]["exp_avg"].view(-1) for name, main in self._main.items()}
        )
        for (_, members), batch in zip(self._matrices, self._batches, strict=True):
            batch.momentum = torch.stack([oriented(matrices[i], sharded[i]) for i in members])
        computed = compute_updates(self._batches, self.aro, self.fallbacks)
        for (_, members), batch, update in zip(
            self._matrices, self._batches, computed, strict=True
        ):
            batch.momentum = torch.empty(0)
            matrices.update(
                {i: oriented(u, sharded[i]) for i, u in zip(members, update, strict=True)}
            )
        updates = {main: torch.empty_like(main) for main in self._main.values()}
        self._exchange.scatter(
            matrices, {name: updates[main].view(-1) for name, main in self._main.items()}
        )
        for group in self.param_groups:
            mine = [updates[main] for main in group["params"]]
            apply_updates(group["params"], mine, group["lr"], group["weight_decay"])

    def initialize_state(self) -> None:
        """Give every main parameter its zero momentum, as before the first step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)

    def rotation_state(self) -> dict[str, Tensor]:
        """What belongs to the matrices that this rank owns, by ``<kind>.<name>``, as views.

        ``rotation.<name>`` [m, k] and, for the adam projection, ``second_moment.<name>`` [k, n];
        ``fallbacks`` counts the rungs of orthonormalisation, int64 [len(FALLBACK_RUNGS)].
        """
        state = {"fallbacks": self.fallbacks}
        for (_, members), batch in zip(self._matrices, self._batches, strict=True):
            for i, matrix in enumerate(members):
                name = self._exchange.plan.sharded[matrix].matrix.name
                state[f"rotation.{name}"] = batch.rotation[i]
                if batch.second_moment is not None:
                    state[f"second_moment.{name}"] = batch.second_moment[i]
        return state

    def load_rotation_state(self, loaded: Mapping[str, Tensor]) -> None:
        """Inverse of `rotation_state`; checks everything before it changes anything.

        Raises:
            ValueError: a matrix is missing, unknown, or of another shape.
        """
        own = self.rotation_state()
        if own.keys() != loaded.keys():
            missing, unknown = own.keys() - loaded.keys(), loaded.keys() - own.keys()
            raise ValueError(
                f"The checkpoint's ARO state is of another model or other settings: it lacks "
                f"{sorted(missing)[:3]} and has {sorted(unknown)[:3]} ({len(missing)} missing, "
                f"{len(unknown)} unknown)."
            )
        for name, tensor in own.items():
            if tensor.shape != loaded[name].shape:
                raise ValueError(
                    f"The checkpoint holds {name} with shape {tuple(loaded[name].shape)}, this "
                    f"run needs {tuple(tensor.shape)}."
                )
        for name, tensor in own.items():
            tensor.copy_(loaded[name])
        self.reported = self.fallback_counts()

    def fallback_counts(self) -> dict[str, int]:
        """Rungs of orthonormalisation climbed so far, by name. Syncs with the device."""
        return dict(zip(FALLBACK_RUNGS, self.fallbacks.tolist(), strict=True))


def oriented(matrix: Tensor, sharded: Sharded) -> Tensor:
    """From the stored orientation of a matrix to that with the rotated side as rows, or back."""
    return matrix.T if sharded.matrix.transposed else matrix
