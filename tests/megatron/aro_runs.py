"""What the tests look at inside ARO's training runs; functions here run inside a pool's ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from runs import TINY

ARO = [*TINY, "--optimizer", "aro"]
# Every kind of split of a dense model: query groups and gated fc1.
GATED = """
    --swiglu --disable-bias-linear --group-query-attention --num-query-groups 2
""".split()
MOE = """
    --num-experts 4 --moe-router-topk 2 --swiglu --disable-bias-linear
    --group-query-attention --num-query-groups 2 --moe-token-dispatcher-type alltoall
""".split()
DISTRIBUTED = ["--use-distributed-optimizer"]


def optimizer_state(model: list, optimizer: Any) -> dict[str, torch.Tensor]:
    """All state of this rank: momenta, Adam's moments, steps, rotations, fall-backs."""
    state = {}
    for i, matrices in enumerate(optimizer.matrices):
        state |= {f"aro{i}.{name}": tensor for name, tensor in matrices.rotation_state().items()}
    for index, chained in enumerate(optimizer.chained_optimizers):
        parameters = [p for group in chained.optimizer.param_groups for p in group["params"]]
        for i, parameter in enumerate(parameters):
            for key, value in chained.optimizer.state[parameter].items():
                state[f"{index}.{i}.{key}"] = torch.as_tensor(value)
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def decay_by_dimension(model: list, optimizer: Any) -> dict[int, set[float]]:
    """Which multiples of the weight decay the parameters of 1 and 2 dimensions have."""
    dimensions = {}
    for chunk in model:
        for parameter in chunk.parameters():
            dimensions[id(parameter)] = parameter.dim()
    found: dict[int, set[float]] = {}
    for chained in optimizer.chained_optimizers:
        for model_parameter, group in _groups(chained):
            found.setdefault(dimensions[id(model_parameter)], set()).add(group["wd_mult"])
    return found


def _groups(wrapped: Any) -> Any:
    """(model parameter, its group) of everything that this rank holds some of."""
    groups = wrapped.optimizer.param_groups
    if hasattr(wrapped, "model_param_group_index_map"):
        for parameter, (index, _) in wrapped.model_param_group_index_map.items():
            yield parameter, groups[index]
    else:
        for group in groups:
            for parameter in group["params"]:
                yield parameter, group


def endure(name: str, gradient: torch.Tensor, step: int) -> None:
    """Make gradients of layer 1 what no sane training gives, each weight in its way."""
    if ".layers.1." not in name:
        return
    if "linear_qkv" in name:  # rank one, equal rows, and almost too large for float32
        gradient.fill_(1e38)
    elif "linear_proj" in name or ("linear_fc1" in name and step >= 2):  # never, no longer
        gradient.zero_()
    elif "linear_fc2" in name:  # a momentum of denormals at first
        gradient.sign_().mul_(1e-37)


