"""ARO as a torch optimizer for one process: momentum, rotation and update in one sitting.

The distributed optimizer for Megatron makes the same calls on the same functions.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_aro.config import AROConfig, Orientation, Orthonormalizer, Precision
from megatron_aro.config import Projection, Rotation
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

_PER_GROUP = ("momentum", "orientation")


@dataclass
class _Matrix:
    """A parameter with a gradient, seen with the rotated side as rows."""

    weight: Tensor  # [m, n], a view of the parameter
    exp_avg: Tensor  # [m, n], a view of state["exp_avg"]
    state: dict[str, Tensor]
    group: dict[str, Any]
    finite: Tensor  # bool scalar on the device: every entry of the gradient is finite


class ARO(torch.optim.Optimizer):
    """Adaptively rotated optimization (arXiv 2602.09006) of 2-D parameters.

    Embeddings, heads, biases and norms belong to torch.optim.AdamW; because an update has the RMS
    ``update_rms`` of AdamW's, its learning rate and weight decay serve for both.

    Args:
        params: 2-D float32 or float64 parameters, or groups of them; a group may set ``lr``,
            ``momentum``, ``weight_decay`` and ``orientation``, all else holds for all groups.
        lr: learning rate, a float (schedulers change it; a Tensor is refused).
        weight_decay: decoupled, W <- (1 - lr * weight_decay) W - lr U.
        orientation: the side that is rotated; "left": rows as stored, "right": columns,
            "min-side": the smaller. Everything else is described in AROConfig.

    State per parameter: "exp_avg" as stored, "rotation" [m, k], "second_moment" for adam.

    Raises:
        ValueError: a setting or a parameter is not one that ARO can work with.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        *,
        projection: Projection = "sinkhorn",
        rotation: Rotation = "aro",
        qr: Orthonormalizer = "scqr2",
        orientation: Orientation = "left",
        beta2: float = 0.95,
        update_rms: float = 0.2,
        sinkhorn_iters: int = 5,
        scqr_eps: float = 1e-7,
        precision: Precision = "fp32",
    ) -> None:
        self.config = AROConfig(
            momentum=momentum,
            projection=projection,
            rotation=rotation,
            qr=qr,
            orientation=orientation,
            beta2=beta2,
            update_rms=update_rms,
            sinkhorn_iters=sinkhorn_iters,
            scqr_eps=scqr_eps,
            precision=precision,
        )
        self._fallbacks: dict[torch.device, Tensor] = {}
        self._skipped: dict[torch.device, Tensor] = {}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **asdict(self.config)})

    @property
    def fallbacks(self) -> dict[str, int]:
        """How often each rung of orthonormalisation was taken (reads the device)."""
        counts = [count.tolist() for count in self._fallbacks.values()]
        return {name: sum(c[i] for c in counts) for i, name in enumerate(FALLBACK_RUNGS)}

    @property
    def skipped(self) -> int:
        """How many matrices were left as they were because of a NaN or Inf gradient."""
        return sum(int(count) for count in self._skipped.values())

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step for every parameter that has a gradient.

        A matrix whose gradient holds NaN or Inf keeps weight, momentum and rotation.

        Raises:
            ValueError: a closure is given, or a gradient is sparse.
        """
        if closure is not None:
            raise ValueError("ARO evaluates no closure: compute the gradients, then call step().")
        devices: dict[torch.device, dict[Any, list[_Matrix]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for matrix in self._matrices():
            weight = matrix.weight
            devices[weight.device][weight.dtype, weight.shape].append(matrix)
        for device, shapes in devices.items():
            batches = [self._batch(matrices) for matrices in shapes.values()]
            counts = self._fallbacks.setdefault(device, new_fallback_counts(device))
            updates = compute_updates(batches, self.config, counts)
            for matrices, batch, update in zip(shapes.values(), batches, updates, strict=True):
                for i, matrix in enumerate(matrices):
                    self._write(matrix, batch, update[i], i)

    def _matrices(self) -> list[_Matrix]:
        """Every parameter with a gradient, its momentum advanced where the gradient is finite."""
        matrices = []
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            members = [self._matrix(p, group) for p in parameters]
            momenta = [matrix.state["exp_avg"] for matrix in members]
            # In place of a bad gradient the momentum itself: beta M + (1 - beta) M = M.
            gradients = [
                torch.where(matrix.finite, p.grad, matrix.state["exp_avg"])
                for p, matrix in zip(parameters, members, strict=True)
            ]
            advance_momentum(momenta, gradients, group["momentum"])
            matrices += members
        return matrices

    def _matrix(self, p: Tensor, group: dict[str, Any]) -> _Matrix:
        assert p.grad is not None
        if p.grad.is_sparse:
            raise ValueError("ARO cannot use sparse gradients: give this parameter to SparseAdam.")
        rows, columns = p.shape
        side = group["orientation"]
        turned = side == "right" or (side == "min-side" and rows > columns)
        m, n = (columns, rows) if turned else (rows, columns)
        state = self.state[p]
        if not state:
            state["exp_avg"] = torch.zeros_like(p)
            state["rotation"] = initial_rotation(1, m, n, dtype=p.dtype, device=p.device)[0]
            moment = second_moment_shape(self.config, m, n)
            if moment is not None:
                state["second_moment"] = p.new_zeros(moment)
        finite = torch.linalg.vector_norm(p.grad, math.inf).isfinite()
        skipped = self._skipped.setdefault(p.device, torch.zeros((), dtype=torch.int64).to(p.device))
        skipped += ~finite
        exp_avg = state["exp_avg"]
        return _Matrix(p.mT if turned else p, exp_avg.mT if turned else exp_avg, state, group, finite)

    def _batch(self, matrices: list[_Matrix]) -> MatrixBatch:
        # A momentum of NaN tells compute_updates to leave this matrix alone.
        momenta = [torch.where(matrix.finite, matrix.exp_avg, math.nan) for matrix in matrices]
        states = [matrix.state for matrix in matrices]
        moments = [state["second_moment"] for state in states if "second_moment" in state]
        return MatrixBatch(
            torch.stack(momenta),
            torch.stack([state["rotation"] for state in states]),
            torch.stack(moments) if moments else None,
        )

    def _write(self, matrix: _Matrix, batch: MatrixBatch, update: Tensor, i: int) -> None:
        matrix.state["rotation"].copy_(batch.rotation[i])
        if batch.second_moment is not None:
            matrix.state["second_moment"].copy_(batch.second_moment[i])
        weight = matrix.weight.clone()
        apply_updates([weight], [update], matrix.group["lr"], matrix.group["weight_decay"])
        matrix.weight.copy_(torch.where(matrix.finite, weight, matrix.weight))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def _check(self, group: dict[str, Any]) -> None:
        for name in ("lr", "weight_decay"):
            value = group[name]
            if not isinstance(value, (int, float)) or not 0.0 <= value < math.inf:
                raise ValueError(f"ARO's {name} is {value!r}: it must be a finite number >= 0.")
        if group["orientation"] == "residual":
            raise ValueError(
                "orientation 'residual' needs the parameter names of Megatron: here use 'left', "
                "'right' or 'min-side', per group if need be."
            )
        replace(self.config, **{name: group[name] for name in _PER_GROUP})  # checks the values
        for name, value in asdict(self.config).items():
            if name not in _PER_GROUP and group[name] != value:
                raise ValueError(
                    f"{name} is {group[name]!r} in a group or checkpoint but {value!r} in this "
                    "ARO: it must be the same in all groups; use a second optimizer."
                )
        for p in group["params"]:
            if not isinstance(p, Tensor):  # the indices that stand for parameters in a checkpoint
                continue
            if p.ndim != 2 or p.numel() == 0:
                raise ValueError(
                    f"ARO rotates matrices, not a parameter of shape {tuple(p.shape)}: give "
                    "parameters that are not 2-D (biases, norms) to torch.optim.AdamW."
                )
            if p.dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"ARO cannot step a parameter of {p.dtype}: keep float32 main parameters."
                )

    def state_dict(self) -> dict[str, Any]:
        """The state of torch.optim, and the counters under "counters"."""
        return {**super().state_dict(), "counters": {**self.fallbacks, "skipped": self.skipped}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` gave, bit for bit.

        Raises:
            ValueError: it was saved with other settings.
        """
        for group in state_dict["param_groups"]:
            self._check(group)
        super().load_state_dict(state_dict)
        counters, device = state_dict["counters"], self.param_groups[0]["params"][0].device
        saved = [counters[name] for name in FALLBACK_RUNGS]
        self._fallbacks = {device: torch.tensor(saved, device=device)}
        self._skipped = {device: torch.tensor(counters["skipped"], device=device)}
