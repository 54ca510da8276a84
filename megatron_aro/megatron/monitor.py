"""The monitor: what each group of matrices tells of the optimizer's health, at an interval.

A measured step takes the measures of `megatron_aro.rotation.monitor` where matrices are stepped,
and changes nothing. One collective over all ranks brings them to the last, which has Megatron's
writers and waits for the device once. docs/monitoring.md says what the numbers mean.
"""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_aro.megatron.names import group_name
from megatron_aro.rotation import FALLBACK_RUNGS, MEASURES
from megatron_aro.runtime.matrix_optimizer import MatrixOptimizer

_COLUMNS = (*MEASURES, *FALLBACK_RUNGS)
_PHASES = ("momentum", "gather", "rotate", "climb", "update", "return", "weights")
# Of each rank, in ms: the phases, the step from start to end, the iteration that it ended, and the
# step's share of that.
_TIMES = (*_PHASES, "step", "iteration", "share")

# Heading in the log, name of the scalar, how the log prints it.
_TABLE = (
    ("update RMS", "update-rms", "{:.4f}"),
    ("min", "update-rms-min", "{:.4f}"),
    ("orthogonality", "orthogonality-error", "{:.1e}"),
    ("fall-backs", "fallbacks", "{:.2%}"),
    ("Householder", "householder", "{:.2%}"),
    ("J", "objective", "{:.4f}"),
    ("J eigen", "objective-eigen", "{:.4f}"),
    ("J / J eigen", "objective-ratio", "{:.4f}"),
    ("min", "objective-ratio-min", "{:.4f}"),
)


class Monitor:
    """Reads a chain's optimizers every so many iterations.

    Args:
        matrices: this rank's, in the order in which they step.
        names: of all matrices of the model, in the same order on all ranks.
        interval: in iterations.
        device: where this rank's collectives take their tensors from.
    """

    def __init__(
        self,
        matrices: Sequence[MatrixOptimizer],
        names: Sequence[str],
        interval: int,
        device: torch.device,
    ):
        self._matrices, self._interval, self._device = matrices, interval, device
        self._names = names
        sample = frozenset(sampled(names))
        for of in matrices:
            of.watch(sample)
        place = {name: i for i, name in enumerate(names)}
        owned = [place[name] for of in matrices for name in of.owned()]
        self._owned = torch.tensor(owned, dtype=torch.int64, device=device)
        self._due, self._iteration = False, 0
        self._times: list[float] = []
        self._ends: deque[float] = deque(maxlen=2)  # of the last two steps, in s

    def before_step(self, count: int) -> None:
        """Decide whether the step that follows is measured, the same on all ranks.

        Args:
            count: the step's number in this process, from 1: an iteration where Megatron's
                training loop does not say its own.
        """
        self._iteration = _megatrons_iteration() or count
        self._due = self._iteration % self._interval == 0
        for of in self._matrices:
            of.measuring = self._due
        if self._due:
            # Of the step before: nothing disturbed it, and the device has left it behind.
            self._times = self._times_of_last_step()

    def after_step(self) -> None:
        """Note the time and, if the step was measured, read, reduce and write. A collective."""
        self._ends.append(time.perf_counter())
        if not self._due:
            return
        readings = self._gathered()
        if dist.get_rank() == dist.get_world_size() - 1:
            split = len(self._names) * len(_COLUMNS)
            values = readings.cpu()
            scalars = {
                **group_scalars(self._names, values[:split].view(-1, len(_COLUMNS))),
                **time_scalars(values[split:].view(-1, len(_TIMES))),
            }
            _write(scalars, self._iteration)
            print("\n".join(table(self._iteration, scalars)), flush=True)

    def _times_of_last_step(self) -> list[float]:
        """_TIMES of this rank, NaN where unknown, as before the first step."""
        first, *others = (of.phases for of in self._matrices)
        found = first.milliseconds(*others)
        iteration = 1e3 * (self._ends[1] - self._ends[0]) if len(self._ends) == 2 else math.nan
        step = found.get("all", math.nan)
        return [
            *(found.get(phase, math.nan) for phase in _PHASES),
            *(step, iteration, step / iteration),
        ]

    def _gathered(self) -> torch.Tensor:
        """_COLUMNS of all matrices and _TIMES of all ranks, flat, on the device.

        Each has a place of its own that its owners fill, so that a maximum gathers them: exact,
        also where instances of the distributed optimizer own a matrix each.
        """
        nothing = -math.inf
        matrices = torch.full(
            (len(self._names), len(_COLUMNS)), nothing, dtype=torch.float64, device=self._device
        )
        measures = [of.measures().to(self._device) for of in self._matrices]
        matrices[self._owned] = torch.cat(measures).nan_to_num_(nan=nothing)
        ranks = torch.full((dist.get_world_size(), len(_TIMES)), nothing, dtype=torch.float64)
        ranks[dist.get_rank()] = torch.tensor(self._times, dtype=torch.float64).nan_to_num_(
            nan=nothing
        )
        flat = torch.cat([matrices.flatten(), ranks.flatten().to(self._device)])
        dist.all_reduce(flat, op=dist.ReduceOp.MAX)
        return flat


