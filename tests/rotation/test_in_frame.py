"""Square rotations from within the old frame, against QR of the spec's A in float64."""

import pytest
import torch
from aro_cases import counts_by_rung, make_batch, normal

from megatron_aro.config import AROConfig
from megatron_aro.rotation import compute_updates
from megatron_aro.rotation.in_frame import attempt
from megatron_aro.rotation.orthonormal import first_attempt, householder
from megatron_aro.rotation.projections import rownorm, sinkhorn


def frame_and_momentum(grading: float, m: int = 48, n: int = 64) -> tuple[torch.Tensor, ...]:
    """R [3, m, m], and M whose rows in that frame fall from 1 to `grading`, as in training."""
    r = torch.linalg.qr(normal(3, m, m, seed=1, dtype=torch.float64)).Q
    rows = torch.logspace(0, float(torch.tensor(grading).log10()), m, dtype=torch.float64)
    return r, r @ (rows[:, None] * normal(3, m, n, dtype=torch.float64))


def spec_a(r: torch.Tensor, m: torch.Tensor, config: AROConfig) -> torch.Tensor:
    f = {"sinkhorn": lambda x: sinkhorn(x, 5), "rownorm": rownorm}[config.projection]
    x = r.mT @ m
    return m @ (x if config.rotation == "eigen" else f(x)).mT


def same_columns(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Largest 1 - |cos| between columns of the same number."""
    return (1 - (a.double() * b.double()).sum(dim=1).abs()).max()


@pytest.mark.parametrize("grading", [1.0, 1e-3, 1e-6])
@pytest.mark.parametrize(
    "config", [AROConfig(), AROConfig(projection="rownorm"), AROConfig(rotation="eigen")]
)
def test_it_is_qr_of_a_where_scqr2_cannot_be(grading: float, config: AROConfig) -> None:
    """Columns are float64 Householder's up to sign, to 1e-4; R is orthonormal to 1e-3.

    With rows that fall to 1e-6, cond(A) is 1e6 and more and its square is beyond float32: scqr2
    fails.
    """
    r, m = frame_and_momentum(grading)
    a = spec_a(r, m, config)
    q, failed = attempt(r.float(), (r.mT @ m).float(), config)
    assert not failed.any()
    assert (q.mT @ q - torch.eye(48)).abs().max() < 1e-3
    assert same_columns(q, householder(a).q_bmk) < 1e-4
    if grading == 1e-6:
        assert first_attempt(a.float(), AROConfig()).failed_b.all()


@pytest.mark.parametrize("projection", ["sinkhorn", "rownorm"])
@pytest.mark.parametrize("rotation", ["aro", "eigen"])
def test_no_pass_saves_what_has_no_factor(projection: str, rotation: str) -> None:
    """Two equal rows beside a common one: where S is indefinite to rounding Householder answers.

    Q^T A is upper triangular, to float32's rounding and the shift: A's columns have norm 1.
    """
    config = AROConfig(projection=projection, rotation=rotation)
    for seed in range(4):
        m = normal(1, 64, 1536, seed=seed) + 0.5 * normal(1, 1, 1536, seed=9)
        m[:, :2] = 1.0
        batch = make_batch(m.float(), config)
        compute_updates([batch], config)
        a = spec_a(torch.eye(64, dtype=torch.float64)[None], m.double(), config)
        a = a / torch.linalg.vector_norm(a, dim=1, keepdim=True)
        assert torch.tril(batch.rotation.double().mT @ a, -1).abs().max() < 1e-3


def test_rows_of_zeros_leave_their_columns() -> None:
    """And the others do not mind."""
    r, m = frame_and_momentum(1e-2)
    x = (r.mT @ m).float()
    x[:, 40:] = 0
    q, failed = attempt(r.float(), x.clone(), AROConfig())
    assert not failed.any()
    assert same_columns(q[:, :, 40:], r[:, :, 40:]) < 1e-5


@pytest.mark.parametrize(
    ("projection", "rotation"),
    [("sinkhorn", "aro"), ("rownorm", "aro"), ("sinkhorn", "eigen"), ("sign", "eigen")],
)
def test_nothing_climbs_in_steady_state(projection: str, rotation: str) -> None:
    """Momenta of rank 8 with noise of 1e-4, 30 steps: all climbing is in the first five."""
    config = AROConfig(projection=projection, rotation=rotation)
    basis = normal(2, 32, 8) @ normal(2, 8, 32, seed=1)
    batch = make_batch(torch.zeros(2, 32, 32), config)
    climbed = []
    for step in range(30):
        batch.momentum = 0.95 * batch.momentum + 0.05 * (
            basis + 1e-4 * normal(2, 32, 32, seed=step)
        )
        compute_updates([batch], config)
        counts = counts_by_rung([batch])
        climbed.append(counts["extra_pass"] + counts["householder"])
    assert climbed[-1] == climbed[4]
