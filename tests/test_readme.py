"""The README says what the code does where a machine can tell."""

import re
from pathlib import Path

import pytest

from megatron_aro.config import flags_table
from megatron_aro.megatron.support import _REFUSALS
from megatron_aro.version import TESTED

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_table_of_flags_is_the_generated_one():
    """Defaults, choices and help in the README are AROConfig's."""
    table = README.partition("tests/test_readme.py -->\n")[2].partition("\n<!-- end of flags")[0]
    assert table == flags_table()


def test_the_tested_versions_are_named():
    """The window in the README is the one that register() enforces and doctor judges by."""
    for name in ("megatron-core", "torch"):
        row = next(line for line in README.splitlines() if line.startswith(f"| {name} |"))
        assert all(version in row for version in TESTED[name])


@pytest.mark.parametrize("path", re.findall(r"\]\(([^)#:]+)\)|(?<=`)(scripts/[\w.]+)", README))
def test_files_that_it_names_exist(path):
    """No dead link."""
    assert (ROOT / (path[0] or path[1])).exists()


@pytest.mark.parametrize("refusal", _REFUSALS, ids=lambda refusal: refusal.flag)
def test_what_is_refused_is_said(refusal):
    """Each refusal of the code has its words in the README."""
    words = {
        "--fp16": "fp16",
        "--use-megatron-fsdp": "FSDP",
        "--use-torch-fsdp2": "FSDP",
        "--use-precision-aware-optimizer": "precision-aware optimizer",
        "--optimizer-cpu-offload": "CPU offload",
        "--rl-offload-optimizer-during-inference": "offload during RL inference",
        "--optimizer-cuda-graph": "optimizer CUDA graphs",
        "--cuda-graph-impl full_iteration": "optimizer CUDA graphs",
        "--fp8-param-gather": "FP8/FP4 parameter gather",
        "--fp4-param-gather": "FP8/FP4 parameter gather",
        "--moe-mlp-glu-interleave-size": "interleaved GLU gates",
        "--moe-shared-expert-glu-interleave-size": "interleaved GLU gates",
        "--ckpt-format": "other checkpoint formats",
    }
    assert words.get(refusal.flag, refusal.flag) in README
