"""The bench command without a GPU: its tables, its refusals, its least times."""

import json
from dataclasses import asdict

import pytest

from megatron_aro.cli import bench
from megatron_aro.cli.main import main


def figures(row: str) -> bench.Figures:
    return bench.Figures(
        row=row,
        device={"muon": 2.0, "scqr2": 3.0, "scqr": 1.0},
        called={"muon": 2.5, "scqr2": 5.0, "scqr": 4.0},
        floor=1.5,
        workspace_mib=1234,
        syncs=1,
        angle=2e-7,
        orthonormality=3e-6,
        fallbacks={"factorizations": 4, "extra_pass": 1, "householder": 0, "kept": 0},
        ill_conditioned=6.0,
        ill_fallbacks={"factorizations": 4, "extra_pass": 2, "householder": 1, "kept": 0},
    )


def report(path, card: str):
    path.write_text(
        json.dumps({"card": card, "gpus": 1, "date": "2026-11-28", "rows": [asdict(figures("r"))]})
    )
    return str(path)


def test_table():
    """Ratios to Muon, the share of the floor and the fall-backs beside the times."""
    line = bench.table([figures("1 x 8x8")]).splitlines()[-1]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == [
        *("1 x 8x8", "2.00", "3.00", "1.50", "1.00", "0.50", "2.50, 5.00"),
        *("50%", "1,234", "1", "2e-07", "3e-06", "1", "6.00, 3"),
    ]  # fmt: skip


def test_compares_one_card_only(tmp_path, capsys):
    """Two files of one card are shown; of two cards they are refused."""
    a, b = report(tmp_path / "a.json", "H100"), report(tmp_path / "b.json", "H100")
    assert main(["bench", "--compare", a, b]) == 0
    assert capsys.readouterr().out.count("| r |") == 2
    other = report(tmp_path / "c.json", "H200")
    assert main(["bench", "--compare", a, other]) == 2
    assert "1 x H100 and 1 x H200" in capsys.readouterr().err


def test_needs_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench"]) == 2
    assert "there is none" in capsys.readouterr().err


def test_floor():
    """Square matrices by hand: 8 + 6 + 1 products' worth of n^3, and 25 n^2 numbers."""
    n = 1000
    least = bench.floor([(2, n, n)], rate=1e12, bandwidth=1e12)
    assert least == pytest.approx(1e3 * 2 * (15 * n**3 + 4 * 25 * n**2) / 1e12)
