"""`megatron-aro doctor`: what it finds here, and that it notices what is broken."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_aro import optimizer
from megatron_aro.cli import doctor


def test_this_machine_passes() -> None:
    """Every check by name; exit code 0, and JSON alone on stdout."""
    command = [sys.executable, "-W", "ignore", "-m", "megatron_aro.cli.main", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    checks = {check["name"]: check for check in result["checks"]}
    assert result["ok"] and all(check["status"] != "failed" for check in checks.values())
    assert checks["megatron-core"]["status"] == "ok"
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    for name in ("torch", f"Cholesky, QR on {device}", f"ARO on {device}", "--optimizer aro"):
        assert checks[name]["status"] in ("ok", "note")
    assert checks["gloo" if device == "cpu" else "NCCL"]["status"] == "ok"


def test_a_wrong_factorisation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry of QR or Cholesky off by a tenth of a per cent and more."""
    assert doctor.linear_algebra("cpu").startswith("right to")
    qr, cholesky = torch.linalg.qr, torch.linalg.cholesky_ex

    def skewed(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, r = qr(a)
        q[..., 0, :] *= 1.5
        return q, r

    monkeypatch.setattr(torch.linalg, "qr", skewed)
    with pytest.raises(RuntimeError, match="QR: .* is off by"):
        doctor.linear_algebra("cpu")
    monkeypatch.setattr(
        torch.linalg, "cholesky_ex", lambda a: (cholesky(a)[0] * 1.1, torch.ones(1))
    )
    with pytest.raises(RuntimeError, match="Cholesky: .* is off by"):
        doctor.linear_algebra("cpu")


def test_an_optimizer_that_goes_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 weights that go elsewhere than float64's; weights that do not move."""
    apply = optimizer.rot.apply_updates

    def backwards(weights: list, updates: list, lr: float, decay: float) -> None:
        sign = -1.0 if weights[0].dtype == torch.float32 else 1.0
        apply(weights, [sign * update for update in updates], lr, decay)

    monkeypatch.setattr(optimizer.rot, "apply_updates", backwards)
    with pytest.raises(RuntimeError, match="after 10 steps"):
        doctor.self_test("cpu", seconds=0)
    monkeypatch.setattr(
        optimizer.rot, "apply_updates", lambda w, u, lr, decay: apply(w, u, lr * 1e-3, decay)
    )
    with pytest.raises(RuntimeError, match="the loss went from"):
        doctor.self_test("cpu", seconds=0)


def test_a_failure_decides_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """1 if a check failed, whatever it raised; notes do not count."""

    def fail() -> str:
        raise OSError("no such\ndevice")

    good = doctor.Check("a", "note", "")
    monkeypatch.setattr(doctor, "_all_checks", lambda: iter([good]))
    assert doctor.run(argparse.Namespace(json=False)) == 0
    monkeypatch.setattr(doctor, "_all_checks", lambda: iter([good, doctor._caught("b", fail)]))
    assert doctor.run(argparse.Namespace(json=False)) == 1
    assert "failed  b                      OSError: no such device" in capsys.readouterr().out


def test_versions_are_judged_by_their_beginning() -> None:
    """2.11.1 is of 2.11; 2.110 is not, and 2.1 is not tested."""
    statuses = [
        doctor._judged("x", found, ("2.11",)).status for found in ("2.11.1", "2.110", "2.1")
    ]
    assert statuses == ["ok", "note", "note"]
    assert doctor._package("no-such-package", "")[:2] == ("no-such-package", "failed")


def test_a_python_without_torch_is_told_in_a_sentence() -> None:
    """Any command: no traceback, and where the right Python is."""
    root = str(Path(__file__).parent.parent)
    command = [sys.executable, "-S", "-m", "megatron_aro.cli.main", "doctor"]
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "has no " in done.stderr and ".venv/bin/python" in done.stderr
