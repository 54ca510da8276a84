"""`megatron-aro train`: what it prints, what it refuses, and a run handed over to torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from megatron_aro.cli import configs, corpus, runs, train

CONFIGS = Path(__file__).parents[1] / "configs"


def command(*words: str | Path, **environment: str) -> subprocess.CompletedProcess:
    line = [sys.executable, "-W", "ignore", "-m", "megatron_aro.cli.main", *map(str, words)]
    unset = {k: v for k, v in os.environ.items() if k not in ("RUN", "TRAIN_DATA", "VALID_DATA")}
    return subprocess.run(
        line, capture_output=True, text=True, timeout=300, env=unset | environment
    )


def paths(*names: str) -> list[Path]:
    return [CONFIGS / f"{name}.yaml" for name in names]


def test_a_dry_run_says_what_will_be_trained() -> None:
    """The command for each of 8 machines, counts by class, tokens and ARO's plan."""
    files = paths("qwen3_8b", "optimizer/aro", "parallel/64_gpus", "logging")
    done = command("train", *files, "--set", "lr=2e-4", "--dry-run", RUN="/my run")
    assert done.returncode == 0, done.stderr
    for text in (
        "torchrun --nnodes 8 --nproc-per-node 8",
        "sbatch --nodes 8 --gpus-per-node 8 scripts/slurm.sh ",
        "--set lr=2e-4",
        "--lr 2e-4 \\\n",
        "--save '/my run/checkpoints'",
        '--train-data-path "${TRAIN_DATA}"',
        "8,190,735,360",
        "= 675,282,944,000 tokens",
        "MiB workspace",
        "ARO's own work",
    ):
        assert text in done.stdout
    rows = {line[:18].strip(): line[18:].split() for line in done.stdout.splitlines()}
    assert rows["attention"] == ["1,509,949,440", "144", "ARO"]
    assert rows["embeddings"] == ["622,329,856", "-", "AdamW"]
    assert "TRAIN_DATA is not set" in done.stderr and "Traceback" not in done.stderr


REFUSED = [
    (
        ("qwen3_8b",),
        "num-leyers=3",
        ["--set num-leyers=3: Megatron has no flag --num-leyers; the nearest is --num-layers"],
    ),
    (
        ("qwen3_8b", "optimizer/aro", "parallel/8_gpus"),
        "tensor-model-parallel-size=3",
        ["world size (8) is not divisible by"],
    ),
    (
        ("gpt2_124m", "optimizer/aro", "parallel/8_gpus"),
        "use-precision-aware-optimizer=true",
        ["does not work with --use-precision-aware", "--set use-precision-aware-optimizer=true"],
    ),
    (("gpt2_124m",), "optimizer=adman", ["invalid choice: 'adman'", "--set optimizer=adman"]),
    (("gpt2_124m",), "sft=true", ["--sft is not part of this entry", "--set sft=true"]),
    (("gpt2_124m", "parallel/8_gpus"), "seed=1", ["common.yaml, line 25", "TRAIN_DATA is not set"]),
    (("gpt2_124m", "trial"), "mock-data=false", ["There is no data: give --train-data-path"]),
    (("quickstart",), "nodes=0", ["--set nodes=0: nodes must be an integer of at least 1"]),
]
# One process for all: importing Megatron takes as long as everything else.
REFUSE = """
import contextlib, io, json, sys
from megatron_aro.cli.main import main
results = []
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    results.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(results))
"""


def test_what_cannot_be_trained_is_one_sentence() -> None:
    """Exit code 2, nothing printed, nothing started; file and line where they are known."""
    lines = [["train", *map(str, paths(*names)), "--set", pair] for names, pair, _ in REFUSED]
    unset = {k: v for k, v in os.environ.items() if k not in ("RUN", "TRAIN_DATA", "VALID_DATA")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REFUSE, json.dumps(lines)],
        capture_output=True,
        text=True,
        timeout=200,
        env=unset,
    )
    assert done.returncode == 0, done.stderr
    for (code, out, error), (*_, messages) in zip(json.loads(done.stdout), REFUSED, strict=True):
        assert (code, out, error.count("\n")) == (2, "", 1)
        assert error.startswith("error: ") and all(message in error for message in messages), error


def test_torchrun_trains_on_this_machine(tmp_path: Path) -> None:
    """The quickstart's config, smaller, with two processes, logs of each and a checkpoint."""
    text = tmp_path / "text"
    text.mkdir()
    for i in range(40):
        (text / f"{i}.txt").write_text(f"Document {i} says little. " * 40)
    corpus.build(corpus.collect([text]), tmp_path / "corpus")
    small = "gpus_per_node=2 micro-batch-size=8 num-layers=1 train-iters=3"
    small += " lr-decay-iters=3 lr-warmup-iters=0"
    sets = [word for pair in small.split() for word in ("--set", pair)]
    sets += ["--set", "eval-iters=1", "--set", "log-interval=1", "--set", "tensorboard-dir=null"]
    files = paths("quickstart", "optimizer/aro", "logging")
    environment = {"CORPUS": str(tmp_path / "corpus"), "RUN": str(tmp_path / "run")}
    done = command("train", *files, *sets, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("elapsed time per iteration") == 3
    assert "[default1]:" in done.stdout  # the last rank has the losses
    logs = sorted((tmp_path / "run" / "logs").rglob("stdout.log"))
    assert [log.parent.name for log in logs] == ["0", "1"]
    assert "lm loss" in logs[1].read_text() and "> ARO: the optimizer of" in logs[0].read_text()
    seen = runs.read(tmp_path / "run")
    assert seen.steps == [1, 2, 3] and seen.total == 3 and seen.optimizer == "aro"
    assert list(seen.rates) == [1, 2, 3] and list(seen.validation) == [3]
    assert runs.parameters(seen) == 927_104 - 3 * (851_968 // 4 + 2 * 128 + 2 * 32)
    saved = tmp_path / "run" / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert saved.read_text() == "3"


def test_several_machines_meet_at_the_rendezvous() -> None:
    """What each machine starts, given the address; restarts and logs are torchrun's flags."""
    pairs = ["nodes=4", "gpus_per_node=8", "rendezvous=n7:1234", "max_restarts=2", "logs=/l"]
    words = train.torchrun_words(configs.load([], pairs))
    expected = (
        "--nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id megatron-aro "
        "--rdzv-endpoint n7:1234 --max-restarts 2 --log-dir /l --tee 3 -m megatron_aro.pretrain_gpt"
    )
    assert words == expected.split()


def test_plan_takes_configs() -> None:
    """The ranks and flags of --config; another optimizer's config is refused."""
    files = paths("qwen3_8b", "parallel/64_gpus", "optimizer/aro")
    done = command("plan", "--json", "--config", *files)
    assert done.returncode == 0, done.stderr
    planned = json.loads(done.stdout)
    assert (planned["parameters"], planned["run"]["ranks"]) == (8_190_735_360, 64)
    assert planned["run"]["split"]["tp"] == 4 and planned["run"]["distributed"]
    done = command("plan", "--config", *files, *paths("optimizer/muon"))
    assert done.returncode == 2 and "the config's optimizer is muon" in done.stderr
