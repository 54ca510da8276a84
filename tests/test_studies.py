"""The studies of scripts/studies run as one command each and keep what they found."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

STUDIES = Path(__file__).parent.parent / "scripts" / "studies"


def study(name: str, out: Path, *sizes: str) -> tuple[dict, list[dict[str, str]]]:
    """The configuration and the rows that it kept."""
    command = [sys.executable, "-W", "ignore", str(STUDIES / f"{name}.py"), *sizes]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (out / "figure.png").stat().st_size > 10_000
    with (out / "results.csv").open() as file:
        return json.loads((out / "config.json").read_text()), list(csv.DictReader(file))


def test_synthetic(tmp_path: Path) -> None:
    """Few draws already order what differs by much: a frame of one's own makes scores steadier."""
    config, rows = study("synthetic", tmp_path, "--draws", "20", "--rotations", "4")
    assert config["draws"] == 20 and config["versions"]["torch"]
    assert len(rows) == 3 * (5 + 2)
    spread = {(row["f"], row["rotation"]): float(row["std"]) for row in rows}
    for f in ("sinkhorn", "sign", "rownorm"):
        assert spread[f, "aro from identity"] < 0.8 * spread[f, "none"]
        assert spread[f, "eigen"] < 0.8 * spread[f, "none"]


def test_digits(tmp_path: Path) -> None:
    """Every row of the figure, and a loss that falls."""
    pytest.importorskip("sklearn", reason="scikit-learn is in the extra 'studies' alone")
    _, rows = study("digits", tmp_path, "--steps", "40", "--seeds", "1")
    assert len(rows) == 2 * 2 * 4 * 2
    for first, last in zip(rows[::2], rows[1::2], strict=True):
        assert float(last["loss mean"]) < float(first["loss mean"])


TABLE = """
vocabulary: 257
common: >-
  --num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --micro-batch-size 4
  --max-position-embeddings 32 --global-batch-size 4 --attention-dropout 0 --hidden-dropout 0
  --make-vocab-size-divisible-by 32 --lr-decay-style cosine --lr-warmup-fraction 0.1
  --log-interval 1
steps: 20
evaluations: 2
eval-iters: 2
guess: 1
rates: [1e-3, 4e-3]
models: {tiny: --position-embedding-type rope}
methods:
  adamw: --optimizer adam
  aro: --optimizer aro --aro-monitor-interval 10
  missing: --optimizer aro --aro-no-such-flag
runs: [[tiny, sweep missing aro, 1], [tiny, adamw aro, 2]]
"""


def test_training(tmp_path: Path) -> None:
    """The runs of a table are trained, the impossible one is named, none is repeated elsewhere."""
    (tmp_path / "table.yaml").write_text(TABLE)
    here = Path(__file__).parent.parent
    text = [sys.executable, "-m", "megatron_aro.cli.corpus", str(here / "megatron_aro")]
    subprocess.run([*text, "--out", str(tmp_path / "data")], check=True, capture_output=True)

    def piece(results: str) -> str:
        command = [sys.executable, str(STUDIES / "training.py"), "--data", str(tmp_path / "data")]
        command += ["--table", str(tmp_path / "table.yaml"), "--results", str(tmp_path / results)]
        pack = str(tmp_path / "pack.json")
        done = subprocess.run(
            [*command, "--pack", pack, "--resume", pack, "--minutes", "2"],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = piece("one")
    assert "5 of 6 runs have finished" in first
    assert "tiny-missing-seed1: ValueError: unrecognized arguments" in first
    packed = {r["name"]: r for r in json.loads((tmp_path / "pack.json").read_text())}
    sweep = [packed[f"tiny-adamw-{rate}-seed1"] for rate in ("0.001", "0.004")]
    best = min(sweep, key=lambda r: r["validation"][max(r["validation"], key=int)])
    aro = packed["tiny-aro-seed1"]
    assert aro["rate"] == best["rate"] and len(aro["losses"]) == 20 and aro["objectives"]
    assert isinstance(aro["fallbacks"], dict)
    assert aro["losses"]["1"] == pytest.approx(best["losses"]["1"], abs=1e-5)  # same start and data
    # A fresh machine has the packed results alone.
    again = piece("two")
    assert "5 of 6 runs have finished" in again and "tiny-aro-seed1 " not in again

    # AdamW's best rate has changed since a run was made, another was on other text: made again.
    packed["tiny-adamw-seed2"]["corpus"] = "other"
    (tmp_path / "mixed.json").write_text(json.dumps(list(packed.values())))
    packed["tiny-aro-seed2"]["rate"] = 1.0
    (tmp_path / "pack.json").write_text(json.dumps(list(packed.values())))
    other = piece("three")
    assert "tiny-aro-seed2 " in other and "tiny-adamw-seed2 " in other
    assert "tiny-aro-seed1 " not in other

    table = ["--table", str(tmp_path / "table.yaml")]
    report = [sys.executable, str(STUDIES / "training_report.py"), *table]
    mixed = [*report, str(tmp_path / "mixed.json"), "--out", str(tmp_path / "mixed")]
    subprocess.run(mixed, check=True, capture_output=True)
    assert "| adamw | 2b |" in (tmp_path / "mixed" / "README.md").read_text()  # not beside aro's 2
    log = tmp_path / "three" / "logs" / "tiny-aro-seed2.log"
    cut = tmp_path / "tiny-cut.log"
    cut.write_text(log.read_text().split("validation loss at iteration 20")[0])
    report += [str(tmp_path / "pack.json"), "--out", str(tmp_path / "report")]
    subprocess.run([*report, "--stopped", str(cut)], check=True, capture_output=True)
    said = (tmp_path / "report" / "README.md").read_text()
    assert "ARO is ahead of AdamW" in said and "runs, yet" not in said
    rows = [line.split(" | ") for line in said.splitlines() if "tiny-cut (stopped)" in line]
    assert len(rows) == 1 and rows[0][-1] == "- |" and float(rows[0][1]) > 0
    assert (tmp_path / "report" / "tiny.png").stat().st_size > 10_000
    assert (tmp_path / "report" / "results.csv").stat().st_size


def test_fallbacks_of_a_whole_training(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Are added up from what Megatron's log has of them, as ARO writes it."""
    monkeypatch.syspath_prepend(str(STUDIES))
    from training import fallbacks

    from megatron_aro.megatron import report

    monkeypatch.setattr(report.dist, "get_rank", lambda: 0)
    counts = {"factorizations": 0, "extra_pass": 0, "householder": 0, "kept": 0}
    optimizer = SimpleNamespace(reported={}, fallback_counts=lambda: dict(counts))
    for new in ({"factorizations": 8, "extra_pass": 3}, {"factorizations": 16, "householder": 1}):
        counts |= new
        report.report_fallbacks([optimizer], 5)
    log = "one line\n" + capsys.readouterr().out + "another\n"
    assert fallbacks(log) == {"extra pass": 3, "householder": 1}


@pytest.mark.parametrize(
    ("gaps", "said"),
    [
        ([[0.1, 0.12]], "reproduced"),
        ([[0.1, 0.12], [0.01, 0.05]], "undecided: within the spread of seeds"),
        ([[0.1, 0.12], [-0.2, -0.25]], "not reproduced"),
        ([[-0.2, -0.25], []], "not reproduced"),
        ([[0.1, 0.12], []], "not testable: runs are missing"),
        ([[0.1]], "undecided: one seed"),
    ],
)
def test_findings_are_decided_by_differences_within_seeds(
    gaps: list[list[float]], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(STUDIES))
    from training_report import verdict

    assert verdict(gaps) == said
