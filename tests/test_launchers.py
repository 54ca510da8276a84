"""The launchers in scripts/, with real torchrun agents; two scripts play Slurm's commands."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_aro.cli import corpus, runs

ROOT = Path(__file__).parents[1]
# Runs the command once for each node of the job, or once where one task is asked for.
SRUN = """#!/usr/bin/env bash
tasks=$SLURM_NNODES
while [[ $1 == --* ]]; do
    case $1 in
        --nodes) shift 2 ;;
        --ntasks) tasks=$2; shift 2 ;;
        *) shift ;;
    esac
done
pids=()
for ((i = 0; i < tasks; i++)); do "$@" & pids+=($!); done
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit $code
"""
SCONTROL = """#!/usr/bin/env bash
case "$1 $2" in
    "show job") echo "   Command={root}/scripts/slurm.sh some.yaml" ;;
    "show hostnames") printf 'localhost\\nlocalhost\\n' ;;
    requeue*) echo "$2" >>"{folder}/requeued" ;;
esac
"""
SMALL = [
    *("configs/quickstart.yaml", "configs/optimizer/aro.yaml", "configs/logging.yaml"),
    *("--set", "num-layers=1", "--set", "train-iters=6", "--set", "lr-decay-iters=6"),
    *("--set", "lr-warmup-iters=0", "--set", "eval-iters=1", "--set", "log-interval=1"),
    *("--set", "micro-batch-size=8", "--set", "tensorboard-dir=null"),
]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a launcher: text to train on, a folder for the run, this interpreter."""
    text = tmp_path / "text"
    text.mkdir()
    for i in range(40):
        (text / f"{i}.txt").write_text(f"Document {i} says little. " * 40)
    corpus.build(corpus.collect([text]), tmp_path / "corpus")
    return {
        **os.environ,
        "CORPUS": str(tmp_path / "corpus"),
        "RUN": str(tmp_path / "run"),
        "MEGATRON_ARO_PYTHON": sys.executable,
        "PYTHONWARNINGS": "ignore",
    }


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def losses(folder: Path) -> list[str]:
    """Iterations that the last rank's logs report, in the order of the starts."""
    logs = sorted(folder.rglob("stdout.log"), key=lambda path: path.stat().st_mtime)
    lines = [line for log in logs for line in log.read_text().splitlines() if "lm loss:" in line]
    return [line.split("iteration")[1].split("|")[0].replace(" ", "") for line in lines]


@pytest.mark.slow
def test_a_slurm_job_goes_on_in_the_next(tmp_path: Path, environment: dict[str, str]) -> None:
    """Two nodes train together; a job that is cut short queues itself, the next ends the run."""
    shims = tmp_path / "bin"
    shims.mkdir()
    scontrol = SCONTROL.format(root=ROOT, folder=tmp_path)
    for name, text in {"srun": SRUN, "scontrol": scontrol}.items():
        (shims / name).write_text(text)
        (shims / name).chmod(0o755)
    environment |= {
        "PATH": f"{shims}:{environment['PATH']}",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": str(free_port() - 20000),
    }

    def job(*words: str) -> subprocess.CompletedProcess:
        command = ["bash", str(ROOT / "scripts" / "slurm.sh"), *SMALL, *words]
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
        )

    wrong = job("--set", "num-leyers=3")
    assert wrong.returncode == 2 and "nearest is --num-layers" in wrong.stderr
    first = job("--set", "exit-interval=3")
    assert first.returncode == 0, first.stderr[-3000:]
    assert "Iteration 3 of 6 (exit code 0): the job is queued again." in first.stdout
    assert (tmp_path / "requeued").read_text().split() == [environment["SLURM_JOB_ID"]]
    second = job()
    assert "Finished: iteration 6." in second.stdout, second.stderr[-3000:]
    assert (tmp_path / "requeued").read_text().count("\n") == 1
    logs = tmp_path / "run" / "logs"
    assert losses(logs) == [f"{i}/6" for i in range(1, 7)]
    assert len(list(logs.rglob("stdout.log"))) == 4  # two starts of two ranks


@pytest.mark.slow
def test_machines_without_a_scheduler_meet(tmp_path: Path, environment: dict[str, str]) -> None:
    """The same command on two machines makes one run of two processes."""
    environment |= {"NODES": "2", "HEAD": f"localhost:{free_port()}", "RESTARTS": "1"}
    command = [str(ROOT / "scripts" / "multinode.sh"), *SMALL]
    agents = [
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for _ in range(2)
    ]
    outputs = [agent.communicate(timeout=900)[0].decode() for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs[0][-3000:]
    logs = tmp_path / "run" / "logs"
    assert losses(logs) == [f"{i}/6" for i in range(1, 7)]
    assert len(list(logs.rglob("stdout.log"))) == 2


@pytest.mark.slow
def test_the_benchmark_sweeps_trains_and_compares(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """The better of two rates for both optimizers; a finished run is kept; figures at the end."""
    out = tmp_path / "bench"
    environment |= {"OUT": str(out), "OPTIMIZERS": "adamw aro", "LRS": "1e-9 2e-3"}
    command = [str(ROOT / "scripts" / "benchmark.sh"), *SMALL]
    command.remove("configs/optimizer/aro.yaml")
    command.remove("configs/logging.yaml")
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Of these learning rates 2e-3 ends lowest." in done.stdout
    result = json.loads((out / "comparison" / "comparison.json").read_text())
    assert [run["name"] for run in result["runs"]] == ["adamw", "aro"]
    assert (out / "comparison" / "curves.svg").exists()
    trained = [runs.read(out / name).settings for name in ("adamw", "aro", "sweep/1e-9")]
    assert [settings["lr"] for settings in trained] == [2e-3, 2e-3, 1e-9]
    assert [settings["min_lr"] for settings in trained] == [2e-4, 2e-4, 1e-10]
    again = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
    )
    assert again.returncode == 0 and "==" not in again.stdout  # nothing was trained
