"""ARO as a torch optimizer for one process: every step of the spec in one sitting."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

import megatron_aro.rotation as rot
from megatron_aro import config as aro


@dataclass
class _Matrix:
    """A parameter with a gradient, seen with the rotated side as rows."""

    weight: Tensor  # [m, n], a view of the parameter
    turned: bool  # whether [m, n] is the transposed parameter
    finite: Tensor  # bool scalar on the device: every entry of the gradient is finite
    state: dict[str, Tensor]
    group: dict[str, Any]


class ARO(torch.optim.Optimizer):
    """Adaptively rotated optimization (arXiv 2602.09006) of 2-D parameters.

    Biases, norms, embeddings and heads belong to torch.optim.AdamW. An update has the RMS of
    AdamW's, so that one learning rate and weight decay serve for both.

    Args:
        params: 2-D float32 or float64 parameters, or groups of them. A group may set ``lr``,
            ``momentum``, ``weight_decay`` and ``orientation``; the rest holds for all groups.
        lr: learning rate, a float (a Tensor is refused).
        weight_decay: decoupled, W <- (1 - lr * weight_decay) W - lr U.
        orientation: "left" rotates the rows as stored, "right" the columns, "min-side" the
            smaller side. The other arguments are described in AROConfig.

    State per parameter: "exp_avg" as stored, "rotation" [m, k], "second_moment" for adam.
    Settings or parameters that ARO cannot work with raise ValueError.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        *,
        projection: aro.Projection = "sinkhorn",
        rotation: aro.Rotation = "aro",
        qr: aro.Orthonormalizer = "scqr2",
        orientation: aro.Orientation = "left",
        beta2: float = 0.95,
        update_rms: float = 0.2,
        sinkhorn_iters: int = 5,
        scqr_eps: float = 1e-7,
        precision: aro.Precision = "fp16x3",
    ) -> None:
        self.config = aro.AROConfig(
            momentum=momentum, projection=projection, rotation=rotation, qr=qr,
            orientation=orientation, beta2=beta2, update_rms=update_rms,
            sinkhorn_iters=sinkhorn_iters, scqr_eps=scqr_eps, precision=precision,
        )  # fmt: skip
        # On each device the counts of rot.FALLBACK_RUNGS, then the matrices skipped.
        self._counts = {torch.device("cpu"): _zero_counts("cpu")}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **asdict(self.config)})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step for every parameter that has a gradient; ValueError for a sparse one.

        A matrix whose gradient holds NaN or Inf keeps weight, momentum and rotation.
        """
        if closure is not None:
            raise ValueError("ARO evaluates no closure: compute the gradients, then call step().")
        devices: dict[Any, dict[Any, list[_Matrix]]] = defaultdict(lambda: defaultdict(list))
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    matrix = self._advance(p, p.grad, group)
                    shapes = devices[p.device]
                    shapes[p.dtype, matrix.turned, matrix.weight.shape].append(matrix)
        for device, shapes in devices.items():
            batches = [_batch(matrices) for matrices in shapes.values()]
            updates = rot.compute_updates(batches, self.config)
            for batch in batches:
                self._counts[device][:-1] += batch.fallbacks.sum(dim=0)
            for matrices, batch, update in zip(shapes.values(), batches, updates, strict=True):
                for i, matrix in enumerate(matrices):
                    _write(matrix, batch, update, i)

    def _advance(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> _Matrix:
        """Step 1 for one parameter, and its state at its first step."""
        if grad.is_sparse:
            raise ValueError("ARO needs dense gradients: give this parameter to SparseAdam.")
        side = group["orientation"]
        turned = side == "right" or (side == "min-side" and p.shape[0] > p.shape[1])
        m, n = p.mT.shape if turned else p.shape
        state = self.state[p]
        if not state:
            state["exp_avg"] = torch.zeros_like(p)
            state["rotation"] = rot.initial_rotation(1, m, n, dtype=p.dtype, device=p.device)[0]
            moment = rot.second_moment_shape(self.config, m, n)
            if moment is not None:
                state["second_moment"] = p.new_zeros(moment)
        finite = torch.linalg.vector_norm(grad, math.inf).isfinite()
        counts = self._counts.setdefault(p.device, _zero_counts(p.device))
        counts[-1] += ~finite
        exp_avg = state["exp_avg"]
        # In place of a bad gradient the momentum itself: beta M + (1 - beta) M = M.
        rot.advance_momentum([exp_avg], [torch.where(finite, grad, exp_avg)], group["momentum"])
        return _Matrix(p.mT if turned else p, turned, finite, state, group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            self._check_settings(self.param_groups[-1])
            _check_parameters(self.param_groups[-1]["params"])
        except ValueError:
            self.param_groups.pop()
            raise

    def _check_settings(self, group: dict[str, Any]) -> None:
        for name in ("lr", "weight_decay"):
            value = group[name]
            if not isinstance(value, int | float) or not 0.0 <= value < math.inf:
                raise ValueError(f"ARO's {name} is {value!r}: it must be a finite number >= 0.")
        if group["orientation"] == "residual":
            raise ValueError("orientation 'residual' needs Megatron: use left, right or min-side.")
        own = {name: group[name] for name in ("momentum", "orientation")}
        for name, value in asdict(replace(self.config, **own)).items():  # which checks its own
            if group[name] != value:
                raise ValueError(
                    f"ARO's {name} is {value!r}, a group or checkpoint has {group[name]!r}: it "
                    "must be the same for all groups. Use a second optimizer."
                )

    @property
    def fallbacks(self) -> dict[str, int]:
        """How often each rung of orthonormalisation was taken (reads the device)."""
        return dict(zip(rot.FALLBACK_RUNGS, self._read_counts(), strict=False))

    @property
    def skipped(self) -> int:
        """How many matrices were left alone because of a NaN or Inf gradient (reads the device)."""
        return self._read_counts()[-1]

    def _read_counts(self) -> list[int]:
        return torch.stack([counts.cpu() for counts in self._counts.values()]).sum(0).tolist()

    def __getstate__(self) -> dict[str, Any]:  # for copy and pickle
        return {**super().__getstate__(), "config": self.config, "_counts": self._counts}

    def state_dict(self) -> dict[str, Any]:
        """What torch.optim saves, and the counts as integers under "counts"."""
        return {**super().state_dict(), "counts": self._read_counts()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` gave, bit for bit; ValueError if settings differ."""
        if "counts" not in state_dict:
            raise ValueError("This is not the state of ARO: AdamW's and others cannot be loaded.")
        for group in state_dict["param_groups"]:
            self._check_settings(group)
        super().load_state_dict(state_dict)
        self._counts = {torch.device("cpu"): torch.tensor(state_dict["counts"])}


