"""The patches for source trees: applied to the released files, trained with, and taken out."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import megatron.core
import pytest
from aro_runs import ARO, DISTRIBUTED
from megatron.core.package_info import __version__
from pool import Pool

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "patches" / "README.md").read_text()
PATCH = f"megatron-{'.'.join(__version__.split('.')[:2])}.patch"
FLAGS = [*ARO, *DISTRIBUTED, "--train-iters", "2"]

# Stands for the pretrain_gpt.py of the tree, which no wheel has: Megatron's own parser and loop,
# and nothing that registers ARO. Its first three lines are there for want of a GPU.
SCRIPT = """
import sys
from megatron_aro.megatron import cpu_mode
if cpu_mode.enable():
    sys.argv[1:] = cpu_mode.prepare(sys.argv[1:])

from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
import megatron.training
from megatron_aro.pretrain_gpt import datasets, forward_step

if __name__ == "__main__":
    print("trained with", megatron.training.__file__)
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The released files as a source tree has them."""
    released = Path(megatron.core.__file__).parents[1]
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(released, tmp_path / "Megatron-LM" / "megatron", ignore=ignored)
    (tmp_path / "Megatron-LM" / "pretrain_gpt.py").write_text(SCRIPT)
    return tmp_path / "Megatron-LM"


def files(tree: Path) -> dict[str, str]:
    """Digest of each file."""
    return {
        path.relative_to(tree).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(tree.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def commands() -> Iterator[str]:
    """The git commands of the README for this release: to apply, and to reverse."""
    yield from re.findall(rf"^git apply .*{re.escape(PATCH)}\"", README, re.MULTILINE)


def run(command: str, tree: Path) -> None:
    """Run a command of the README in the tree; git must not find a repository around it."""
    environment = {**os.environ, "MEGATRON_ARO": str(ROOT)}
    environment["GIT_CEILING_DIRECTORIES"] = str(tree.parent)
    subprocess.run(["bash", "-ec", command], cwd=tree, env=environment, check=True)


def launch(tree: Path) -> subprocess.CompletedProcess:
    """Train with the tree's own script and files on two ranks."""
    path = os.pathsep.join([str(tree), os.environ["PYTHONPATH"]])
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    return subprocess.run(
        [*command, "pretrain_gpt.py", *FLAGS],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_there_is_a_patch_for_the_installed_release() -> None:
    """And a command each to put it in and to take it out."""
    assert (ROOT / "patches" / PATCH).is_file()
    put_in, take_out = commands()
    assert " -R " in take_out and " -R " not in put_in
    named = set(re.findall(r"megatron-[\d.]+\.patch", README))
    assert named == {path.name for path in (ROOT / "patches").glob("*.patch")}


def test_applied_and_reversed_the_tree_is_as_before(tree: Path) -> None:
    """One file changes, by a few added lines; reversing leaves every byte as released."""
    before = files(tree)
    put_in, take_out = commands()
    run(put_in, tree)
    changed = {name for name, digest in files(tree).items() if before.get(name) != digest}
    assert changed == {"megatron/training/__init__.py"}
    run(take_out, tree)
    assert files(tree) == before
    with pytest.raises(subprocess.CalledProcessError):  # there is nothing to take out any more
        run(take_out, tree)


def test_a_patched_tree_trains_with_its_own_script(tree: Path, pool: Pool) -> None:
    """Two ranks, distributed optimizer: the losses of our entry; without the patch, no such choice.

    Losses are compared as Megatron prints them, to seven digits.
    """
    unpatched = launch(tree)
    assert unpatched.returncode != 0 and "invalid choice: 'aro'" in unpatched.stderr
    put_in, _ = commands()
    run(put_in, tree)
    native = launch(tree)
    assert native.returncode == 0, native.stderr[-3000:]
    assert f"trained with {tree / 'megatron' / 'training'}" in native.stdout
    assert losses(native.stdout) == losses(pool.train(2, FLAGS)[1].stdout)
    assert len(losses(native.stdout)) == 2


def losses(log: str) -> list[str]:
    return re.findall(r"lm loss: (\S+)", log)
