"""The torch optimizer of ARO's matrices on one rank.

Momentum and weights are stepped where they live (whole parameters or 1-D slices of them, as the
distributed optimizer cuts them); in between, an exchange makes whole matrices for the rotation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_aro.config import AROConfig
from megatron_aro.rotation import (
    FALLBACK_RUNGS,
    MEASURES,
    advance_momentum,
    apply_updates,
    attempt_rotation,
    climb,
    finish_update,
    measure_before,
)
from megatron_aro.runtime.batches import Gathered, Members, Stepped, new_state, record_small
from megatron_aro.runtime.columns import Columns
from megatron_aro.runtime.exchange import Exchange
from megatron_aro.runtime.sharing import Sharing
from megatron_aro.runtime.timeline import Phases, SideStream
from megatron_aro.sharding.logical import LogicalMatrix
from megatron_aro.sharding.plan import Batch


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
        self.measuring = False  # whether the next step is measured, see `measures`

    def bind(
        self,
        exchange: Exchange,
        main_parameters: Mapping[str, Tensor],
        columns: Columns | None = None,
        true_elements: Mapping[str, int] | None = None,
    ) -> None:
        """Say what this rank owns, and what it holds.

        Args:
            exchange: moves pieces of all ranks to the owners of matrices, and updates back.
            main_parameters: float32 main parameter (whole, or a 1-D slice) by parameter name.
            columns: steps what has no owner.
            true_elements: of main parameters that end in padding, how many elements come first.
        """
        self._exchange, self._main = exchange, dict(main_parameters)
        self.columns = columns
        self._true = {self._main[name]: n for name, n in (true_elements or {}).items()}
        plan = exchange.plan
        self.phases = Phases(exchange.device)
        self._side = SideStream(exchange.device, exchange.travels)
        self._chunks = [
            [self._batch(batch) for batch in plan.stepped((exchange.t, exchange.d), chunk)]
            for chunk in range(plan.chunks)
        ]
        record_small(self._stepped(), self.aro)
        self._started = False
        self.together = [self]
        self._sharing: Sharing | None = None
        self._sample: Collection[str] = ()  # see `watch`

    def share(self, sharing: Sharing) -> None:
        """Say which rotations matrices share, those of the optimizers in `together` too."""
        self._sharing = sharing
        for members in self._members():
            members.second_moments = [sharing.second_moment(name) for name in members.names]

    def members(self) -> list[LogicalMatrix]:
        """The matrices that this rank owns and whose rotations are shared."""
        sharded = self._exchange.plan.sharded
        return [sharded[i].matrix for x in self._members() for i in x.batch.members]

    @property
    def device(self) -> torch.device:
        return self._exchange.device

    def _batch(self, batch: Batch) -> Gathered:
        matrices = [self._exchange.plan.sharded[i].matrix for i in batch.members]
        if matrices[0].group:
            return Members(batch, [matrix.name for matrix in matrices])
        return Stepped(batch, new_state(self.aro, *batch.shape, self.device), self.aro)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step, in two halves with the wait for the device between them.

        The optimizers in `together` do the first half together, so that they wait but once. The
        main parameters' gradients are used up: their memory takes the updates.
        """
        if closure is not None:
            raise ValueError("ARO computes each step from one gradient: closures are refused.")
        if not self._started:
            for optimizer in self.together:
                optimizer._start()
            if self._sharing is not None:
                self._step_shared(self._sharing)
            started = [x for optimizer in self.together for x in optimizer._stepped()]
            with self.phases("climb"):
                climb([x.state for x in started], [x.attempt for x in started], self.aro)
        self._finish()

    def _step_shared(self, sharing: Sharing) -> None:
        """Updates of all members in place of their momenta, those of `together`'s too."""
        batches = [members for optimizer in self.together for members in optimizer._members()]
        with self.phases("rotate"):
            momenta = self._rotate_shared(sharing)
        with self.phases("update"):
            updates = sharing.updates()
            for members in batches:
                if self.measuring:
                    members.measure(updates)
            for name, update in updates.items():
                momenta[name].copy_(update)

    def _rotate_shared(self, sharing: Sharing) -> dict[str, Tensor]:
        """Turn the shared rotations; the momenta of the members, by name."""
        batches = [members for optimizer in self.together for members in optimizer._members()]
        momenta = {n: m for x in batches for n, m in zip(x.names, x.momentum, strict=True)}
        moments = {n: v for x in batches for n, v in zip(x.names, x.second_moments, strict=True)}
        sharing.rotate(momenta, moments)
        return momenta

    def _stepped(self) -> list[Stepped]:
        """The batches whose matrices have rotations of their own."""
        return [x for chunk in self._chunks for x in chunk if isinstance(x, Stepped)]

    def _members(self) -> list[Members]:
        return [x for chunk in self._chunks for x in chunk if isinstance(x, Members)]

    @property
    def _groups(self) -> Sharing | None:
        """The shared rotations, if this is the optimizer of several that answers for them."""
        return self._sharing if self.together[0] is self else None

    def _start(self) -> None:
        """Momenta and first attempts at rotations; one chunk travels while another is stepped."""
        self._started = True
        self.phases.clear()
        self.initialize_state()
        with self.phases("momentum"):
            for group in self.param_groups:
                momenta = [self._stepped_part(p, self.state[p]["exp_avg"]) for p in group["params"]]
                gradients = [self._stepped_part(p, p.grad) for p in group["params"]]
                advance_momentum(momenta, gradients, self.aro.momentum)
        self._allocate(self._chunks)
        held = self._held_momenta()
        arriving = self._gather(0, held)
        if self.columns is not None:
            with self.phases("columns"):
                self.columns.start(held)
        for number, chunk in enumerate(self._chunks):
            arrived = arriving
            if number + 1 < len(self._chunks):
                arriving = self._gather(number + 1, held)
            self._side.wait(arrived)
            own = [x for x in chunk if isinstance(x, Stepped)]
            if self.measuring:
                with self.phases("measure"):
                    for stepped in own:
                        before = measure_before(stepped.state, stepped.sample, self.aro)
                        stepped.measures = before
            with self.phases("rotate"):
                for stepped in own:
                    stepped.start()

    def _finish(self) -> None:
        """The ladder, the updates and their way back, chunk by chunk, and the weights."""
        self._started = False
        gradients = {
            name: main.grad.view(-1) for name, main in self._main.items() if main.grad is not None
        }
        back = None
        for number, chunk in enumerate(self._chunks):
            with self.phases("update"):
                for stepped in chunk:
                    if isinstance(stepped, Stepped):
                        stepped.finish()
            back = self._scatter(number, gradients)
        self._side.wait(back)
        self._release(self._chunks)
        if self.columns is not None:
            with self.phases("columns"):
                self.columns.finish(self._held_momenta(), gradients)
        with self.phases("weights"):
            for group in self.param_groups:
                weights = [self._stepped_part(p, p) for p in group["params"]]
                updates = [self._stepped_part(p, p.grad) for p in group["params"]]
                apply_updates(weights, updates, group["lr"], group["weight_decay"])

    def _stepped_part(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """Of a main parameter's weights, momentum or gradient, what is no padding."""
        true = self._true.get(parameter)
        return tensor if true is None else tensor.view(-1)[:true]

    def _held_momenta(self) -> dict[str, Tensor]:
        return {name: self.state[main]["exp_avg"].view(-1) for name, main in self._main.items()}

    def _gather(self, chunk: int, pieces: Mapping[str, Tensor]) -> Any:
        def work() -> None:
            with self.phases("gather"):
                self._exchange.gather(chunk, pieces, self._matrices(chunk))

        return self._side.run(work)

    def _scatter(self, chunk: int, pieces: Mapping[str, Tensor]) -> Any:
        def work() -> None:
            with self.phases("return"):
                self._exchange.scatter(chunk, self._matrices(chunk), pieces)

        return self._side.run(work)

    def _matrices(self, chunk: int) -> dict[int, Tensor]:
        return {
            i: matrix
            for gathered in self._chunks[chunk]
            for i, matrix in zip(gathered.batch.members, gathered.stored, strict=True)
        }

    def _allocate(self, chunks: Sequence[Sequence[Gathered]]) -> None:
        for gathered in (x for chunk in chunks for x in chunk):
            gathered.allocate(self._exchange.device)

    def _release(self, chunks: Sequence[Sequence[Gathered]]) -> None:
        for gathered in (x for chunk in chunks for x in chunk):
            gathered.release()

    def initialize_state(self) -> None:
        """Give every main parameter its zero momentum, as before the first step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def align_rotations(self, sweeps: int = 3) -> None:
        """Turn the rotations as so many steps on unchanging momenta would; weights stay.

        Those of all optimizers in `together`.
        """
        for optimizer in self.together:
            optimizer._align(sweeps)
        if self._sharing is not None:
            for _ in range(sweeps):
                self._rotate_shared(self._sharing)
                self._sharing.updates()  # which second moments advance with
        for optimizer in self.together:
            optimizer._release(optimizer._chunks)

    def _align(self, sweeps: int) -> None:
        """The same for rotations that are not shared; the other momenta stay gathered."""
        self.initialize_state()
        momenta = self._held_momenta()
        for number, chunk in enumerate(self._chunks):
            self._allocate([chunk])
            self._side.wait(self._gather(number, momenta))
            for stepped in (x for x in chunk if isinstance(x, Stepped)):
                for _ in range(sweeps):
                    attempt = attempt_rotation(stepped.state, self.aro)
                    climb([stepped.state], [attempt], self.aro)
                    finish_update(stepped.state, attempt, self.aro)
                stepped.release()
        if self.columns is not None:
            self.columns.align(momenta, sweeps)

    def rotation_state(self) -> dict[str, Tensor]:
        """What belongs to the matrices that this rank steps, by ``<kind>.<name>``, as views.

        ``rotation.<name>`` [m, k]; ``fallbacks.<name>``, counts of FALLBACK_RUNGS, int64; and for
        the adam projection ``second_moment.<name>`` [k, n]. The first two of a shared rotation by
        its group's name, with the first optimizer in `together`.
        """
        state = {} if self._groups is None else self._groups.state()
        for members in self._members():
            for name, moment in zip(members.names, members.second_moments, strict=True):
                if moment is not None:
                    state[f"second_moment.{name}"] = moment
        for stepped in self._stepped():
            for i, matrix in enumerate(stepped.batch.members):
                name = self._exchange.plan.sharded[matrix].matrix.name
                state[f"rotation.{name}"] = stepped.state.rotation[i]
                state[f"fallbacks.{name}"] = stepped.state.fallbacks[i]
                if stepped.state.second_moment is not None:
                    state[f"second_moment.{name}"] = stepped.state.second_moment[i]
        return state | (self.columns.rotation_state() if self.columns is not None else {})

    def read_only(self) -> frozenset[str]:
        """Keys of `rotation_state` that another rank has too, which writes them."""
        if self.columns is None or self.columns.is_owner:
            return frozenset()
        return frozenset(self.columns.rotation_state())

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
        if self._groups is not None:
            self._groups.loaded()
        self.reported = self.fallback_counts()
        for stepped in self._stepped():
            stepped.counted.copy_(stepped.state.fallbacks)

    def owned(self) -> list[str]:
        """The names of the matrices that this rank steps, and then of the groups it turns."""
        sharded = self._exchange.plan.sharded
        names = [sharded[i].matrix.name for x in self._stepped() for i in x.batch.members]
        names += [name for members in self._members() for name in members.names]
        return names + ([] if self._groups is None else self._groups.owned())

    def watch(self, sample: Collection[str]) -> None:
        """Name the matrices whose rotations a measured step measures too, which is dear."""
        names = iter(self.owned())
        self._sample = sample
        for gathered in (*self._stepped(), *self._members()):
            members = range(len(gathered.batch.members))
            gathered.sample = [i for i in members if next(names) in sample]

    def measures(self) -> Tensor:
        """What a step with `measuring` set has measured, on the device, in float64.

        Returns:
            for each matrix and group of `owned` MEASURES, NaN where there are none, and
            FALLBACK_RUNGS counted since the last call or loading.
        """
        columns, device = len(MEASURES) + len(FALLBACK_RUNGS), self._exchange.device
        rows = [torch.empty(0, columns, dtype=torch.float64, device=device)]
        for stepped in self._stepped():
            counts = stepped.state.fallbacks - stepped.counted
            stepped.counted.copy_(stepped.state.fallbacks)
            assert stepped.measures is not None, "measures() after a step without measuring"
            rows.append(torch.cat([stepped.measures.double(), counts.double()], dim=1))
            stepped.measures = None
        for members in self._members():
            assert members.measures is not None, "measures() after a step without measuring"
            own = members.measures.double()
            rows.append(torch.cat([own, own.new_zeros(len(own), len(FALLBACK_RUNGS))], dim=1))
            members.measures = None
        if self._groups is not None:
            rows.append(self._groups.measures(self._sample))
        return torch.cat(rows)

    def fallback_counts(self) -> dict[str, int]:
        """Rungs of orthonormalisation climbed so far, by name. Syncs with the device."""
        counts = [stepped.state.fallbacks.sum(dim=0) for stepped in self._stepped()]
        if self.columns is not None:
            counts.append(self.columns.fallbacks())
        counts += [] if self._groups is None else self._groups.fallback_counts()
        total = torch.stack(counts).sum(dim=0).tolist() if counts else [0] * len(FALLBACK_RUNGS)
        return dict(zip(FALLBACK_RUNGS, total, strict=True))
