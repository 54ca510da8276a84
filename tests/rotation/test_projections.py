"""The projections f, the zero rules and the exact scales under them."""

import aro_reference
import numpy as np
import pytest
import torch
from aro_cases import PROJECTIONS, normal

from megatron_aro.config import AROConfig
from megatron_aro.rotation.projections import project
from megatron_aro.rotation.scaling import (
    largest_entry,
    reciprocal_or_zero,
    reciprocal_power_of_two,
    zero_small_rows,
)


def f(x: torch.Tensor, projection: str, v: torch.Tensor | None = None, **settings) -> torch.Tensor:
    """f(X) of unscaled matrices, normalised: only its direction is defined."""
    v = torch.zeros_like(x) if v is None else v
    config = AROConfig(projection=projection, **settings)
    result, _ = project(x, config, v, x.new_ones(len(x), 1, 1))
    return result / torch.linalg.vector_norm(result, dim=(1, 2), keepdim=True)


def matrices(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return normal(*shape, seed=seed, dtype=dtype)


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("shape", [(3, 4, 9), (2, 9, 4), (1, 1, 5), (1, 5, 1)])
def test_definition(projection, shape):
    """f is the loop that the reference writes out; 1e-13 is the rounding of five iterations."""
    x = matrices(*shape)
    for one, result in zip(x, f(x, projection), strict=True):
        reference = aro_reference.Reference(one.numpy(), projection, "none", "qr")
        expected, _ = reference.project(one.numpy())
        expected /= np.linalg.norm(expected)
        np.testing.assert_allclose(result, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("iterations", [1, 2, 5, 30])
def test_sinkhorn_scales_of_rows_and_columns(iterations):
    """Rows and columns of scales 1e-5 to 1e5: still the simultaneous iteration, to 1e-10.

    1e-10 is rounding amplified by the ratio of the scales.
    """
    x = matrices(1, 6, 8)[0]
    x *= 10.0 ** torch.linspace(-2, 3, 6, dtype=x.dtype)[:, None]
    x *= 10.0 ** torch.linspace(3, -2, 8, dtype=x.dtype)
    expected = aro_reference.sinkhorn(x.numpy(), iterations)
    result = f(x[None], "sinkhorn", sinkhorn_iters=iterations)[0]
    np.testing.assert_allclose(result, expected / np.linalg.norm(expected), rtol=1e-10)


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_signs_of_rows_and_order_of_columns(projection):
    """f commutes with sign flips of rows and permutations of columns (1e-14: order of sums)."""
    x, v = matrices(2, 5, 7), matrices(2, 5, 7, seed=1).square()
    signs = torch.tensor([1.0, -1, -1, 1, -1], dtype=x.dtype)[:, None]
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    expected = signs * f(x, projection, v)[:, :, order]
    torch.testing.assert_close(
        f(signs * x[:, :, order], projection, v[:, :, order]), expected, rtol=0, atol=1e-14
    )


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_zero_rows_and_columns(projection):
    """0/0 is 0: they stay zero, and f of the rest is what it is without them (1e-14: sums)."""
    small = matrices(1, 4, 5)
    x = small.new_zeros(1, 6, 8)
    rows, columns = torch.tensor([0, 1, 3, 5]), torch.tensor([1, 2, 4, 6, 7])
    x[:, rows[:, None], columns] = small
    result = f(x, projection)
    assert torch.equal(result != 0, x != 0)
    torch.testing.assert_close(
        result[:, rows[:, None], columns], f(small, projection), rtol=0, atol=1e-14
    )


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_columns_count_as_zero(projection, dtype):
    """Columns below 1e-7 of the whole, denormal ones too, are zero; one above 1e-7 is not."""
    x = matrices(1, 5, 6, dtype=dtype)
    unit = x[..., 0] / torch.linalg.vector_norm(x[..., 0])
    x /= torch.linalg.vector_norm(x[..., 3:])
    x[..., 0], x[..., 1], x[..., 2] = unit * 0.9e-7, torch.finfo(dtype).tiny / 4, unit * 1.1e-7
    result = f(x, projection)
    assert result.isfinite().all()
    assert (result[..., :2] == 0).all() and (result[..., 2:] != 0).all()


def test_small_rows_count_as_zero():
    """Rows below the threshold become exact zeros, the others keep their bits."""
    x = matrices(1, 3, 4)
    x[0, 1] *= 1e-9
    result = zero_small_rows(x, torch.full((1, 1, 1), 1e-7, dtype=x.dtype))
    assert (result[0, 1] == 0).all() and torch.equal(result[0, ::2], x[0, ::2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reciprocal_power_of_two_is_exact(dtype):
    """s is a power of two and brings normal numbers into [1, 4), denormals near; zero is safe."""
    info = torch.finfo(dtype)
    exponents = torch.arange(int(np.log2(info.tiny)), int(np.log2(info.max)), dtype=dtype)
    numbers = torch.cat([2.0**exponents, 1.99 * 2.0**exponents, exponents.new_tensor([info.max])])
    scale = reciprocal_power_of_two(numbers)
    assert (torch.frexp(scale).mantissa == 0.5).all()
    assert ((scale * numbers >= 1) & (scale * numbers < 4)).all()
    edge = torch.tensor([0.0, info.smallest_normal * info.eps], dtype=dtype)
    assert reciprocal_power_of_two(edge).isfinite().all()
    assert (reciprocal_power_of_two(edge) * edge).tolist()[1] > info.eps / 2


def test_largest_entry_shows_what_is_not_finite():
    """NaN and Inf anywhere in a matrix show in its own largest entry, and only there."""
    x = matrices(3, 33, 17, dtype=torch.float32)
    x[0, 20, 3], x[2, 32, 16] = float("nan"), float("-inf")
    assert largest_entry(x).isfinite().flatten().tolist() == [False, True, False]


def test_reciprocal_or_zero():
    """0/0 and 1/0 are 0."""
    assert reciprocal_or_zero(torch.tensor([0.0, 1e-42, 2.0])).tolist() == [0.0, 0.0, 0.5]


def test_adam_saturates():
    """In float32 V = Inf would hold its entry at zero for ever; V stops at the largest number."""
    config = AROConfig(projection="adam")
    x, scale = torch.tensor([[[1e30, -1e25, 1.0]]]), torch.tensor([[[2.0**-100]]])
    direction, v = project(x * scale, config, torch.zeros_like(x), scale)
    assert v.isfinite().all() and direction.isfinite().all()
    assert v[0, 0, 0] == torch.finfo(torch.float32).max and direction[0, 0, 0] > 0
