"""Which Megatron parameters ARO steps, and how they split into matrices.

Which side is rotated is decided in `megatron_aro.sharding.rules`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import torch

from megatron_aro.config import AROConfig, flag
from megatron_aro.sharding import rules
from megatron_aro.sharding.geometry import Layout
from megatron_aro.sharding.logical import LogicalMatrix, check_partition

_VOCABULARY = re.compile(r"(word_embeddings|position_embeddings|output_layer)\.weight$")
# Several projections in one weight, of each of which a tensor-parallel rank has a stretch.
_JOINED = (".in_proj.weight", ".linear_qkv_down_proj.weight")
_SHARED = "embedding.word_embeddings.weight"

By = Literal["adamw", "matrices", "columns", "vector"]


@dataclass(frozen=True)
class Placement:
    """What happens to one trainable parameter.

    `shape` is the whole parameter's, before tensor parallelism; `layout` says how that cuts it.
    `matrices` is empty for a parameter that is not stepped as matrices with an owner. `note` says
    why an orientation was chosen where the table does not know the name. `by`, what steps it:
    AdamW; ARO, in matrices; in full-model mode also ARO where it lies, by columns, or as a vector.
    """

    name: str
    shape: tuple[int, ...]
    layout: Layout
    matrices: tuple[LogicalMatrix, ...] = ()
    note: str = ""
    by: By = "adamw"


def is_hidden_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Hybrid mode: these are ARO's; vocabulary and 1-D parameters are AdamW's."""
    if getattr(parameter, "is_embedding_or_output_parameter", False) or _VOCABULARY.search(name):
        return False
    # Three dimensions: all experts of one layer fused into one weight.
    return parameter.dim() == 2 or (parameter.dim() == 3 and ".experts." in name)


def would_be_aros(name: str, parameter: torch.Tensor, aro: AROConfig) -> bool:
    """Whether ARO steps it unless an exception sends it to AdamW."""
    return aro.mode == "full-model" or is_hidden_matrix(name, parameter)


def is_aro_parameter(name: str, parameter: torch.Tensor, aro: AROConfig) -> bool:
    """Whether ARO steps it."""
    return would_be_aros(name, parameter, aro) and not rules.is_adamws(
        rule_name(name, parameter), aro
    )


def rule_name(name: str, parameter: torch.Tensor) -> str:
    """The name that exceptions mean: all stages' copies of the word embeddings go the same way."""
    return _SHARED if getattr(parameter, "shared_embedding", False) else name


def place(
    name: str, parameter: torch.Tensor, model_config: object, aro: AROConfig, tp: int = 1
) -> Placement:
    """Decide the optimizer of a parameter, its logical matrices and their orientation.

    Args:
        name: global name.
        parameter: [rows, columns], or [experts, rows, columns] for fused experts; where it is
            tensor parallel, one of `tp` shards.
        model_config: Megatron's TransformerConfig of the chunk that holds it.

    Raises:
        ValueError: the parameter's rows do not split as the model configuration says.
    """
    axis = _sharded_axis(parameter) if tp > 1 else None
    shape = tuple(n * tp if i == axis else n for i, n in enumerate(parameter.shape))
    if not is_aro_parameter(name, parameter, aro):
        return Placement(name, shape, Layout(shape[0], tp, axis))
    if not is_hidden_matrix(name, parameter):
        by: By = "columns" if parameter.dim() == 2 else "vector"
        if by == "columns" and axis == 1:
            raise ValueError(
                f"{name}: a vocabulary matrix whose columns tensor parallelism cuts is not "
                f"supported in full-model mode: send it to AdamW ({flag('override')})."
            )
        return Placement(name, shape, Layout(shape[0], tp, axis), by=by)
    if axis is not None and len(shape) == 3:
        raise ValueError(f"{name}: experts fused into one weight cannot be tensor parallel yet.")
    experts = shape[0] if len(shape) == 3 else 1
    rows, columns = shape[-2:]
    gated = _is_gated(name, model_config)
    blocks = 2 if gated and axis == 0 else 1
    parts = _parts(name, rows, gated, model_config, aro)
    if blocks == 2 and len(parts) == 1:
        raise ValueError(
            f"{name}: {flag('split')} without gate-up makes gate and up one matrix, of which each "
            "tensor-parallel rank has two stretches: split them, or do without tensor parallelism."
        )
    of_all = {
        "#".join([f"expert{expert}"] * (experts > 1) + [part] * bool(part)): tuple(
            (expert * rows + a, expert * rows + b) for a, b in intervals
        )
        for expert in range(experts)
        for part, intervals in parts.items()
    }
    hidden: int = model_config.hidden_size  # type: ignore[attr-defined]
    matrices, note = rules.matrices(name, of_all, columns, aro, hidden)
    check_partition(name, experts * rows, matrices)
    by_row = aro.projection == "adam" or not matrices[0].transposed
    if name.endswith(_JOINED) and axis == 0 and by_row:
        raise ValueError(
            f"{name}: tensor-parallel ranks have a stretch of each of its projections, so that "
            "what ARO keeps by row would mean other rows after a change of TP: use orientation "
            f"residual and another projection than adam, or {flag('override')} "
            f"*.{'.'.join(name.split('.')[-2:])}=adamw, or no tensor parallelism."
        )
    layout = Layout(experts * rows, tp, axis, blocks)
    return Placement(name, shape, layout, matrices, note, "matrices")


def _sharded_axis(parameter: torch.Tensor) -> int | None:
    """The dimension that tensor parallelism cuts, by the attributes that Megatron sets."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    return parameter.partition_dim  # type: ignore[attr-defined]


def _is_gated(name: str, model_config: object) -> bool:
    gated = getattr(model_config, "gated_linear_unit", False)
    return gated and re.search(r"\.linear_fc1\.weight\d*$", name) is not None


def _parts(name: str, rows: int, gated: bool, model_config: object, aro: AROConfig) -> rules.Parts:
    """Row intervals of the parts of one (expert's) weight; one part, "", if it is not split."""
    if name.endswith(".linear_qkv.weight"):
        head = model_config.kv_channels  # type: ignore[attr-defined]
        groups = model_config.num_query_groups  # type: ignore[attr-defined]
        queries = model_config.num_attention_heads // groups * head  # type: ignore[attr-defined]
        sizes = {"q": queries, "k": head, "v": head}
        if getattr(model_config, "attention_output_gate", False):
            sizes = {"q": queries, "gate": queries, "k": head, "v": head}
        return rules.fused(aro, "qkv", sizes, repeats=groups)
    if gated:
        return rules.fused(aro, "gate-up", {"gate": rows // 2, "up": rows - rows // 2})
    return {"": ((0, rows),)}
