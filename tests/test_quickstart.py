"""The quickstart's driver: it trains, compares, keeps what is finished and says what failed."""

import json
import subprocess
import sys

import pytest

from megatron_aro.cli.curves import Curve, plot, table

STEP = (
    " [2026-01-01 00:00:00.000000] iteration {step:8d}/{steps:8d} | consumed samples:          16 |"
    " elapsed time per iteration (ms): {ms:.1f} | learning rate: 1.000000E-03 |"
    " global batch size:    16 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 1.250 |"
    " number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)
VALID = (
    " validation loss at iteration 60 on validation set | "
    "lm loss value: 2.500000E+00 | lm loss PPL: 1.218249E+01 | \n"
)


def curve(name: str, losses: list[float]) -> Curve:
    made = Curve(name)
    for step, loss in enumerate(losses, 1):
        line = STEP.format(
            step=step, steps=len(losses), loss=loss, ms=100.0 if step > 1 else 9000.0
        )
        assert made.read(line)
    assert not made.read(VALID)
    return made


def test_a_curve_is_read_from_megatrons_lines():
    read = curve("AdamW", [4.0, 3.0, 2.5])
    assert read.losses == [4.0, 3.0, 2.5]
    assert read.valid_loss == 2.5
    assert read.ms() == 100.0  # the first step's set-up does not count
    assert not read.read("Evaluating iter 1/1\n")


def test_smoothing_and_steps_to_a_loss():
    read = curve("AdamW", [10.0 - 0.1 * i for i in range(60)])
    assert read.window == 4
    smoothed = read.smoothed()
    assert smoothed[0] == 10.0
    assert smoothed[59] == pytest.approx((4.4 + 4.3 + 4.2 + 4.1) / 4)
    assert read.steps_to(smoothed[59]) == 60
    assert read.steps_to(smoothed[20]) == 21
    assert read.steps_to(0.0) is None


def test_the_table_compares_with_the_first_run(tmp_path):
    slow = curve("AdamW", [6.0 - 0.05 * i for i in range(60)])
    fast = curve("ARO", [6.0 - 0.10 * i for i in range(60)])
    lines = table([slow, fast]).splitlines()
    assert lines[1].split() == ["AdamW", "3.1250", "2.5000", "100.0", "60"]
    assert lines[2].split() == ["ARO", "0.2500", "2.5000", "100.0", "32"]
    assert table([fast, slow]).splitlines()[2].endswith("not reached")
    plot([slow, fast], tmp_path / "curves.png", "title")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def quickstart(out, *flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "megatron_aro.cli.quickstart", "--out", str(out), *flags]
    return subprocess.run(command, capture_output=True, text=True)


SMALL = ("--steps", "4", "--num-layers", "1", "--seq-length", "32")


@pytest.mark.slow
def test_trains_all_three_once_and_notices_changed_settings(tmp_path):
    done = quickstart(tmp_path, *SMALL)
    assert done.returncode == 0, done.stderr
    names = ("AdamW", "Muon", "ARO")
    for name in names:
        assert f"{name:6} step    4/4" in done.stdout
        saved = json.loads((tmp_path / f"{name.lower()}.json").read_text())
        assert len(saved["curve"]["losses"]) == 4
        assert f"{saved['curve']['valid_loss']:.4f}" in (tmp_path / "table.txt").read_text()
    first = [
        json.loads((tmp_path / f"{n.lower()}.json").read_text())["curve"]["losses"][0]
        for n in names
    ]
    assert len(set(first)) == 1  # the same weights and data before any optimizer has acted
    assert (tmp_path / "curves.png").exists()

    (tmp_path / "muon.json").unlink()  # as an interrupted run leaves it
    again = quickstart(tmp_path, *SMALL)
    assert again.returncode == 0, again.stderr
    assert "AdamW  finished earlier, kept" in again.stdout
    assert "Muon   step    4/4" in again.stdout
    assert "ARO    finished earlier, kept" in again.stdout

    changed = quickstart(tmp_path, *SMALL, "--optimizers", "AdamW", "--lr", "0.001")
    assert "AdamW  the settings have changed: training again" in changed.stdout
    assert "AdamW  step    4/4" in changed.stdout


def test_a_failed_run_shows_the_end_of_its_log_and_leaves_no_result(tmp_path):
    failed = quickstart(tmp_path, *SMALL, "--optimizers", "AdamW", "--no-such-flag")
    assert failed.returncode == 1
    assert "unrecognized arguments: --no-such-flag" in failed.stderr
    assert f"AdamW failed (exit code 2); its whole log is {tmp_path / 'adamw.log'}" in failed.stderr
    assert not (tmp_path / "adamw.json").exists()
    assert not (tmp_path / "table.txt").exists()
