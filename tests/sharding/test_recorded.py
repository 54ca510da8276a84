"""Small batches as CUDA graphs: which they are, and that graphs change no bit of any step."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from megatron_aro.config import AROConfig
from megatron_aro.rotation import climb, measure_before
from megatron_aro.runtime.batches import Stepped, new_state, record_small
from megatron_aro.sharding.cost import FP32, RECORDED_BYTES, recorded, workspace_bytes
from megatron_aro.sharding.plan import Batch


def bytes_of(batches: list[tuple[int, int, int]]) -> int:
    gathered = sum(FP32 * b * m * n for b, m, n in batches)
    return gathered + max((b * workspace_bytes(m, n) for b, m, n in batches), default=0)


def test_small_batches_are_recorded_within_the_limit() -> None:
    """All of a small model; of others the smallest, as many as stay below the limit."""
    study = [(18, 384, 384), (6, 384, 384), (6, 384, 1536), (6, 384, 1536)]
    assert sorted(recorded(study)[0]) == [0, 1, 2, 3] and recorded(study)[1] == bytes_of(study)
    gpt2 = [(36, 768, 768), (12, 768, 768), (12, 768, 3072), (12, 768, 3072)]
    assert recorded(gpt2) == ([1], bytes_of(gpt2[1:2]))
    assert recorded([(1, 4096, 12288)]) == ([], 0)
    assert recorded([]) == ([], 0)
    many = [(b, 256, 512) for b in range(1, 60)]
    taken, kept = recorded(many)
    assert 0 < len(taken) < len(many)
    assert kept == bytes_of([many[i] for i in taken]) <= RECORDED_BYTES
    assert bytes_of([many[i] for i in (*taken, len(taken))]) > RECORDED_BYTES


def test_settings_that_no_graph_holds() -> None:
    """Those whose step torch's libraries do, and where none is wanted: `plan` counts no memory."""
    assert all(AROConfig(**settings).replays for settings in REPLAYED)
    assert not AROConfig(cuda_graphs="none").replays
    assert not AROConfig(projection="sign").replays and not AROConfig(precision="fp32").replays


REPLAYED: list[dict[str, str]] = [
    {},
    {"qr": "scqr"},
    {"projection": "rownorm"},
    {"rotation": "eigen", "projection": "adam"},
    {"rotation": "none"},
]
STEPS = 8
B = 8


def momenta(shape: tuple[int, int, int], step: int) -> torch.Tensor:
    """Of matrices that climb the ladder, are zero, or not finite, in some steps."""
    generator = torch.Generator().manual_seed(step)
    m = torch.randn(shape, generator=generator)
    if step in (0, 2, 5):
        m[1] = m[1, :, :1] * m[1, :1]  # rank one
        m[2] *= torch.logspace(0, -9, m.shape[2])
    if step in (1, 4):
        m[3] = 0.0
    if step in (3, 4):
        m[5], m[6] = m[5].sign() * 1e38, m[6].sign() * 1e-38  # too large to square, denormal
        m[7] = m[7, :1].clone()  # equal rows
    if step == 6:
        m[4, 0, 0] = torch.nan
    return m.cuda()


def steps(of: Stepped, aro: AROConfig, measured: int) -> list[torch.Tensor]:
    """The updates of STEPS steps; one of them is measured, as by the monitor."""
    found = []
    for step in range(STEPS):
        of.allocate(torch.device("cuda"))
        of.momentum.copy_(momenta(of.momentum.shape, step))
        of.measures = measure_before(of.state, of.sample, aro) if step == measured else None
        of.start()
        climb([of.state], [of.attempt], aro)
        of.finish()
        found.append(of.momentum.clone())
        of.release()
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("stored", [(96, 96, False), (64, 160, False), (64, 160, True)])
@pytest.mark.parametrize("settings", REPLAYED, ids=str)
def test_graphs_change_nothing(stored: tuple[int, int, bool], settings: dict[str, str]) -> None:
    """Updates, state and fall-backs, bit for bit; what a graph left is not taken for new."""
    aro = AROConfig(**settings)
    batch = Batch((0, 0), 0, stored, tuple(range(B)))
    plain, graphs = (
        Stepped(batch, new_state(aro, *batch.shape, torch.device("cuda")), aro) for _ in range(2)
    )
    record_small([graphs], aro)
    record_small([plain], replace(aro, cuda_graphs="none"))
    for expected, found in zip(*(steps(x, aro, 3) for x in (plain, graphs)), strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(graphs.state.rotation, plain.state.rotation)
    assert torch.equal(graphs.state.fallbacks, plain.state.fallbacks)
    if aro.projection == "adam":
        assert torch.equal(graphs.state.second_moment, plain.state.second_moment)
    if aro.qr == "scqr2" and aro.rotation != "none":
        assert plain.state.fallbacks[:, 1:].any()  # the ladder was climbed
    assert graphs.stored.numel() and not plain.stored.numel()


@pytest.mark.gpu
def test_graphs_under_expandable_segments() -> None:
    """The same with the allocator's setting that many large runs have."""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    command = [sys.executable, "-m", "pytest", "-q", "-k", "change_nothing and eigen", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout[-3000:]