def sampled(names: Iterable[str]) -> list[str]:
    """The first, the middle and the last matrix of each group, by layer and expert."""
    found: list[str] = []
    for members in _groups(names).values():
        ordered = sorted(members, key=lambda name: [int(x) for x in re.findall(r"\d+", name)])
        found += dict.fromkeys([ordered[0], ordered[len(ordered) // 2], ordered[-1]])
    return found


def _groups(names: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(group_name(name), []).append(name)
    return groups


def group_scalars(names: Sequence[str], values: torch.Tensor) -> dict[str, float]:
    """What is written about the groups, by ``aro-<measure>/<group>``.

    Args:
        values: [matrices, _COLUMNS], -inf where there is none.
    """
    of_matrix = dict(zip(names, values.tolist(), strict=True))
    scalars: dict[str, float] = {}
    for group, members in _groups(names).items():
        rows = [dict(zip(_COLUMNS, of_matrix[name], strict=True)) for name in members]
        found = {name: _known(row[name] for row in rows) for name in _COLUMNS}
        ratios = _known(
            row["objective"] / row["objective_eigen"] for row in rows if row["objective_eigen"] > 0
        )
        total = sum(found["factorizations"])
        climbed = {name: sum(found[name]) for name in FALLBACK_RUNGS[1:]}
        statistic = {
            "update-rms": _mean(found["update_rms"]),
            "update-rms-min": min(found["update_rms"], default=None),
            "orthogonality-error": max(found["orthogonality"], default=None),
            "objective": _mean(found["objective"]),
            "objective-eigen": _mean(found["objective_eigen"]),
            "objective-ratio": _mean(ratios),
            "objective-ratio-min": min(ratios, default=None),
        }
        if total:
            statistic["fallbacks"] = (climbed["extra_pass"] + climbed["householder"]) / total
            statistic["householder"] = climbed["householder"] / total
            statistic["kept"] = climbed["kept"] / total
        scalars |= {f"aro-{k}/{group}": v for k, v in statistic.items() if v is not None}
    return scalars


def time_scalars(values: torch.Tensor) -> dict[str, float]:
    """The slowest rank's times and the mean of all ranks'.

    Args:
        values: [ranks, _TIMES], -inf where there is none.
    """
    scalars = {}
    for name, column in zip(_TIMES, values.T.tolist(), strict=True):
        known = _known(column)
        tag = name if name == "share" else f"{name}-ms"
        if known:
            scalars[f"aro-time/{tag}"] = max(known)
            scalars[f"aro-time-mean/{tag}"] = sum(known) / len(known)
    return scalars


def table(iteration: int, scalars: dict[str, float]) -> list[str]:
    """The lines of the log."""
    groups = list(dict.fromkeys(tag.split("/")[1] for tag in scalars if "-time" not in tag))
    rows = [("", *(heading for heading, _, _ in _TABLE))]
    for group in groups:
        values = [scalars.get(f"aro-{name}/{group}") for _, name, _ in _TABLE]
        cells = [
            "-" if value is None else form.format(value)
            for value, (_, _, form) in zip(values, _TABLE, strict=True)
        ]
        rows.append((group, *cells))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "    "
        + row[0].ljust(widths[0])
        + "".join("  " + cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]
    step, share = (scalars.get(f"aro-time/{name}") for name in ("step-ms", "share"))
    if step is not None:
        phases = ", ".join(
            f"{name} {scalars[f'aro-time/{name}-ms']:.2f}"
            for name in _PHASES
            if f"aro-time/{name}-ms" in scalars
        )
        of_iteration = "" if share is None else f", {share:.1%} of the iteration"
        lines.append(f"    step of the slowest rank {step:.2f} ms{of_iteration}: {phases}")
    return [f"> ARO at iteration {iteration}:", *lines]


def _write(scalars: dict[str, float], iteration: int) -> None:
    """To Megatron's own writers, where the run has them."""
    from megatron.training import global_vars

    tensorboard: Any = global_vars.get_tensorboard_writer()
    if tensorboard:
        for tag, value in scalars.items():
            tensorboard.add_scalar(tag, value, iteration)
    wandb: Any = global_vars.get_wandb_writer()
    if wandb:
        wandb.log(scalars, iteration)


def _megatrons_iteration() -> int | None:
    """That of the training loop, from 1; None in loops that are not Megatron's."""
    from megatron.training import global_vars

    before = getattr(global_vars._GLOBAL_ARGS, "curr_iteration", None)
    return None if before is None else before + 1


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
