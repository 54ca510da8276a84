"""The patches for source trees: applied to the released files, trained with, and taken out."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import megatron.core
import pytest
from aro_runs import ARO, DISTRIBUTED
from megatron.core.package_info import __version__ as installed
from pool import Pool

from megatron_aro.version import TESTED

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "patches" / "README.md").read_text()
FLAGS = [*ARO, *DISTRIBUTED, "--train-iters", "2"]

# Stands for the pretrain_gpt.py of the tree, which no wheel has: Megatron's own parser and loop on
# the model and data of our entry, in what 0.18 and 0.19 have in common, and nothing that registers
# ARO. Its first lines are there for want of a GPU.
SCRIPT = """
import functools, sys
from megatron_aro.megatron import cpu_mode
if cpu_mode.enable():
    sys.argv[1:] = cpu_mode.prepare(sys.argv[1:])

import torch
import megatron.training
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args

def model(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    args = get_args()
    config = core_transformer_config_from_args(args)
    vocabulary, length = args.padded_vocab_size, args.max_position_embeddings
    shared = {"share_embeddings_and_output_weights": True}
    return GPTModel(config, get_gpt_layer_local_spec(), vocabulary, length, **shared)

def datasets(samples):
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed, sequence_length=args.seq_length, split=args.split,
        tokenizer=get_tokenizer(), reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, samples, lambda: True, config).build()

def forward_step(batches, model):
    batch = next(batches)
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"],
                   labels=batch["labels"])
    return output, functools.partial(loss, batch["loss_mask"])

def loss(mask, output):
    total, count = (output * mask).sum(), mask.sum().to(torch.int)
    return total, count, {"lm loss": torch.stack([total.detach(), count])}

if __name__ == "__main__":
    print("trained with", megatron.training.__file__)
    config = pretrain_cfg_container_from_args(parse_and_validate_args())
    datasets.is_distributed = True
    pretrain(config, datasets, model_provider=model, model_type=ModelType.encoder_or_decoder,
             forward_step_func=forward_step)
"""


@pytest.fixture(params=TESTED["megatron-core"])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The files of a release as a source tree has them."""
    released = Path(megatron.core.__file__).parents[1]
    if request.param != installed.partition("+")[0]:  # a wheel names its commit, too
        released = ROOT / ".releases" / f"megatron-core=={request.param}" / "megatron"
        if not released.is_dir():
            pytest.skip(f"{released} is missing; scripts/test.sh fetches it")
    tree = tmp_path / f"Megatron-LM-{request.param}"
    shutil.copytree(released, tree / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "pretrain_gpt.py").write_text(SCRIPT)
    return tree


def patch_of(version: str) -> str:
    return f"megatron-{'.'.join(version.split('.')[:2])}.patch"


def files(tree: Path) -> dict[str, str]:
    """Digest of each file."""
    return {
        path.relative_to(tree).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(tree.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def commands(tree: Path) -> list[str]:
    """The git commands of the README: to apply, and to reverse the patch of the tree's release."""
    found = re.findall(r"^git apply .*megatron-0.19.patch\"", README, re.MULTILINE)
    patch = patch_of(tree.name.removeprefix("Megatron-LM-"))
    return [command.replace("megatron-0.19.patch", patch) for command in found]


def run(command: str, tree: Path) -> None:
    """Run a command of the README in the tree; git must not find a repository around it."""
    environment = {**os.environ, "MEGATRON_ARO": str(ROOT)}
    environment["GIT_CEILING_DIRECTORIES"] = str(tree.parent)
    subprocess.run(["bash", "-ec", command], cwd=tree, env=environment, check=True)


def launch(tree: Path, *flags: str) -> subprocess.CompletedProcess:
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
        [*command, "pretrain_gpt.py", *FLAGS, *flags],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_there_is_a_patch_for_every_tested_release() -> None:
    """The README names them all and no other, with a command to put one in and to take it out."""
    patches = {path.name for path in (ROOT / "patches").glob("*.patch")}
    assert patches == {patch_of(version) for version in TESTED["megatron-core"]}
    assert patches == set(re.findall(r"megatron-[\d.]+\.patch", README))
    put_in, take_out = commands(Path("Megatron-LM-0.19"))
    assert " -R " in take_out and " -R " not in put_in


def test_applied_and_reversed_the_tree_is_as_before(tree: Path) -> None:
    """One file changes, by a few added lines; reversing leaves every byte as released."""
    before = files(tree)
    put_in, take_out = commands(tree)
    run(put_in, tree)
    changed = {name for name, digest in files(tree).items() if before.get(name) != digest}
    assert changed == {"megatron/training/__init__.py"}
    run(take_out, tree)
    assert files(tree) == before
    with pytest.raises(subprocess.CalledProcessError):  # there is nothing to take out any more
        run(take_out, tree)


def test_without_the_patch_there_is_no_such_optimizer(tree: Path) -> None:
    """So what the next test trains with is the patch's doing."""
    if installed.partition("+")[0] not in tree.name:
        pytest.skip("one release is enough")
    unpatched = launch(tree)
    assert unpatched.returncode != 0 and "invalid choice: 'aro'" in unpatched.stderr


def test_a_patched_tree_trains_saves_and_goes_on(tree: Path, pool: Pool) -> None:
    """Two ranks, distributed optimizer: the losses of our entry with the installed release.

    As Megatron prints them, to seven digits; the second is the mean of a process's first two. From
    the checkpoint of the first step, the second has the same loss again.
    """
    run(commands(tree)[0], tree)
    native = launch(tree, "--save", "saved", "--save-interval", "1", "--ckpt-format", "torch_dist")
    assert native.returncode == 0, native.stderr[-3000:]
    assert f"trained with {tree / 'megatron' / 'training'}" in native.stdout
    ours = pool.train(2, FLAGS)
    assert losses(native.stdout) == losses(ours[1].stdout)
    assert len(losses(native.stdout)) == 2
    resumed = launch(tree, "--load", "saved", "--ckpt-step", "1")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert losses(resumed.stdout) == [f"{ours[0].losses[1]:.6E}"]


def losses(log: str) -> list[str]:
    return re.findall(r"lm loss: (\S+)", log)
