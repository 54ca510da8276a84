"""`megatron-aro compare`: reading runs, speed-ups, refusals, and what it writes."""

from __future__ import annotations

import base64
import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_aro.cli import compare, events, matched, runs
from megatron_aro.cli.matched import Smoothed
from megatron_aro.cli.runs import Run

# Written by torch 2.11's SummaryWriter with TensorBoard 2.21: texts `optimizer` adam and
# `global_batch_size` 16; at steps 1, 2 and 300 `lm loss` 8 / step, the same over samples, and
# `iteration-time` 0.25.
EVENTS = """
SAAAAAAAAAD+kkidCZQllpeOwtpBGg1icmFpbi5FdmVudDoyUi4KLHRlbnNvcmJvYXJkLnN1bW1hcnkud3JpdGVyLmV2
ZW50X2ZpbGVfd3JpdGVy1m53Qz8AAAAAAAAAUWV2YQlqK5aXjsLaQSo0CjIKFm9wdGltaXplci90ZXh0X3N1bW1hcnlC
DggHEgQSAggBQgRhZGFtSggKBgoEdGV4dIrmmqlFAAAAAAAAAOvmaLAJziuWl47C2kEqOgo4Ch5nbG9iYWxfYmF0Y2hf
c2l6ZS90ZXh0X3N1bW1hcnlCDAgHEgQSAggBQgIxNkoICgYKBHRleHSp+9b+HQAAAAAAAABgL98jCY0tlpeOwtpBEAEq
EAoOCgdsbSBsb3NzFQAAAEGgkUibKAAAAAAAAAD/cBZKCbktlpeOwtpBEBAqGwoZChJsbSBsb3NzIHZzIHNhbXBsZXMV
AAAAQZ/IlYIkAAAAAAAAAEIrgE0J2S2Wl47C2kEQASoXChUKDml0ZXJhdGlvbi10aW1lFQAAgD5UF3rkHQAAAAAAAABg
L98jCfAtlpeOwtpBEAIqEAoOCgdsbSBsb3NzFQAAgEAxSI2wKAAAAAAAAAD/cBZKCQoulpeOwtpBECAqGwoZChJsbSBs
b3NzIHZzIHNhbXBsZXMVAACAQFYGy98kAAAAAAAAAEIrgE0JHy6Wl47C2kEQAioXChUKDml0ZXJhdGlvbi10aW1lFQAA
gD7ycpmtHgAAAAAAAADZ3BIyCTUulpeOwtpBEKwCKhAKDgoHbG0gbG9zcxUOdNo8OeGs3CkAAAAAAAAAN/9fAAlOLpaX
jsLaQRDAJSobChkKEmxtIGxvc3MgdnMgc2FtcGxlcxUOdNo8f2LqyyUAAAAAAAAA6rw28wliLpaXjsLaQRCsAioXChUK
Dml0ZXJhdGlvbi10aW1lFQAAgD4oOu/k
"""
SETTINGS = {
    "optimizer": "adam",
    "train_iters": 100,
    "train_samples": None,
    "lr": 0.001,
    "adam_beta2": 0.95,
    "global_batch_size": 16,
    "seq_length": 128,
    "seed": 1234,
    "mock_data": False,
    "train_data_path": ["corpus"],
    "world_size": 1,
    "aro_projection": "sinkhorn",
}
STEP = (
    " [2026-01-01 00:{minute:02}:{second:02}.000000] iteration {step:8d}/     100 | consumed "
    "samples: 1 | elapsed time per iteration (ms): {ms:.1f} | throughput per GPU (TFLOP/s/GPU): 1.0"
    " | learning rate: {rate:.6E} | global batch size:    16 | lm loss: {loss:.6E} |"
    " loss scale: 1.0 | grad norm: 1.250 | number of skipped iterations:   0 |"
    " number of nan iterations:   0 |"
)


