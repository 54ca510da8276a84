"""The rules by which parameters become ARO's matrices, for real models and for plans alike.

The table of the paper's rule (arXiv 2602.09006: the residual-stream dimension is the row
dimension), by parameter name. Weights that read the residual stream are stored [out, hidden] and
are transposed; weights that write to it are stored [hidden, in] and are not. What `AROConfig` says
of orientation, splits, exceptions by name and shared rotations is applied here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from megatron_aro.config import ADAMW, AROConfig, flag
from megatron_aro.sharding.logical import Interval, LogicalMatrix, stacked

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
    # MLA; up-projections do not. The fused qkv_down_proj is one matrix: a tensor-parallel rank has
    # a stretch of q's rows above one of kv's, of another length, and `geometry.Layout` knows equal
    # blocks only. As columns of what is rotated their order does not matter.
    (r"\.linear_(q_proj|q_down_proj|kv_down_proj|qkv_down_proj)\.weight", READS),
    (r"\.linear_(q|kv)\.weight", READS),  # cross-attention; kv the encoder's stream
    (r"\.in_proj\.weight", READS),  # Mamba
    (r"\.out_proj\.weight", WRITES),
    (r"\.eh_proj\.weight", WRITES),  # multi-token prediction
)

_LAYER = re.compile(r"^(?:decoder|(mtp))\.layers\.(\d+)\.")

Parts = Mapping[str, tuple[Interval, ...]]


def is_adamws(name: str, aro: AROConfig) -> bool:
    """Whether an exception sends this parameter, which would be ARO's, to AdamW."""
    rules = (rule for pattern, rule in aro.exceptions if fnmatchcase(name, pattern))
    return next(rules, None) == ADAMW


def fused(aro: AROConfig, kind: str, sizes: Mapping[str, int], *, repeats: int = 1) -> Parts:
    """Row intervals of the parts of a fused weight; of one part, "", if it is not to be split."""
    if kind in aro.splits:
        return stacked(sizes, repeats=repeats)
    return {"": ((0, repeats * sum(sizes.values())),)}


def matrices(
    name: str, parts: Parts, columns: int, aro: AROConfig, hidden: int
) -> tuple[tuple[LogicalMatrix, ...], str]:
    """The matrices of a parameter, and why a side was chosen where the table has no such name.

    Args:
        hidden: the residual dimension.
    """
    role = next((role for pattern, role in _ROLES if re.search(pattern + "$", name)), None)
    made, notes = [], []
    for part, intervals in parts.items():
        whole = f"{name}#{part}" if part else name
        rows = sum(stop - start for start, stop in intervals)
        transposed, note = _orientation(_rule(name, whole, aro), role, rows, columns)
        matrix = LogicalMatrix(whole, name, intervals, columns, transposed)
        if transposed == (role == READS) and matrix.shape[0] == hidden:
            matrix = dataclasses.replace(matrix, group=_group(name, role, aro))
        made.append(matrix)
        notes.append(note)
    return tuple(made), next(filter(None, notes), "")


def _rule(parameter: str, matrix: str, aro: AROConfig) -> str:
    for pattern, rule in aro.exceptions:
        if rule != ADAMW and any(fnmatchcase(name, pattern) for name in (parameter, matrix)):
            return rule
    return aro.orientation


def _group(name: str, role: str | None, aro: AROConfig) -> str:
    """Whose rotation a matrix shares whose rows are the residual dimension; "" for nobody's.

    In a chain group l is of the stream between layers l - 1 and l, counted from 0: written by the
    one, read by the other. A depth of multi-token prediction has a chain of its own.
    """
    if aro.sharing == "none" or role is None:
        return ""
    if aro.sharing == "global":
        return "global"
    layer = _LAYER.match(name)
    if layer is None or name.endswith(".linear_kv.weight"):  # the encoder's stream
        return ""
    mtp, number = layer.groups()
    reads = role == READS or name.endswith(".eh_proj.weight")
    if mtp:
        return f"mtp.{number}.chain.{int(not reads)}"
    return f"chain.{int(number) + (not reads)}"


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


def unused(
    aro: AROConfig, parameters: Iterable[tuple[str, Iterable[LogicalMatrix]]]
) -> dict[str, str]:
    """The exceptions, pattern -> rule, that fit none of these parameters nor their matrices.

    Args:
        parameters: names of all that are ARO's or would be, with the matrices that it steps.
    """
    left = dict(aro.exceptions)
    for name, of in parameters:
        for pattern, rule in list(left.items()):
            names = [name] if rule == ADAMW else [name, *(x.name for x in of)] if of else []
            if any(fnmatchcase(x, pattern) for x in names):
                del left[pattern]
    return left


def check_used(left: Mapping[str, str]) -> None:
    """Refuse exceptions that fit nothing in the whole model.

    Raises:
        ValueError: naming the first.
    """
    for pattern, rule in left.items():
        what = "parameter" if rule == ADAMW else "matrix"
        raise ValueError(
            f"{flag('override')} {pattern}={rule} fits no {what} of ARO in this model: names are "
            "those of the table printed at start-up, layers and experts counted from 0."
        )