def _zero_counts(device: torch.device | str) -> Tensor:
    return torch.zeros(len(rot.FALLBACK_RUNGS) + 1, dtype=torch.int64, device=device)


def _batch(matrices: list[_Matrix]) -> rot.MatrixBatch:
    # A momentum of NaN tells compute_updates to leave this matrix alone.
    stored = [torch.where(x.finite, x.state["exp_avg"], math.nan) for x in matrices]
    momenta = torch.stack(stored).mT if matrices[0].turned else torch.stack(stored)
    rotations = [matrix.state["rotation"] for matrix in matrices]
    moments = [m.state["second_moment"] for m in matrices if "second_moment" in m.state]
    second = torch.stack(moments) if moments else None
    counts = rot.new_fallback_counts(len(matrices), momenta.device)
    return rot.MatrixBatch(momenta, torch.stack(rotations), counts, second)


def _write(matrix: _Matrix, batch: rot.MatrixBatch, updates: Tensor, i: int) -> None:
    """Step 6 for the i-th matrix of a batch, and its new state."""
    matrix.state["rotation"].copy_(batch.rotation[i])
    if batch.second_moment is not None:
        matrix.state["second_moment"].copy_(batch.second_moment[i])
    new, group = matrix.weight.clone(), matrix.group
    rot.apply_updates([new], [updates[i]], group["lr"], group["weight_decay"])
    matrix.weight.copy_(torch.where(matrix.finite, new, matrix.weight))


def _check_parameters(parameters: list[Tensor]) -> None:
    for p in parameters:
        if p.ndim != 2 or p.numel() == 0:
            raise ValueError(
                f"ARO rotates matrices, and a parameter has shape {tuple(p.shape)}: give "
                "parameters that are not 2-D (biases, norms) to torch.optim.AdamW."
            )
        if p.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"ARO cannot step {p.dtype}: keep float32 main parameters.")
