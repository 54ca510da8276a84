"""Build Megatron's optimizer for ``--optimizer aro``: ARO for hidden matrices, AdamW for the rest.

Two sub-optimizers in a chain (four where experts have ranks of their own), each in the wrapper
that Megatron would use for Adam (DistributedOptimizer, Float16OptimizerWithFloat16Params or
FP32Optimizer). ARO's matrices have flat buffers of their own, so that each wrapper's state is of
one kind: momentum here, two moments there.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import (
    ParamKey,
    _get_megatron_optimizer_based_on_param_groups,
    _get_param_groups,
    check_config_overrides_consistency,
    get_standard_config_overrides,
)
from megatron.core.optimizer.optimizer import (
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from megatron.core.optimizer.optimizer_config import OptimizerConfig, ParamWithNamePredicate
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, get_pg_size

from megatron_aro.config import AROConfig
from megatron_aro.megatron import by_columns, checks, param_layout, support
from megatron_aro.megatron.arguments import NAME
from megatron_aro.megatron.chain import AROChainedOptimizer
from megatron_aro.megatron.checks import Groups, Placed
from megatron_aro.megatron.grids import Grid, make_grids
from megatron_aro.megatron.matrices import is_aro_parameter, place
from megatron_aro.megatron.monitor import Monitor
from megatron_aro.megatron.names import trainable_parameters
from megatron_aro.megatron.report import (
    print_padding,
    print_placements,
    print_sharing,
    print_unknown_vocabulary,
    whole_model,
)
from megatron_aro.megatron.shared import share
from megatron_aro.megatron.wrappers import (
    ARODistributedOptimizer,
    LoadableDistributedOptimizer,
    held_intervals,
    main_parameter,
)
from megatron_aro.runtime.exchange import Exchange
from megatron_aro.runtime.matrix_optimizer import MatrixOptimizer
from megatron_aro.sharding.cost import (
    batch_limit,
    rates_of,
    seconds,
    turning_seconds,
)
from megatron_aro.sharding.geometry import parts
from megatron_aro.sharding.plan import Sharded, make_plan


@dataclasses.dataclass
class AROOptimizerConfig(OptimizerConfig):
    """Megatron's OptimizerConfig and ARO's settings.

    Attributes:
        aro: ARO's own settings.
        report_interval: steps between two reports of fall-backs, None for never.
        report_phases: whether a report also says how long the phases of the last step took.
        use_gloo_process_groups: whether Megatron made gloo groups, for checkpoints.
        vocabulary: tokens, in full-model mode: rows of word embeddings and output layer beyond
            them are padding and stay as they are. None takes all rows for tokens.
    """

    aro: AROConfig = dataclasses.field(default_factory=AROConfig)
    report_interval: int | None = None
    report_phases: bool = False
    use_gloo_process_groups: bool = True
    vocabulary: int | None = None

    @classmethod
    def extend(cls, config: OptimizerConfig, **settings: Any) -> AROOptimizerConfig:
        """Megatron's config with ARO's settings beside its own."""
        own = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        return cls(**own, **settings)


def tag_parameters(model_chunks: Sequence[torch.nn.Module], aro: AROConfig | None = None) -> None:
    """Mark which parameters are ARO's and how they are laid out, before DDP builds flat buffers.

    Megatron's DDP puts parameters into separate buffers by the attribute that its layer-wise
    optimizer uses; each of the two sub-optimizers then owns whole buffers.

    Args:
        aro: the settings that `get_aro_optimizer` will have; None for the default ones.
    """
    aro = aro or AROConfig()
    for name, parameter in trainable_parameters(model_chunks):
        is_aro = is_aro_parameter(name, parameter, aro)
        parameter.is_managed_by_layer_wise_optimizer = is_aro  # type: ignore[attr-defined]
        if is_aro:
            param_layout.tag(parameter, aro.param_layout)


def get_aro_optimizer(
    config: OptimizerConfig,
    model_chunks: list[torch.nn.Module],
    config_overrides: dict[ParamKey, Any] | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> AROChainedOptimizer:
    """The optimizer of a model under ``--optimizer aro``; arguments as `get_megatron_optimizer`.

    What Megatron's own factory calls after `megatron_aro.register()`, and for training loops of
    one's own on megatron-core (docs/examples/own_loop.py has one whole): call `tag_parameters` on
    the chunks, wrap them in DDP, call this, then step, save and load as with any MegatronOptimizer.

    Args:
        config: with ``optimizer == "aro"`` and a learning rate; an `AROOptimizerConfig`, or any
            OptimizerConfig for ARO's default settings.
        model_chunks: DDP-wrapped chunks whose parameters went through `tag_parameters` first.
        config_overrides: settings of some parameters, as Megatron's; by default its own, which
            spare biases and norms the weight decay.
        pg_collection: process groups; by default those of `megatron.core.parallel_state`.

    Returns:
        A chain of ARO and AdamW, each where Megatron's wrappers would have Adam. States of
        checkpoints fit any layout with ``{"distrib_optim_sharding_type": "fully_reshardable"}``
        as the metadata of `sharded_state_dict`.

    Raises:
        RefusedError: a ValueError; a setting that ARO does not support, named as Megatron's flag.
        ValueError: a model that cannot be split as it is configured.
        RuntimeError: parameters were not tagged before DDP, or would have no optimizer, or two.
    """
    aro = getattr(config, "aro", None) or AROConfig()
    chunk = model_chunks[0]
    layout = argparse.Namespace(
        aro_param_layout=aro.param_layout, aro_mode=aro.mode, aro_sharing=aro.sharing
    )
    support.check_configs(get_model_config(chunk), chunk.ddp_config, config, layout)
    groups = _param_groups(config, model_chunks, config_overrides, aro)
    checks.each_parameter_once(model_chunks, groups)
    if config.use_distributed_optimizer:
        checks.tags(model_chunks, groups)
    param_layout.check(model_chunks, config, aro)
    grids = make_grids(
        pg_collection, model_chunks, getattr(config, "use_gloo_process_groups", True)
    )
    checks.some_matrix(groups, grids[False].model)
    placements = _place_all(model_chunks, aro, grids)
    checks.exceptions(placements, aro)

    wrapped = []
    of_aro: dict[bool, MegatronOptimizer] = {}
    for (is_aro, is_expert), of_kind in groups.items():
        grid = grids[is_expert]
        if is_aro:
            matrices = MatrixOptimizer(of_kind, config.lr, config.weight_decay, aro)
            optimizer = _wrap(NAME, matrices, _initialize_momentum, config, model_chunks, grid)
            of_aro[is_expert] = optimizer
        else:
            adam_config = copy.copy(config)
            adam_config.optimizer = "adam"
            adam, adam_init = _get_megatron_optimizer_based_on_param_groups(
                config=adam_config,
                model_chunks=model_chunks,
                param_groups=of_kind,
                skip_megatron_wrapping=True,
            )
            optimizer = _wrap("adam", adam, adam_init, config, model_chunks, grid)
        wrapped.append(optimizer)
    loads: dict[int, float] = {}
    for is_expert in sorted(of_aro):  # the dense ones first: they are larger and fewer
        bound = of_aro[is_expert], placements[is_expert], grids[is_expert], loads
        _bind(*bound, getattr(config, "vocabulary", None))
    shared: list[str] = []
    if aro.sharing != "none":
        shared = share([wrapped.optimizer for wrapped in of_aro.values()], loads)
    everywhere = whole_model([x for of_grid in placements.values() for _, x in of_grid])
    print_placements(everywhere)
    if aro.sharing != "none":
        print_sharing(everywhere)
    if aro.mode == "full-model" and getattr(config, "vocabulary", None) is None:
        print_unknown_vocabulary()
    if aro.param_layout == "whole":
        print_padding(*param_layout.elements(model_chunks))
    chain = AROChainedOptimizer(wrapped)
    if aro.monitor_interval:
        names = [matrix.name for placement in everywhere for matrix in placement.matrices]
        names += shared
        device = next(model_chunks[0].parameters()).device
        chain.monitor = Monitor(chain.matrices, names, aro.monitor_interval, device)
    return chain


def _place_all(
    model_chunks: Sequence[torch.nn.Module], aro: AROConfig, grids: dict[bool, Grid]
) -> dict[bool, Placed]:
    """(parameter, placement) of the dense parameters (False) and of the experts' (True)."""
    placed: dict[bool, Placed] = {False: [], True: []}
    for chunk in model_chunks:
        for name, parameter in trainable_parameters([chunk]):
            is_expert = not getattr(parameter, "allreduce", True)
            tp = get_pg_size(grids[is_expert].tensor)
            placement = place(name, parameter, get_model_config(chunk), aro, tp)
            placed[is_expert].append((parameter, placement))
    names = Counter(placement.name for of in placed.values() for _, placement in of)
    if names and max(names.values()) > 1:
        raise ValueError(f"Two parameters of this rank are called {names.most_common(1)[0][0]}.")
    return placed


