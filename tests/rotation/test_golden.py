"""ARO against the project's golden results, and against an independent reference in float64."""

import itertools

import numpy as np
import pytest
from aro_cases import (
    GOLDEN_ROTATIONS,
    PROJECTIONS,
    QRS,
    ROTATIONS,
    golden_results,
    weights_after_steps,
)
from aro_reference import Reference
from hypothesis import assume, given, settings
from hypothesis import strategies as st

# The definition's own figure; the largest difference seen is 1e-12.
TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return golden_results()


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("rotation", GOLDEN_ROTATIONS)
def test_golden(golden, projection, rotation):
    """Every golden case with this projection and rotation, after each of its six steps."""
    cases = [key for key in golden if f"/{projection}/{rotation}/" in key]
    assert cases
    for key in cases:
        shape, _, _, qr = key.split("/")
        weights = weights_after_steps(
            golden[f"{shape}/W0"],
            golden[f"{shape}/G"],
            projection=projection,
            rotation=rotation,
            qr=qr,
        )
        np.testing.assert_allclose(weights, golden[key], rtol=0, atol=TOLERANCE, err_msg=key)


def test_reference_is_the_golden_one(golden):
    """The reference below is as good a yardstick as the golden results themselves."""
    for key in golden:
        if key.count("/") != 3:
            continue
        shape, *names = key.split("/")
        reference = Reference(golden[f"{shape}/W0"], *names)
        weights = [reference.step(g) for g in golden[f"{shape}/G"]]
        np.testing.assert_allclose(weights, golden[key], rtol=0, atol=TOLERANCE, err_msg=key)


@pytest.mark.parametrize(
    "projection, rotation, qr", list(itertools.product(PROJECTIONS, ROTATIONS, QRS))
)
@settings(derandomize=True, max_examples=8, deadline=None)
@given(m=st.integers(1, 12), n=st.integers(1, 12), seed=st.integers(0, 2**32 - 1))
def test_reference(projection, rotation, qr, m, n, seed):
    """Any shape, random gradients, one of them zero: the reference's weights.

    Where A is nearly singular the trailing columns of R are anybody's choice, and rounding is
    amplified by the square of the condition number: 1e3^2 * 1e-16 stays below the tolerance. The
    sign of an entry that is zero but for rounding is anybody's choice too.
    """
    random = np.random.default_rng(seed)
    w0, gradients = random.standard_normal((m, n)), random.standard_normal((4, m, n))
    gradients[2] = 0
    reference = Reference(w0, projection, rotation, qr)
    expected = [reference.step(g).copy() for g in gradients]
    assume(reference.condition < 1e3)
    assume(projection != "sign" or reference.margin > 1e-9)
    weights = weights_after_steps(w0, gradients, projection=projection, rotation=rotation, qr=qr)
    np.testing.assert_allclose(weights, expected, rtol=0, atol=TOLERANCE)
