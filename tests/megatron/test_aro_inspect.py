"""`megatron-aro inspect`, and that ARO's part of a checkpoint is tensors and plain values."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from aro_runs import ARO, DISTRIBUTED, GATED, MOE
from pool import Pool

COMMAND = [sys.executable, "-W", "ignore", "-m", "megatron_aro.cli.main", "inspect"]
EP2 = ["--expert-model-parallel-size", "2"]
# Reads every entry of an optimizer that is not a tensor as torch alone would, without Megatron.
SAFELY = """
import io, sys, torch
from pathlib import Path
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
folder = Path(sys.argv[1])
metadata = FileSystemReader(str(folder)).read_metadata()
where = {index.fqn: info for index, info in metadata.storage_data.items()}
read = 0
for key, entry in metadata.state_dict_metadata.items():
    if "optimizer" in key and isinstance(entry, BytesStorageMetadata):
        info = where[key]
        with open(folder / info.relative_path, "rb") as file:
            file.seek(info.offset)
            torch.load(io.BytesIO(file.read(info.length)), weights_only=True)
        read += 1
assert not any(name.split(".")[0] == "megatron" for name in sys.modules)
print(read)
"""


def save(pool: Pool, folder: Path, ranks: int, flags: list[str]) -> None:
    argv = [*ARO, *flags, "--save", str(folder), "--save-interval", "5"]
    assert pool.train(ranks, argv)[0].exit_status == 0


def test_it_says_what_is_there(pool: Pool, tmp_path: Path) -> None:
    save(pool, tmp_path, 2, [*MOE, *EP2, *DISTRIBUTED, "--aro-projection", "adam"])
    done = subprocess.run([*COMMAND, str(tmp_path), "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["layout"]["expert_model_parallel_size"] == 2
    assert found["sharding"] == "dp_reshardable" and found["optimizer"] == "aro"
    assert found["settings"]["projection"] == "adam"
    assert len(found["matrices"]) == 2 * (3 + 1 + 1 + 4 * 3)
    assert {"weights", "param", "exp_avg", "rotation", "second_moment"} <= found["bytes"].keys()
    assert sum(found["bytes"].values()) < found["bytes_on_disk"]
    shown = subprocess.run([*COMMAND, str(tmp_path / "iter_0000005")], capture_output=True)
    text = shown.stdout.decode()
    assert "--aro-projection adam" in text and "|R'R - I|" in text
    assert text.count("decoder.layers.") == len(found["matrices"])


@pytest.mark.parametrize("flags", [[], [*DISTRIBUTED]], ids=["model space", "bucket space"])
def test_aros_entries_need_no_unpickling(pool: Pool, tmp_path: Path, flags: list[str]) -> None:
    save(pool, tmp_path, 2, [*GATED, *flags])
    command = [sys.executable, "-W", "ignore", "-c", SAFELY, str(tmp_path / "iter_0000005")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) > 0) == bool(flags)


def test_a_torch_checkpoints_state_is_plain(pool: Pool, tmp_path: Path) -> None:
    save(pool, tmp_path, 1, [*GATED, "--ckpt-format", "torch"])
    saved = torch.load(next(tmp_path.glob("iter_*/*/*.pt")), weights_only=False)
    todo, kinds = [saved["optimizer"]], set()
    while todo:
        thing = todo.pop()
        if isinstance(thing, dict):
            todo += thing.values()
        elif isinstance(thing, list | tuple):
            todo += thing
        else:
            kinds.add(type(thing))
    assert kinds <= {torch.Tensor, torch.nn.Parameter, int, float, str, bool, type(None)}


def test_other_folders_are_told(tmp_path: Path) -> None:
    done = subprocess.run([*COMMAND, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2 and "is no torch_dist checkpoint" in done.stderr
    (tmp_path / ".metadata").write_text("noise")
    done = subprocess.run([*COMMAND, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2 and "cannot be read as a checkpoint" in done.stderr
