"""Which Megatron parameters ARO steps, how they split into matrices, and which side is rotated.

The table of the paper's rule (arXiv 2602.09006: the residual-stream dimension is the row
dimension), by parameter name. Weights that read the residual stream are stored [out, hidden] and
are transposed; weights that write to it are stored [hidden, in] and are not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from megatron_aro.config import AROConfig
from megatron_aro.sharding.geometry import Layout
from megatron_aro.sharding.logical import LogicalMatrix, check_partition, stacked

READS, WRITES = "reads residual", "writes residual"

# The first pattern that matches the end of a name decides. A digit after "weight" is a grouped
# expert (transformer-engine's weight0..N).
_ROLES: tuple[tuple[str, str], ...] = (
    (r"\.linear_qkv\.weight", READS),
    (r"\.linear_proj\.weight", WRITES),
    (r"\.linear_fc1\.weight\d*", READS),
    (r"\.linear_fc2\.weight\d*", WRITES),
    (r"\.router\.weight", READS),
    (r"\.shared_experts\.gate_weight", READS),
    (r"\.linear_(q_proj|q_down_proj|kv_down_proj)\.weight", READS),  # MLA; up-projections do not
    (r"\.in_proj\.weight", READS),  # Mamba
    (r"\.out_proj\.weight", WRITES),
    (r"\.eh_proj\.weight", WRITES),  # multi-token prediction
)
_VOCABULARY = re.compile(r"(word_embeddings|position_embeddings|output_layer)\.weight$")


@dataclass(frozen=True)
class Placement:
    """What happens to one trainable parameter.

    `shape` is the whole parameter's, before tensor parallelism; `layout` says how that cuts it.
    `matrices` is empty for a parameter that AdamW steps. `note` says why an orientation was
    chosen where the table does not know the name.
    """

    name: str
    shape: tuple[int, ...]
    layout: Layout
    matrices: tuple[LogicalMatrix, ...] = ()
    note: str = ""


def is_aro_parameter(name: str, parameter: torch.Tensor) -> bool:
    """Hybrid mode: hidden matrices are ARO's; vocabulary and 1-D parameters are AdamW's."""
    if getattr(parameter, "is_embedding_or_output_parameter", False) or _VOCABULARY.search(name):
        return False
    # Three dimensions: all experts of one layer fused into one weight.
    return parameter.dim() == 2 or (parameter.dim() == 3 and ".experts." in name)


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
    if not is_aro_parameter(name, parameter):
        return Placement(name, shape, Layout(shape[0], tp, axis))
    if axis is not None and len(shape) == 3:
        raise ValueError(f"{name}: experts fused into one weight cannot be tensor parallel yet.")
    role = next((role for pattern, role in _ROLES if re.search(pattern + "$", name)), None)
    experts = shape[0] if len(shape) == 3 else 1
    rows, columns = shape[-2:]

    parts = _parts(name, rows, model_config)
    blocks = 2 if axis == 0 and "gate" in parts and "q" not in parts else 1
    matrices, note = [], ""
    for expert in range(experts):
        for part, intervals in parts.items():
            labels = ([f"expert{expert}"] if experts > 1 else []) + ([part] if part else [])
            height = sum(stop - start for start, stop in intervals)
            transposed, note = _orientation(aro.orientation, role, height, columns)
            matrices.append(
                LogicalMatrix(
                    name="#".join([name, *labels]),
                    parameter=name,
                    intervals=tuple((expert * rows + a, expert * rows + b) for a, b in intervals),
                    columns=columns,
                    transposed=transposed,
                )
            )
    check_partition(name, experts * rows, matrices)
    return Placement(name, shape, Layout(experts * rows, tp, axis, blocks), tuple(matrices), note)


def _sharded_axis(parameter: torch.Tensor) -> int | None:
    """The dimension that tensor parallelism cuts, by the attributes that Megatron sets."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    return parameter.partition_dim  # type: ignore[attr-defined]


def _parts(name: str, rows: int, model_config: object) -> dict[str, tuple[tuple[int, int], ...]]:
    """Row intervals of the parts of one (expert's) weight; one part, "", if it is not split."""
    if name.endswith(".linear_qkv.weight"):
        head = model_config.kv_channels  # type: ignore[attr-defined]
        groups = model_config.num_query_groups  # type: ignore[attr-defined]
        queries = model_config.num_attention_heads // groups * head  # type: ignore[attr-defined]
        sizes = {"q": queries, "k": head, "v": head}
        if getattr(model_config, "attention_output_gate", False):
            sizes = {"q": queries, "gate": queries, "k": head, "v": head}
        return stacked(sizes, repeats=groups)
    gated = getattr(model_config, "gated_linear_unit", False)
    if gated and re.search(r"\.linear_fc1\.weight\d*$", name):
        return stacked({"gate": rows // 2, "up": rows - rows // 2})
    return {"": ((0, rows),)}


def _orientation(rule: str, role: str | None, rows: int, columns: int) -> tuple[bool, str]:
    """(transposed, note) of one matrix [rows, columns] under an orientation rule."""
    if rule == "left":
        return False, ""
    if rule == "right":
        return True, ""
    if rule == "residual" and role is not None:
        return role == READS, ""
    note = "" if rule == "min-side" else "not in the table of residual weights: smaller side"
    return columns < rows, note
