"""`bench --iteration` as its command runs it: AdamW, Muon and ARO in turns, on two CPU ranks."""

from __future__ import annotations

import pytest
from runs import TINY

from megatron_aro.cli import iterations


def test_each_optimizer_has_its_turns() -> None:
    """Three rows with medians between their quartiles; overheads are AdamW's ratios."""
    flags = TINY  # Megatron's Muon cannot have the distributed optimizer on so small a model
    rows = iterations.measure(flags, gpus=2, iterations=3, rounds=2, aro=["--aro-qr", "scqr"])
    assert [row.optimizer for row in rows] == ["AdamW", "Muon", "ARO"]
    for row in rows:
        low, high = row.quartiles
        assert 0 < low <= row.ms <= high
        assert row.overhead == pytest.approx(row.ms / rows[0].ms - 1)
    lines = iterations.table(rows).splitlines()
    assert len(lines) == 5 and lines[2].startswith("| AdamW |") and "+0.0%" in lines[2]


def test_a_run_that_fails_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    """In one sentence, after what Megatron said; there is no table of the rest."""
    with pytest.raises(ValueError, match="--iteration: the training failed"):
        iterations.measure([*TINY, "--hidden-size", "7"], 1, 3, 1, [])
    assert "7" in capfd.readouterr().err