def _param_groups(
    config: OptimizerConfig,
    model_chunks: list,
    overrides: dict[ParamKey, Any] | None,
    aro: AROConfig,
) -> Groups:
    """Megatron's parameter groups by (ARO's, experts'), the same kinds on all ranks."""
    if overrides is None:
        overrides = get_standard_config_overrides(config)
    check_config_overrides_consistency(config, overrides)
    stepped = {  # by identity: Megatron asks with names that are numbered within a stage
        id(parameter)
        for name, parameter in trainable_parameters(model_chunks)
        if is_aro_parameter(name, parameter, aro)
    }
    is_aro = ParamWithNamePredicate(name="aro", fn=lambda parameter, _: id(parameter) in stepped)
    overrides = {**overrides, ParamKey(with_name_predicate=is_aro): {"optimizer": NAME}}
    groups: Groups = {}
    for group in _get_param_groups(model_chunks, config, overrides):
        kind = (group.get("optimizer") == NAME, group["is_expert_parallel"])
        groups.setdefault(kind, []).append(group)
    return dict(sorted(groups.items(), reverse=True))


def _initialize_momentum(optimizer: MatrixOptimizer, config: OptimizerConfig | None = None) -> None:
    optimizer.initialize_state()


def _wrap(
    kind: str,
    optimizer: torch.optim.Optimizer,
    init_state: Any,
    config: OptimizerConfig,
    model_chunks: list,
    grid: Grid,
) -> MegatronOptimizer:
    """Put a torch optimizer into the wrapper that Megatron's own factory would choose for Adam."""
    if config.use_distributed_optimizer:
        is_aro = kind == NAME
        distributed = ARODistributedOptimizer if is_aro else LoadableDistributedOptimizer
        wrapped = distributed(
            optimizer,
            config,
            None,
            init_state,
            model_chunks=model_chunks,
            per_model_buffers={
                index: [
                    buffer
                    for buffer in getattr(chunk, grid.buffers)
                    if buffer.params[0].is_managed_by_layer_wise_optimizer == is_aro
                ]
                for index, chunk in enumerate(model_chunks)
            },
            data_parallel_group=grid.data,
            data_parallel_group_gloo=grid.data_gloo,
            data_parallel_group_idx=grid.checkpoint_index,
            distributed_optimizer_instance_id=grid.instance,
        )
        wrapped.grad_stats_parallel_group = grid.statistics
    elif config.bf16:
        wrapped = Float16OptimizerWithFloat16Params(optimizer, config, None, init_state)
        wrapped.grad_stats_parallel_group = grid.model
    else:
        wrapped = FP32Optimizer(optimizer, config, init_state)
        wrapped.grad_stats_parallel_group = grid.model
    groups = ProcessGroupCollection.use_mpu_process_groups()
    wrapped.tp_group = groups.tp
    wrapped.expert_tp_group = getattr(groups, "expt_tp", groups.tp)
    return wrapped