def train_recorded(argv: list[str], hardship: bool = False, states: bool = False) -> dict[str, Any]:
    """Train, one matrix at a time and in chunks, and record what this rank's part of ARO was given.

    Args:
        hardship: whether gradients go through `endure` first.
        states: whether to return what `optimizer_state` says in the end, as ``state``.

    Returns:
        result: the run's TrainResult; optimizers: for each MatrixOptimizer of this rank its
        position, the plan's matrices, the pieces of weights before the first step and after the
        last, and per step the pieces of gradients, the learning rate and the weight decay of
        matrices.
    """
    import runs

    from megatron_aro.megatron import optimizer
    from megatron_aro.runtime.matrix_optimizer import MatrixOptimizer
    from megatron_aro.sharding import plan

    optimizer.batch_limit = lambda m, n, workspace: 1
    plan.CHUNK_ELEMENTS = 1
    seen: dict[int, dict[str, Any]] = {}
    original = MatrixOptimizer.step

    def step(self: MatrixOptimizer, closure: None = None) -> None:
        weights = {name: main.detach().flatten().clone() for name, main in self._main.items()}
        exchange = self._exchange
        mine = seen.setdefault(
            id(self),
            {
                "id": id(self),
                "position": (exchange.t, exchange.d),
                "sharded": exchange.plan.sharded,
                "owned": [
                    exchange.plan.sharded[i].matrix.name
                    for i in exchange.plan.owned((exchange.t, exchange.d))
                ],
                "chunks": exchange.plan.chunks,
                "weights": weights,
                "steps": [],
            },
        )
        if hardship:
            for name, main in self._main.items():
                endure(name, main.grad, len(mine["steps"]))
        gradients = {name: main.grad.flatten().clone() for name, main in self._main.items()}
        rates = {(g["lr"], g["weight_decay"]) for g in self.param_groups}
        mine["steps"].append((gradients, *max(rates)))  # vectors are not decayed
        original(self, closure)
        mine["last"] = {name: main.detach().flatten().clone() for name, main in self._main.items()}

    MatrixOptimizer.step = step  # type: ignore[method-assign]
    result = runs.train(argv, inspect=optimizer_state if states else None)
    state, result.inspected = result.inspected, None
    return {"result": result, "optimizers": list(seen.values()), "state": state}


def whole(optimizers: list[dict[str, Any]], pieces: list[dict[str, torch.Tensor]]) -> dict:
    """The logical matrices, as stored, from the pieces of all ranks; NaN where none has any."""
    made: dict[str, torch.Tensor] = {}
    for optimizer, held in zip(optimizers, pieces, strict=True):
        t, d = optimizer["position"]
        for sharded in optimizer["sharded"]:
            matrix, part = sharded.matrix, sharded.parts[t]
            full = made.setdefault(
                matrix.name, torch.full((matrix.rows, matrix.columns), float("nan"))
            )
            rectangle = full[slice(*part.rows), slice(*part.columns)]
            flat = rectangle.flatten()
            for first, start, length in sharded.segments(t, d):
                flat[first : first + length] = held[matrix.parameter][start : start + length]
            rectangle.copy_(flat.view(rectangle.shape))
    return made


def train_with_poisoned_gradient(argv: list[str], iteration: int, ranks: list[int]) -> dict:
    """Train, and put a NaN into one reduced gradient before one step.

    Args:
        ranks: those that see it; all where parameters are replicated, as after an all-reduce.

    Returns:
        everything the optimizer holds right before and right after that step, and the run's
        weights.
    """
    import runs
    import torch.distributed as dist

    from megatron_aro.megatron.chain import AROChainedOptimizer

    seen: dict[str, Any] = {"returned": []}
    step, prepare_grads = AROChainedOptimizer.step, AROChainedOptimizer.prepare_grads

    def poisoned(self: AROChainedOptimizer) -> bool:
        returned = prepare_grads(self)
        if len(seen["returned"]) == iteration:
            seen["before"] = _everything(self)
            if dist.get_rank() in ranks:
                parameters = self.get_parameters()
                apart = [p for p in parameters if hasattr(p, "grad_norm_group")]  # detached MTP
                (apart or parameters)[0].grad.view(-1)[0] = float("nan")
        return returned

    def observed(self: AROChainedOptimizer) -> Any:
        returned = step(self)
        if len(seen["returned"]) == iteration:
            seen["after"] = _everything(self)
        seen["returned"].append(bool(returned[0]))
        return returned

    AROChainedOptimizer.step = observed  # type: ignore[method-assign]
    AROChainedOptimizer.prepare_grads = poisoned  # type: ignore[method-assign]
    result = runs.train(argv)
    return {**seen, "weights": result.weights, "exit_status": result.exit_status}


def _everything(optimizer: Any) -> dict[str, torch.Tensor]:
    main = [p for chained in optimizer.chained_optimizers for p in chained.get_parameters()]
    weights = {f"main.{i}": p.detach().clone() for i, p in enumerate(main)}
    return {**weights, **optimizer_state([], optimizer)}


