"""What the monitor measures of a step, against its definition in float64; it only looks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from aro_cases import PROJECTIONS, ROTATIONS, hard_inputs, make_batch, normal
from aro_reference import Reference

from megatron_aro.config import AROConfig
from megatron_aro.rotation import (
    MEASURES,
    MatrixBatch,
    advance_momentum,
    attempt_rotation,
    climb,
    compute_updates,
    finish_update,
    measure_after,
    measure_before,
)

SHAPES = [(12, 40), (40, 12), (16, 16)]


def measured(batch: MatrixBatch, config: AROConfig, sample: list[int]) -> dict[str, np.ndarray]:
    """A step of the batch with measures on the way."""
    measures = measure_before(batch, sample, config)
    attempt = attempt_rotation(batch, config)
    climb([batch], [attempt], config)
    update = finish_update(batch, attempt, config)
    measure_after(measures, batch, update, sample)
    return dict(zip(MEASURES, measures.double().T.numpy(), strict=True))


def cosine(momentum: np.ndarray, direction: np.ndarray) -> float:
    """J(R) = <M, D> over the norms, D = R f(R^T M)."""
    norms = np.linalg.norm(momentum) * np.linalg.norm(direction)
    return float(np.sum(momentum * direction) / norms)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_measures_are_their_definitions(shape, projection, dtype):
    """J of the frame that the step chose and of one power iteration from the old one.

    The yardstick is the float64 reference, stepped a few times so that R is not the identity. From
    its state before the last step J(R) = <M, R f(R^T M)> is worked out for both policies. Float32
    may differ by its rounding, 6e-8 times the condition of A, below 1e4 here.
    """
    steps = normal(4, *shape, seed=3, dtype=torch.float64).numpy()
    reference = Reference(np.zeros(shape), projection, "aro", "qr")
    config = AROConfig(projection=projection, qr="qr")
    batch = make_batch(torch.zeros(1, *shape, dtype=dtype), config)
    for gradient in steps[:-1]:
        reference.step(gradient)
        advance_momentum([batch.momentum], [torch.tensor(gradient, dtype=dtype)[None]], 0.95)
        compute_updates([batch], config)

    advance_momentum([batch.momentum], [torch.tensor(steps[-1], dtype=dtype)[None]], 0.95)
    found = measured(batch, config, [0])
    expected = {}
    for rotation in ("eigen", "aro"):
        other = Reference(np.zeros(shape), projection, rotation, "qr")
        other.momentum, other.r, other.v = reference.momentum, reference.r, reference.v
        before = other.w
        other.step(steps[-1], lr=1.0, weight_decay=0.0)
        expected[rotation] = cosine(other.momentum, before - other.w)
    tolerance = 1e-3 if dtype == torch.float32 else 1e-9
    assert found["objective"][0] == pytest.approx(expected["aro"], rel=tolerance)
    assert found["objective_eigen"][0] == pytest.approx(expected["eigen"], rel=tolerance)
    assert abs(expected["aro"] - expected["eigen"]) > 1e-6 or projection == "rownorm"
    assert found["update_rms"][0] == pytest.approx(0.2, rel=1e-6)
    r = batch.rotation[0].double().numpy()
    error = np.abs(r.T @ r - np.eye(r.shape[1])).max()
    # float32 resolves a unit vector's square to a few of its roundings
    assert found["orthogonality"][0] == pytest.approx(error, abs=1e-6)


def test_a_rotation_that_is_not_orthonormal_shows():
    """One pass of SCQR on a nearly singular A: the error is the float64 one, and large."""
    config = AROConfig(qr="scqr", projection="rownorm")
    batch = make_batch(hard_inputs(16, 16)[5:6].float(), config)
    found = measured(batch, config, [0])
    r = batch.rotation[0].double()
    error = float((r.mT @ r - torch.eye(16)).abs().max())
    assert error > 0.1
    assert found["orthogonality"][0] == pytest.approx(error, rel=1e-5)


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("rotation", ROTATIONS)
def test_measuring_changes_no_bit_of_the_step(projection, rotation):
    """Rotation, second moment, momentum, counts and update are those of an unmeasured step."""
    config = AROConfig(projection=projection, rotation=rotation)
    plain, watched = (make_batch(normal(3, 24, 16, seed=1), config) for _ in range(2))
    (update,) = compute_updates([plain], config)
    measures = measure_before(watched, [0, 2], config)
    attempt = attempt_rotation(watched, config)
    climb([watched], [attempt], config)
    other = finish_update(watched, attempt, config)
    measure_after(measures, watched, other, [0, 2])
    assert torch.equal(update, other)
    for name in ("momentum", "rotation", "fallbacks", "second_moment"):
        ours, theirs = getattr(watched, name), getattr(plain, name)
        assert ours is theirs is None or torch.equal(ours, theirs), name


def test_what_is_not_in_the_sample_is_not_measured():
    """NaN stands for it; a policy that does not rotate has no eigen-rotation beside it."""
    config = AROConfig()
    found = measured(make_batch(normal(3, 8, 20), config), config, [1])
    assert np.isfinite(found["update_rms"]).all()
    for name in MEASURES[1:]:
        assert np.isfinite(found[name]).tolist() == [False, True, False], name
    still = replace(config, rotation="none", projection="adam")
    found = measured(make_batch(normal(1, 20, 8), still), still, [0])
    assert np.isnan(found["objective_eigen"][0]) and found["orthogonality"][0] == 0


@pytest.mark.parametrize("scale", [1e-37, 1e-20, 1e20, 1e37])
def test_the_scale_of_the_momentum_does_not_matter(scale):
    """Squares of such entries leave float32; J is what it is at scale one."""
    config = AROConfig()
    momentum = normal(1, 16, 24)
    one, other = (measured(make_batch(momentum * s, config), config, [0]) for s in (1.0, scale))
    for name in MEASURES:
        assert other[name][0] == pytest.approx(one[name][0], rel=1e-4, abs=1e-6), name


def test_hard_momenta_give_numbers_or_nothing():
    """A zero momentum has RMS 0 and no J; of all others every measure is finite."""
    config = AROConfig()
    momenta = hard_inputs(24, 24).float()
    found = measured(make_batch(momenta, config), config, list(range(len(momenta))))
    assert found["update_rms"][0] == 0.0
    assert np.isnan([found["objective"][0], found["objective_eigen"][0]]).all()
    for name in MEASURES:
        assert np.isfinite(found[name][1:]).all(), name
    assert (found["objective"][1:] > 0).all() and (found["objective"][1:] <= 1 + 1e-6).all()


def test_nothing_waits_for_a_ladder(monkeypatch):
    """The eigen-rotation is Householder's, whose step reads nothing back from the device."""
    config = AROConfig()
    batch = make_batch(hard_inputs(12, 12).float(), config)

    def forbidden(*_: object) -> None:
        raise AssertionError("a tensor was read by the host")

    for name in ("item", "tolist", "cpu", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, forbidden)
    measures = measure_before(batch, [0, 3, 5], config)
    attempt = attempt_rotation(batch, config)
    update = finish_update(batch, attempt, config)
    measure_after(measures, batch, update, [0, 3, 5])


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits_and_the_values_are_the_cpus():
    """No synchronizing operation while measuring; values to float32's rounding in the frames."""
    config = AROConfig()
    batches = [make_batch(normal(2, 96, 160).to(device), config) for device in ("cpu", "cuda")]
    found = []
    for batch in batches:
        measure_before(batch, [0], config)  # handles and workspaces are made once
        torch.cuda.set_sync_debug_mode("error")
        try:
            measures = measure_before(batch, [0], config)
            attempt = attempt_rotation(batch, config)
            update = finish_update(batch, attempt, config)
            measure_after(measures, batch, update, [0])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.append(measures.cpu().double())
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4, equal_nan=True)