def log(
    losses: dict[int, float],
    ms: float = 100.0,
    start: int = 0,
    prefix: str = "",
    **settings: object,
) -> str:
    """What Megatron prints of a run; `start` is the minute of the first step."""
    lines = ["------------------------ arguments ------------------------"]
    for name, value in {**SETTINGS, **settings}.items():
        lines.append(f"  {name} {'.' * (48 - len(name))} {value}")
    lines.append("-------------------- end of arguments ---------------------")
    for step, loss in losses.items():
        at = {"minute": start + step // 60, "second": step % 60}
        lines.append(STEP.format(step=step, ms=ms, rate=1e-3 / step, loss=loss, **at))
    lines.append(
        " validation loss at iteration 100 on validation set | lm loss value: 2.500000E+00 | lm"
        " loss PPL: 1.218249E+01 | "
    )
    lines.append(
        " validation loss at iteration 100 on test set | lm loss value: 9.000000E+00 | lm loss PPL:"
        " 1.218249E+01 | "
    )
    return "\n".join(prefix + line for line in lines) + "\n"


def write(folder: Path, name: str, text: str) -> Path:
    run = folder / name
    run.mkdir()
    (run / "stdout.log").write_text(text)
    return run


def falling(rate: float, steps: int = 100) -> dict[int, float]:
    """A loss that falls by `rate` a step, from 10."""
    return {step: 10 - rate * step for step in range(1, steps + 1)}


# Reading


@pytest.mark.parametrize("prefix", ["", "[default0]:"])
def test_a_log_is_read(tmp_path: Path, prefix: str) -> None:
    """Settings as literals, losses, rates, times; the validation set, not the test set."""
    run = runs.read(write(tmp_path, "aro.2", log(falling(0.01), optimizer="aro", prefix=prefix)))
    assert run.name == "aro.2" and run.optimizer == "aro" and run.total == 100
    assert run.settings["train_data_path"] == ["corpus"] and run.settings["lr"] == 0.001
    assert run.losses == pytest.approx(falling(0.01)) and run.milliseconds == 100.0
    assert run.rates[4] == 2.5e-4 and run.validation == {100: 2.5}


def test_steps_count_as_trained_last(tmp_path: Path) -> None:
    """After a restart from step 5: its losses, whatever order the files are in."""
    before, after = log({5: 5.0, 6: 4.0, 7: 3.0}), log({6: 4.5, 7: 4.25}, start=10)
    run = write(tmp_path, "run", before)
    (run / "a.log").write_text(after)
    assert runs.read(run).losses == {5: 5.0, 6: 4.5, 7: 4.25}


def test_events_are_read(tmp_path: Path) -> None:
    """TensorBoard's own bytes; also beside a log, whose losses are means over an interval."""
    file = tmp_path / "events.out.tfevents.1.host"
    data = base64.b64decode(EVENTS)
    file.write_bytes(data)
    expected = {1: 8.0, 2: 4.0, 300: pytest.approx(8 / 300)}
    run = runs.read(file)
    assert run.losses == expected and run.times == {1: 250.0, 2: 250.0, 300: 250.0}
    assert run.optimizer == "adamw" and run.settings["global_batch_size"] == 16
    (tmp_path / "rank0.log").write_text(log({100: 7.0}, lr=0.5))
    both = runs.read(tmp_path)
    assert both.losses == expected and both.settings["lr"] == 0.5
    file.write_bytes(data[:-10])  # while it is being written
    assert len(list(events.read(file))) == 10
    file.write_bytes(data[:12] + b"\xff" * 40 + data[52:])
    with pytest.raises(ValueError, match="is not an event file"):
        list(events.read(file))


def test_what_is_no_run(tmp_path: Path) -> None:
    """A folder that is missing, or has no losses."""
    with pytest.raises(ValueError, match="nowhere does not exist"):
        runs.read(tmp_path / "nowhere")
    (tmp_path / "stdout.log").write_text("nothing\n")
    with pytest.raises(ValueError, match="has no losses"):
        runs.read(tmp_path)


# The metric


def made(name: str, losses: dict[int, float], **settings: object) -> Run:
    run = Run(name, Path(name), {**SETTINGS, **settings}, dict(losses))
    run.times = dict.fromkeys(losses, 100.0)
    return run


def test_smoothing_is_over_iterations_not_lines() -> None:
    """Logged every 10 iterations, a mean over 20 is of two lines."""
    run = made("x", {step: float(step) for step in range(10, 101, 10)})
    smoothed = Smoothed(run, 20)
    assert smoothed.losses[0] == 10.0 and smoothed.losses[-1] == 95.0
    assert smoothed.at(59) == 45.0
    assert [matched.window(n) for n in (300, 46_000, 40, 2)] == [20, 460, 10, 1]


def test_the_speedup_is_the_papers() -> None:
    """t over the first step with the baseline's loss at t; None where that is never reached."""
    base = Smoothed(made("base", falling(0.01)), 1)
    fast, slow = (Smoothed(made("x", falling(rate)), 1) for rate in (0.02, 0.005))
    (point,) = matched.points(fast, base, [80])
    assert (point.reached, point.speedup) == (40, 2.0)
    assert matched.points(slow, base, [40, 80])[0].speedup == 0.5
    assert matched.points(slow, base, [40, 80])[1].speedup is None
    flat = falling(0.01, 90) | dict.fromkeys(range(91, 101), 9.3)  # rises, and stays
    (noise,) = matched.points(Smoothed(made("x", flat), 1), Smoothed(made("x", flat), 1), [100])
    assert noise.reached == 70 and noise.speedup == pytest.approx(100 / 70)


def test_by_time_it_is_that_times_the_ratio_of_times() -> None:
    """Twice the steps' worth at half the speed is no gain; none on another number of GPUs."""
    base, fast = made("adamw", falling(0.01)), made("aro", falling(0.02), optimizer="aro")
    fast.times = dict.fromkeys(fast.losses, 200.0)
    comparison = compare.compare([fast, base], "adamw")
    point = comparison.points["aro"][79]
    assert point.step == 80 and point.speedup == pytest.approx(2, abs=0.4)
    assert comparison.by_time(fast, point) == pytest.approx(point.speedup / 2)
    fast.settings["world_size"] = 8
    assert comparison.by_time(fast, point) is None


# Refusals


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("lr", 0.002, "aro: another schedule, --lr is 0.002, and 0.001 in adamw."),
        ("global_batch_size", 32, "another batch, --global-batch-size is 32"),
        ("train_data_path", ["other"], "another data, --train-data-path"),
        ("adam_beta2", 0.99, "another non-matrix optimizer, --adam-beta2 is 0.99"),
        ("hidden_size", 64, "another model, --hidden-size is 64, and None"),
    ],
)
def test_unmatched_runs_are_refused(setting: str, value: object, reason: str) -> None:
    """Each with its reason; the matrix optimizer's own settings and the seed may differ."""
    base = made("adamw", falling(0.01))
    fine = made("aro", falling(0.02), optimizer="aro", aro_projection="sign", seed=1)
    assert compare.compare([base, fine], "adamw").notes == ["aro has seed 1, adamw 1234."]
    other = made("aro", falling(0.02), optimizer="aro", **{setting: value})
    with pytest.raises(ValueError, match="cannot be compared") as raised:
        compare.compare([base, other], "adamw")
    assert reason in str(raised.value)


