"""Configuration files: how they are read, what is refused, and that those in configs/ are right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_aro.cli import configs, quickstart

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"


def write(folder: Path, **files: str) -> list[str]:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return [str(folder / f"{name}.yaml") for name in files]


def test_later_files_and_set_override_and_values_stay_as_written(tmp_path):
    base, top = write(
        tmp_path,
        base="MODEL_ARGS:\n  --lr: 3e-4\n  --swiglu: true\n  --bf16: true\n  --min-lr: 1\n"
        "LAUNCH: {nodes: 2, gpus_per_node: 4}\nENV_VARS: {A: 1}\n",
        top="EXTENDS: [base.yaml]\nMODEL_ARGS:\n  --bf16: false\n  --split: 9,1,0\n"
        "  --train-data-path: [0.5, one, 0.5, two]\n",
    )
    config = configs.load([top], ["min-lr=null", "--lr=1e-3", "nodes=3", "B=x y", "fp16=true"])
    assert configs.arguments(config) == (
        "--lr 1e-3 --swiglu --split 9,1,0 --train-data-path 0.5 one 0.5 two --fp16".split()
    )
    assert config.world_size == 12
    assert configs.variables(config) == {"A": "1", "B": "x y"}
    assert configs.arguments(configs.load([base]))[:2] == ["--lr", "3e-4"]


def test_variables_come_from_the_environment_and_env_vars(tmp_path, monkeypatch):
    monkeypatch.setenv("FOLDER", "/data")
    monkeypatch.delenv("NOWHERE", raising=False)
    (file,) = write(
        tmp_path,
        file="ENV_VARS:\n  RUN: ${FOLDER}/run\nMODEL_ARGS:\n  --save: ${RUN}/saved\n"
        "  --load: ${NOWHERE:-there}\n  --tensorboard-dir: ${NOWHERE}/x\n",
    )
    missing: dict[str, str] = {}
    config = configs.expand(configs.load([file]), missing.setdefault)
    words = configs.arguments(config)
    assert words == [
        *("--save", "/data/run/saved", "--load", "there"),
        *("--tensorboard-dir", "${NOWHERE}/x"),
    ]
    assert missing == {"NOWHERE": f"{file}, line 6"}


FLAGS = {"--num-layers": False, "--swiglu": True, "--recompute-granularity": False}
REFUSED = {
    "unknown flag": (
        "MODEL_ARGS:\n  --swiglu: true\n  --num-layer: 3\n",
        "line 3: Megatron has no flag --num-layer; the nearest is --num-layers.",
    ),
    "value of a switch": ("MODEL_ARGS: {--swiglu: 3}", "line 1: --swiglu is a switch: .*"),
    "switch for a value": ("MODEL_ARGS: {--num-layers: true}", "line 1: --num-layers takes a .*"),
    "no dashes": ("MODEL_ARGS:\n  lr: 3\n", "line 2: write flags with dashes, --lr."),
    "unknown section": ("MODEL_ARG: {}", "line 1: unknown key MODEL_ARG; .* MODEL_ARGS."),
    "unknown launch key": ("LAUNCH:\n  node: 3", "line 2: unknown key node; .* nodes."),
    "no number": ("LAUNCH:\n  nodes: few", "line 2: nodes must be an integer of at least 1."),
    "twice": ("MODEL_ARGS:\n  --lr: 1\n  --lr: 2\n", "line 3: --lr is given twice in this file."),
    "nested": ("MODEL_ARGS:\n  --lr: {a: 1}\n", "line 2: here must be a value or a list of .*"),
    "no mapping": ("- 1", "line 1: here must be `key: value` lines."),
    "itself": ("EXTENDS: [case.yaml]", "case.yaml extends itself, by way of .*case.yaml."),
    "no file": ("EXTENDS: [none.yaml]", r"none.yaml does not exist \(EXTENDS of .*case.yaml\)."),
    "no YAML": ("MODEL_ARGS: [", "case.yaml is not YAML: .*line 1.*"),
    "empty": ("", "case.yaml is empty."),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_file_and_line(tmp_path, case):
    text, message = REFUSED[case]
    (file,) = write(tmp_path, case=text)
    with pytest.raises(ValueError, match=message) as raised:
        config = configs.load([file])
        configs.check_flags(config, FLAGS)
        assert config.world_size
    assert "case.yaml" in str(raised.value)


def test_a_wrong_override_names_itself(tmp_path):
    (file,) = write(tmp_path, file="MODEL_ARGS: {--num-layers: 3}")
    with pytest.raises(ValueError, match="--set num-leyers=4: .* nearest is --num-layers"):
        configs.check_flags(configs.load([file], ["num-leyers=4"]), FLAGS)
    with pytest.raises(ValueError, match="--set swiglu: write --set key=value"):
        configs.load([file], ["swiglu"])


def test_the_quickstart_is_the_scripts(monkeypatch):
    """configs/quickstart.yaml and scripts/quickstart.sh train the same model on the same text."""
    monkeypatch.setenv("CORPUS", "/out/corpus")
    config = configs.expand(configs.load([CONFIGS / "quickstart.yaml"]), lambda *_: None)
    theirs = quickstart.model_flags(300, Path("/out"), bf16=False)
    assert pairs(configs.arguments(config)) == pairs(theirs)


def pairs(words: list[str]) -> dict[str, str | float]:
    """Flag -> its value; numbers and paths that are written differently are the same."""
    found: dict[str, str | float] = {}
    for i, word in enumerate(words):
        if word.startswith("--"):
            value = words[i + 1] if i + 1 < len(words) else "--"
            value = "" if value.startswith("--") else value
            try:
                found[word] = float(f"{float(value):.12g}")
            except ValueError:
                found[word] = str(Path(value.replace("corpus/../", "")))
    return found


# Each with the real parser and validation; (files, parameters).
QWEN, SIGMA = 8_190_735_360, 1_982_366_720
GPT2 = {"124m": 124_392_960, "350m": 354_650_112, "774m": 773_675_520, "1558m": 1_556_995_200}
OPTIMIZERS = sorted(path.stem for path in (CONFIGS / "optimizer").glob("*.yaml"))
COMBINATIONS = [
    *(("qwen3_8b", f"optimizer/{name}", "parallel/64_gpus", QWEN) for name in OPTIMIZERS),
    *(("sigma_moe_2b", f"optimizer/{name}", "parallel/8_gpus", SIGMA) for name in OPTIMIZERS),
    *((f"gpt2_{size}", "optimizer/aro", "parallel/8_gpus", n) for size, n in GPT2.items()),
    *(
        (model, "optimizer/aro", "parallel/512_gpus", parameters)
        for model, parameters in (("qwen3_8b", QWEN), ("sigma_moe_2b", SIGMA))
    ),
    ("gpt2_124m", "optimizer/adamw", "parallel/512_gpus", "logging", "wandb", GPT2["124m"]),
    ("qwen3_8b", "optimizer/aro", "parallel/8_gpus", "trial", "local", "logging", QWEN),
    ("sigma_moe_2b", "optimizer/aro", "parallel/8_gpus", "trial", "local", SIGMA),
    ("quickstart", "optimizer/muon", 927_104),
]
CHECK = """
import json, sys
from pathlib import Path
from megatron_aro.cli import configs, outlook, parsing, plan
results = []
for *names, _ in json.loads(sys.argv[2]):
    files = [f"{sys.argv[1]}/{name}.yaml" for name in names]
    config = parsing.read_configs(files, unset=lambda *_: None)
    args = parsing.validated(configs.arguments(config), config.world_size)
    gpt = plan.gpt_sizes(args, plan.transformer_config(args))
    total = sum(kind.parameters for kind in outlook.classes(gpt).values())
    results.append([total, args.optimizer, args.train_iters, args.lr])
print(json.dumps(results))
"""


def test_every_config_is_valid_and_has_its_parameters():
    """Megatron's own validation, for each model with each optimizer and layout."""
    command = [sys.executable, "-W", "ignore", "-c", CHECK, str(CONFIGS), json.dumps(COMBINATIONS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout)
    assert [total for total, *_ in results] == [parameters for *_, parameters in COMBINATIONS]
    assert {result[1] for result in results} == {"adam", "muon", "aro"}
    assert [46000, 3e-4] in [result[2:] for result in results]
    assert [24000, 5e-4] in [result[2:] for result in results]
    used = {name for *names, _ in COMBINATIONS for name in names} | {"common", "gpt2"}
    assert used == {
        path.relative_to(CONFIGS).with_suffix("").as_posix() for path in CONFIGS.rglob("*.yaml")
    }
