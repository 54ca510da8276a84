"""Say what is in a torch_dist checkpoint: layout, settings, sizes, orthogonality of rotations.

    megatron-aro inspect CHECKPOINT [--json]

Tensors are read one at a time, and nothing is unpickled but what torch's reader needs.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from megatron_aro.config import flag, settings
from megatron_aro.rotation import FALLBACK_RUNGS

_ARO = "optimizer.aro."
_TRACKER = "latest_checkpointed_iteration.txt"
_LAYOUT = (
    "world_size",
    "data_parallel_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "use_distributed_optimizer",
)


def add_parser(commands: Any) -> None:
    """Add `inspect` to the subcommands of an argparse parser."""
    parser = commands.add_parser(
        "inspect", help="what is in a checkpoint", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "checkpoint", type=Path, help="folder of one iteration, or that of --save: its latest"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    found = inspect(args.checkpoint)
    print(json.dumps(found, indent=2) if args.json else table(found))


def inspect(checkpoint: Path) -> dict[str, Any]:
    """What is in a checkpoint, as plain values; sizes in bytes.

    Args:
        checkpoint: a folder with ".metadata", or one with Megatron's tracker of such folders.

    Raises:
        ValueError: it is no torch_dist checkpoint, or damaged.
    """
    folder = _folder(checkpoint)
    warnings.simplefilter("ignore")  # of Megatron and torch, about themselves
    from megatron.core import dist_checkpointing

    try:
        reader = FileSystemReader(str(folder))
        entries = reader.read_metadata().state_dict_metadata
        common = dist_checkpointing.load_common_state_dict(str(folder))
        stored = {k: v for k, v in entries.items() if isinstance(v, TensorStorageMetadata)}
        matrices = _matrices(reader, stored)
    except Exception as error:
        words = f"{type(error).__name__} {error}"
        raise ValueError(f"{folder} cannot be read as a checkpoint: {words}") from error
    saved = vars(common["args"])
    metadata = common.get("content_metadata", {})
    sizes: dict[str, int] = {}
    for key, entry in stored.items():
        kind = _kind(key)
        sizes[kind] = sizes.get(kind, 0) + math.prod(entry.size) * entry.properties.dtype.itemsize
    aro = saved["optimizer"] == "aro"
    return {
        "folder": str(folder),
        "iteration": common["iteration"],
        "optimizer": saved["optimizer"],
        "layout": {name: saved.get(name) for name in _LAYOUT},
        "sharding": metadata.get("distrib_optim_sharding_type", "model space"),
        "settings": {f.name: saved.get(f"aro_{f.name}") for f in settings()} if aro else {},
        "bytes": sizes,
        "bytes_on_disk": sum(path.stat().st_size for path in folder.iterdir()),
        "matrices": matrices,
    }


def _folder(checkpoint: Path) -> Path:
    if (checkpoint / ".metadata").is_file():
        return checkpoint
    tracker = checkpoint / _TRACKER
    if not tracker.is_file():
        raise ValueError(
            f"{checkpoint} is no torch_dist checkpoint: it has neither .metadata nor {_TRACKER}."
        )
    number = tracker.read_text().strip()
    folder = checkpoint / (f"iter_{int(number):07d}" if number.isdecimal() else number or "?")
    if not (folder / ".metadata").is_file():
        raise ValueError(f"{folder}, which {tracker} names, is no torch_dist checkpoint.")
    return folder


def _matrices(
    reader: FileSystemReader, stored: dict[str, TensorStorageMetadata]
) -> list[dict[str, Any]]:
    matrices = []
    for key in sorted(stored):
        if not key.startswith(_ARO + "rotation."):
            continue
        name = key.removeprefix(_ARO + "rotation.")
        rotation = _read(reader, stored, key)
        counts = _read(reader, stored, f"{_ARO}fallbacks.{name}")
        gram = rotation.double().T @ rotation.double()
        error = (gram - torch.eye(gram.shape[0], dtype=gram.dtype)).abs().max()
        matrices.append(
            {
                "name": name,
                "m": rotation.shape[0],
                "k": rotation.shape[1],
                "orthogonality_error": error.item(),
                "fallbacks": dict(zip(FALLBACK_RUNGS, counts.tolist(), strict=True)),
                "bytes": rotation.numel() * rotation.itemsize,
            }
        )
    return matrices


def _read(
    reader: FileSystemReader, stored: dict[str, TensorStorageMetadata], key: str
) -> torch.Tensor:
    tensor = torch.empty(stored[key].size, dtype=stored[key].properties.dtype)
    load({key: tensor}, storage_reader=reader, no_dist=True)
    return tensor


def _kind(key: str) -> str:
    if key.startswith(_ARO):
        return key.removeprefix(_ARO).partition(".")[0]
    if "optimizer.state." in key:
        return key.partition("optimizer.state.")[2].partition(".")[0]
    if "optimizer.distributed." in key:
        return key.rpartition(".")[2]
    return "weights"


def table(found: dict[str, Any]) -> str:
    """`inspect`'s result for people."""
    mib = 2.0**20
    layout = ", ".join(f"{k} {v}" for k, v in found["layout"].items() if v is not None)
    lines = [
        f"{found['folder']}: iteration {found['iteration']} of --optimizer {found['optimizer']}",
        f"layout   {layout}",
        f"sharding {found['sharding']}",
    ]
    if found["settings"]:
        said = " ".join(f"{flag(name)} {value}" for name, value in found["settings"].items())
        lines.append(f"settings {said}")
    lines += [f"{size / mib:12.3f} MiB {kind}" for kind, size in found["bytes"].items()]
    lines.append(f"{found['bytes_on_disk'] / mib:12.3f} MiB on disk")
    if found["matrices"]:
        width = max(len(matrix["name"]) for matrix in found["matrices"])
        counts = "  ".join(FALLBACK_RUNGS)
        lines.append(f"{'matrix':{width}}  {'m x k':>13}  |R'R - I|  fall-backs: {counts}")
    for matrix in found["matrices"]:
        size = f"{matrix['m']} x {matrix['k']}"
        counts = "  ".join(f"{count:>{len(rung)}}" for rung, count in matrix["fallbacks"].items())
        error = matrix["orthogonality_error"]
        lines.append(f"{matrix['name']:{width}}  {size:>13}  {error:9.1e}              {counts}")
    return "\n".join(lines)
