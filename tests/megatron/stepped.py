"""What one process makes of a run's gradients, matrix by matrix, and whether the run did too."""

from __future__ import annotations

import pytest
import torch
from aro_runs import whole
from runs import full_weights

import megatron_aro

HEADS, GROUPS, HIDDEN = 4, 2, 32
HEAD = HIDDEN // HEADS
PROJ = "decoder.layers.2.self_attention.linear_proj.weight"
TURNED = ["--aro-override", f"{PROJ}=right,*.3.mlp.linear_fc2.*=right"]
ROUTERS_TO_ADAMW = ["--aro-override", "*.router.weight=adamw"]


def given(flags: list[str], *names: str) -> dict[str, str]:
    """Those of these settings of ARO that the flags have."""
    return {
        name: flags[flags.index(f"--aro-{name}") + 1] for name in names if f"--aro-{name}" in flags
    }


def split(name: str, stored: torch.Tensor, flags: list[str]) -> dict[str, torch.Tensor]:
    """The matrices of a whole weight by name, cut as Megatron's own layers cut it."""
    splits = given(flags, "split").get("split", "qkv,gate-up").split(",")
    if "linear_qkv" in name and "qkv" in splits:
        queries = HEADS // GROUPS
        sizes = {"q": queries, "gate": queries, "k": 1, "v": 1}
        if stored.shape[0] == (HEADS + 2 * GROUPS) * HEAD:
            del sizes["gate"]
        parts = stored.view(GROUPS, -1, HEAD, HIDDEN).split(list(sizes.values()), dim=1)
        cut = {k: p.reshape(-1, HIDDEN) for k, p in zip(sizes, parts, strict=True)}
    elif "linear_fc1" in name and "gate-up" in splits:
        cut = dict(zip(("gate", "up"), stored.chunk(2), strict=True))
    else:
        return {name: stored}
    return {f"{name}#{part}": matrix for part, matrix in cut.items()}


def rotated_side(name: str, matrix: torch.Tensor, flags: list[str]) -> str:
    """The columns of weights that read the residual stream are rotated, else the rows."""
    if TURNED[1] in flags and name in (PROJ, "decoder.layers.3.mlp.linear_fc2.weight"):
        return "right"
    rule = given(flags, "orientation").get("orientation", "residual")
    if rule == "min-side":
        return "right" if matrix.shape[1] < matrix.shape[0] else "left"
    if rule != "residual":
        return rule
    reads = any(kind in name for kind in ("linear_qkv", "linear_fc1", "router", "gate_weight"))
    return "right" if reads else "left"


def first_and_last(ranks: list[dict], flags: list[str]) -> tuple[list, dict, dict]:
    """The optimizers of all ranks of a run, and its matrices before and after, by name.

    The weights in the end are cut here by Megatron's views, so that a wrong split or shard shows.
    """
    assert all(rank["result"].exit_status == 0 for rank in ranks)
    optimizers = [optimizer for rank in ranks for optimizer in rank["optimizers"]]
    first = whole(optimizers, [optimizer["weights"] for optimizer in optimizers])
    last = {
        name: matrix
        for stored, weight in full_weights([rank["result"] for rank in ranks]).items()
        if weight.dim() > 1
        for name, matrix in split(stored, weight, flags).items()
    }
    return optimizers, first, last


def check_steps(
    ranks: list[dict], flags: list[str], instances: int = 1, iterations: int = 5
) -> set[str]:
    """From Megatron's own gradients, rates and decay, `megatron_aro.ARO` gives the same weights.

    A wrong split, orientation or shard shows. Equal to the bit where both step one matrix at a
    time: gathering and returning are copies. (In batches of other sizes products round differently,
    and where a momentum is nearly singular that decides a direction.)

    Args:
        ranks: what `train_recorded` returned on each.
        flags: beside the model's; those of ARO's settings hold for the reference too.
        instances: of the distributed optimizer.
        iterations: of the run.

    Returns:
        the names of the matrices.
    """
    optimizers, first, last = first_and_last(ranks, flags)
    owned = [name for optimizer in optimizers for name in optimizer["owned"]]
    assert sorted(owned) == sorted([*first] * instances)  # one owner in each

    settings = given(flags, "projection", "rotation", "qr")
    parameters, reference = {}, {}
    for name, matrix in first.items():
        parameters[name] = torch.nn.Parameter(matrix.clone())
        reference[name] = megatron_aro.ARO(
            [parameters[name]], lr=1.0, orientation=rotated_side(name, matrix, flags), **settings
        )
    rates = []
    for step in zip(*(optimizer["steps"] for optimizer in optimizers), strict=True):
        gradients = whole(optimizers, [pieces for pieces, _, _ in step])
        _, lr, weight_decay = step[0]
        assert weight_decay == 0.1
        rates.append(lr)
        for name, optimizer in reference.items():
            (group,) = optimizer.param_groups
            group["lr"], group["weight_decay"] = lr, weight_decay
            parameters[name].grad = gradients[name].clone()
            optimizer.step()
    for name, parameter in parameters.items():
        assert torch.equal(last[name], parameter.data), name
    # Megatron's schedule: one step of warm-up, then cosine from 1e-2.
    assert len(rates) == iterations and rates[0] == 0 and rates[1] == pytest.approx(1e-2)
    assert rates[1:] == sorted(rates[1:], reverse=True)
    return set(first)