def _bind(
    wrapped: MegatronOptimizer,
    placements: Placed,
    grid: Grid,
    loads: dict[int, float],
    vocabulary: int | None,
) -> None:
    """Plan who steps what, and tell ARO which main parameters the wrapper left on this rank.

    Args:
        loads: seconds of work that the ranks of this pipeline stage have already; increased.
        vocabulary: see `AROOptimizerConfig`.
    """
    tp, dp = get_pg_size(grid.tensor), get_pg_size(grid.data)
    sharded, main_parameters = [], {}
    for parameter, placement in placements:
        if placement.by == "adamw":
            continue
        held = held_intervals(wrapped, parameter, dp)
        sharded += [
            Sharded(matrix, parts(matrix, placement.layout), placement.layout.axis is None, held)
            for matrix in placement.matrices
        ]
        main = main_parameter(wrapped, parameter)
        if main is not None:
            main_parameters[placement.name] = main
    before = [[loads.get(rank, 0.0) for rank in row] for row in grid.ranks]
    aro = wrapped.optimizer.aro
    cost = functools.partial(seconds, rates=rates_of(aro))
    at_most = functools.partial(batch_limit, workspace=aro.workspace_mib << 20)
    turning = turning_seconds(by_columns.turned(placements), rates_of(aro))
    plan = make_plan(sharded, tp, dp, cost, before, at_most, turning)
    for ranks, row in zip(grid.ranks, plan.loads, strict=True):
        loads.update(zip(ranks, row, strict=True))
    device = placements[0][0].device if placements else torch.device("cpu")
    exchange = Exchange(
        plan,
        grid.tensor if tp > 1 else None,
        grid.data if dp > 1 else None,
        device,
        {"fp32": torch.float32, "bf16": torch.bfloat16}[aro.exchange_dtype],
    )
    columns, true_elements = None, None
    if aro.mode == "full-model":
        columns, true_elements = by_columns.make(
            wrapped, placements, grid, plan.turner, main_parameters, vocabulary
        )
    wrapped.optimizer.bind(exchange, main_parameters, columns, true_elements)