def test_what_was_trained_counts_too() -> None:
    """Rates that a checkpoint's schedule changed; unknown settings; Muon with Lion; no baseline."""
    base, other = made("adamw", falling(0.01)), made("aro", falling(0.02), optimizer="aro")
    base.rates, other.rates = {7: 1e-3}, {7: 2e-3}
    with pytest.raises(ValueError, match="learning rate of step 7 was 0.002, and 0.001 in adamw"):
        compare.compare([base, other], "adamw")
    other = Run("aro", Path("aro"), {}, falling(0.02))
    with pytest.raises(ValueError, match="aro: its files do not say its settings"):
        compare.compare([base, other], "adamw")
    lion = made("muon", falling(0.02), optimizer="muon", muon_scalar_optimizer="lion")
    with pytest.raises(ValueError, match="--muon-scalar-optimizer"):
        compare.compare([base, lion], "adamw")
    with pytest.raises(ValueError, match=r"No run is the baseline soap; there are adamw \(adamw\)"):
        compare.compare([base], "soap")


def test_a_twin_is_told_from_another_run() -> None:
    """Only the seed may differ; an unfinished run is noted."""
    base, twin = made("a", falling(0.01)), made("b", falling(0.011, 60), seed=4)
    comparison = compare.compare([base, twin], "a")
    assert comparison.twins == ["b"]
    assert any(note.startswith("b has 60 of 100 iterations") for note in comparison.notes)
    assert not matched.is_twin(made("c", {}, seed=4, optimizer="muon"), base)


# The command


def test_table_files_and_figures(tmp_path: Path) -> None:
    """From logs to table.txt, JSON, CSV, PNG and SVG; the numbers agree with each other."""
    folders = [
        write(tmp_path, "adamw", log(falling(0.01))),
        write(tmp_path, "aro", log(falling(0.02), ms=150.0, optimizer="aro")),
        write(tmp_path, "twin", log(falling(0.0101), seed=7)),
    ]
    line = [sys.executable, "-m", "megatron_aro.cli.main", "compare", *map(str, folders)]
    done = subprocess.run([*line, "--out", str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    assert (out / "table.txt").read_text().strip() in done.stdout
    assert "Its noise: adamw against itself, twin." in done.stdout
    result = json.loads((out / "comparison.json").read_text())
    aro = next(run for run in result["runs"] if run["name"] == "aro")
    last = aro["over_training"][-1]
    assert last["step"] == 100 and last["reached_at"] in (55, 56)
    assert last["time_speedup"] == pytest.approx(last["step_speedup"] / 1.5)
    rows = list(csv.DictReader((out / "curves.csv").open()))
    assert len(rows) == 100 and rows[-1]["tokens"] == str(100 * 16 * 128)
    assert float(rows[-1]["aro step speed-up"]) == last["step_speedup"]
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert ">aro  1." in (out / "curves.svg").read_text()
    wrong = subprocess.run([*line, "--baseline", "muon"], capture_output=True, text=True)
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: No run is the baseline muon")