def train_with_lost_parameter(argv: list[str]) -> int:
    """Train with one parameter taken out of the groups, as a fault in the routing would."""
    import runs

    from megatron_aro.megatron import optimizer as built

    original = built._param_groups

    def groups(*args: Any) -> Any:
        found = original(*args)
        next(g for g in found[False, False] if g["params"])["params"].pop()
        return found

    built._param_groups = groups
    return runs.train(argv).exit_status


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of tensors are the same, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def train_frozen(argv: list[str], module: str) -> Any:
    """Train and watch, with one weight of all layers frozen; returns a TrainResult."""
    from logical_state import train_watched

    from megatron_aro.megatron import optimizer
    from megatron_aro.megatron.names import trainable_parameters

    tag = optimizer.tag_parameters

    def freeze(chunks: list, *args: Any) -> None:
        for name, parameter in trainable_parameters(chunks):
            parameter.requires_grad_(not name.endswith(f".{module}.weight"))
        tag(chunks, *args)

    optimizer.tag_parameters = freeze
    return train_watched(argv)


def train_without_matrices(argv: list[str]) -> int:
    """Train a model in which no parameter is ARO's, as if all matrices were frozen."""
    import runs

    from megatron_aro.megatron import matrices, optimizer

    optimizer.is_aro_parameter = matrices.is_aro_parameter = lambda *_: False
    return runs.train(argv).exit_status


def train_unregistered(argv: list[str]) -> dict[str, torch.Tensor]:
    """The weights of a run without any of ARO's hooks but the one that finds dataset helpers."""
    import runs

    from megatron_aro.megatron import hooks

    hooks.HOOKS = tuple(hook for hook in hooks.HOOKS if hook.name == "compile_helpers")
    result = runs.train(argv)
    assert result.exit_status == 0
    return result.weights


def predicted_memory(optimizer: Any) -> dict[str, int]:
    """Bytes of a MatrixOptimizer on this rank: kept (rotation), and for a while in each step."""
    from megatron_aro.sharding.cost import rotation_bytes, workspace_bytes
    from megatron_aro.sharding.traffic import traffic

    exchange = optimizer._exchange
    plan, (t, d) = exchange.plan, (exchange.t, exchange.d)
    owned = [plan.sharded[i] for i in plan.owned((t, d))]
    batches = [stepped.batch.members for stepped in optimizer._stepped()]
    shapes = [plan.sharded[members[0]].matrix.shape for members in batches]
    return {
        "rotation": sum(rotation_bytes(*s.matrix.shape) for s in owned),
        "gathered": sum(4 * s.numel for s in owned),
        "exchange": traffic(plan)[t][d].buffers(4),
        "workspace": max(
            (len(x) * workspace_bytes(*shape) for x, shape in zip(batches, shapes, strict=True)),
            default=0,
        ),
    }


def check_resumes(pool: Any, folder: Path, world_size: int, argv: list[str]) -> None:
    """Six iterations straight, and three after a checkpoint of three: losses, weights, state.

    All bit for bit.

    Args:
        pool: of `pool`; folder: empty; argv: of a run of six iterations.
    """
    save = ["--save", str(folder), "--save-interval", "3"]
    straight = pool.train(world_size, [*argv, *save], inspect=optimizer_state)
    assert {p.name for p in folder.glob("iter_*")} == {"iter_0000003", "iter_0000006"}
    shutil.rmtree(folder / "iter_0000006")
    (folder / "latest_checkpointed_iteration.txt").write_text("3")

    load = ["--load", str(folder)]
    resumed = pool.train(world_size, [*argv, *load], inspect=optimizer_state)
    for before, after in zip(straight, resumed, strict=True):
        assert after.exit_status == 0
        assert after.losses == before.losses[3:]
        assert same(after.weights, before.weights)
        assert same(after.inspected, before.inspected)
