"""Each kernel and its torch twin against float64, over shapes that fit no block.

On the CPU the twins run; `test_interpreted` repeats the CPU tests with Triton's interpreter, and
the tests marked gpu run the compiled kernels.
"""

import itertools
import os
import subprocess
import sys

import pytest
import torch

from megatron_aro.kernels.cholesky import factor, largest_inverse
from megatron_aro.kernels.halves import LARGEST, Halves, halves
from megatron_aro.kernels.products import add_product, gram, product, set_product
from megatron_aro.kernels.reflections import MOST_ROWS, orthonormal_columns
from megatron_aro.kernels.sinkhorn import sinkhorn_scales
from megatron_aro.kernels.support import INTERPRETED, use_triton
from megatron_aro.rotation.projections import sinkhorn

if INTERPRETED:  # Triton 3.6's interpreter reads a loop's bounds in a way that NumPy 2.5 refuses
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_index_too(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_index_too

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = [1, 7, 33, 65]
LARGE = [1000, 4097]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def sizes(device: str) -> list[int]:
    return SIZES + LARGE if device == "cuda" else SIZES


def relative(result: torch.Tensor, expected: torch.Tensor) -> float:
    difference = torch.linalg.vector_norm(result.double().to(expected.device) - expected)
    return (difference / torch.linalg.vector_norm(expected)).item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("blocks", [None, 32])
def test_factor(device, inverse, unit, blocks, in_blocks):
    """L and W of D S D + shift I: 1e-5 is float32's rounding times the condition, at most 1e2."""
    if blocks:
        in_blocks(blocks)
    for k in sizes(device) if blocks is None else [65, 100]:
        x = normal(2, k, k + k // 2 + 1).to(device)
        s = (x @ x.mT).float()
        s[1] *= 1e-3
        squares = s.diagonal(dim1=1, dim2=2).contiguous()
        d = squares.rsqrt()
        shift = torch.tensor([1e-2, 1e-1], device=device)
        c = d[:, :, None].double() * s.double() * d[:, None, :].double()
        c.diagonal(dim1=1, dim2=2).add_(shift[:, None].double())
        lower = torch.linalg.cholesky(c)
        hidden = s + torch.triu(torch.full_like(s, torch.nan), 1)  # only one triangle is read
        if unit:
            hidden.diagonal(dim1=1, dim2=2).mul_(0.9)
        result = factor(hidden.clone(), squares, shift, inverse=inverse, unit=unit)
        assert relative(torch.tril(result.l_bkk), lower) < 1e-5
        pivot = lower.diagonal(dim1=1, dim2=2).square().amin(dim=1)
        torch.testing.assert_close(result.smallest_pivot_b.double(), pivot, rtol=1e-3, atol=1e-5)
        if inverse:
            for rows in result.blocks:
                block = torch.tril(result.w_bkk[:, rows, rows])
                assert relative(block, torch.linalg.inv(lower[:, rows, rows])) < 1e-4
            largest = torch.linalg.inv(lower).square().sum(dim=1).amax(dim=1)
            torch.testing.assert_close(largest_inverse(result).double(), largest, rtol=1e-3, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_factor_of_singular(device):
    """Rank one and zero: the shift holds L up, and with none the smallest pivot tells."""
    k = 40
    x = normal(2, k, 1).float()
    x[1] = 0
    s = x @ x.mT
    d = s.diagonal(dim1=1, dim2=2).contiguous()
    shifted = factor(
        s.to(device).clone(), d.to(device), torch.full((2,), 1e-5, device=device), inverse=True
    )
    assert torch.tril(shifted.l_bkk).isfinite().all()
    assert torch.tril(shifted.w_bkk).isfinite().all()
    bare = factor(s.to(device), d.to(device), torch.zeros(2, device=device), inverse=True)
    assert not (bare.smallest_pivot_b > 1e-5).any()
    assert not (largest_inverse(bare) < 1e5).any()


@pytest.mark.parametrize("device", DEVICES)
def test_factor_of_nan_stays_alone(device):
    """NaN in one matrix shows in its smallest pivot, in its inverse, and nowhere else."""
    x = normal(3, 70, 100)
    s = (x @ x.mT).float()
    d = s.diagonal(dim1=1, dim2=2).contiguous()
    shift = torch.full((3,), 1e-3)
    bad = s.clone()
    bad[1, 50, 20] = torch.nan
    expected, result = (
        factor(t.to(device).clone(), d.to(device), shift.to(device), inverse=True) for t in (s, bad)
    )
    assert not result.smallest_pivot_b[1] > 1e-4
    assert not largest_inverse(result)[1] < 1e4
    for before, after in zip(expected[:2], result[:2], strict=True):  # L and W
        assert torch.equal(torch.tril(before)[::2], torch.tril(after)[::2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("iterations", [1, 5])
def test_sinkhorn(device, iterations):
    """f(X) is the definition's; its size is near one; Z is what its scales say."""
    for k, n in zip(sizes(device), reversed(sizes(device)), strict=True):
        x = normal(2, k, n)
        x *= 10.0 ** torch.linspace(-2, 2, n, dtype=x.dtype)
        if k > 1:
            x[1, 0] = 0
        expected = x
        for _ in range(iterations):
            r = torch.linalg.vector_norm(expected, dim=2, keepdim=True)
            c = torch.linalg.vector_norm(expected, dim=1, keepdim=True)
            expected = (expected / r / c).nan_to_num(0.0)
        zero = torch.zeros(2, device=device)
        scales = sinkhorn_scales(x.float().to(device), iterations, zero, 0.0, 0.0)
        p, q, p_root, q_root = (scale.double().cpu() for scale in scales)
        f = p[:, :, None] * x * q[:, None, :]
        size = torch.linalg.vector_norm(expected, dim=(1, 2), keepdim=True)
        rms = f.square().mean(dim=(1, 2), keepdim=True).sqrt()
        assert relative(f / rms, expected / size * (k * n) ** 0.5) < 1e-5
        if iterations > 1:
            assert (rms > 0.1).all() and (rms < 10).all()
        torch.testing.assert_close(q_root.square(), q, rtol=1e-5, atol=0)
        ratio = p_root[:, -1:] / p[:, -1:]
        torch.testing.assert_close(p_root, p * ratio, rtol=1e-5, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("iterations", [1, 4, 5])
def test_sinkhorn_that_does_not_converge(device, iterations):
    """Blocks that hardly touch keep scales of their own, 1e8 apart: still float16 holds f(X).

    The root mean square is at most sqrt(k), and entries have 11 bits of the largest.
    """
    x = normal(20, 12, 30).float() * 1e-10
    for i, matrix in enumerate(x):
        matrix[i % 10 + 1 :, i + 1 :] *= 1e10
        matrix[: i % 10 + 1, : i + 1] *= 10.0 ** (14 - i % 9)
    zero = torch.zeros(20, device=device)
    p, q, *_ = sinkhorn_scales(x.to(device), iterations, zero, 0.0, 0.0)
    f = p.cpu()[:, :, None] * x * q.cpu()[:, None, :]
    assert f.isfinite().all()
    assert f.square().mean(dim=(1, 2)).amax() <= 12 * (1 + 1e-5)
    assert f.abs().amax(dim=(1, 2)).min() > 1e-2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("power", [-6, 12])
def test_sinkhorn_of_many_iterations(device, power):
    """One row and one column beside nothing: an iteration takes scales apart by 32 and 95, in 50
    out of float32, and f(X) to zero or NaN with them, were they not bounded."""
    x = torch.zeros(1, 32, 96)
    x[0, :, 0] = normal(32).float()
    x[0, 0, 1:] = 1e-5 * normal(95).float()
    scaled, zero = 2.0**power * x, torch.zeros(1, device=device)
    p, q, *_ = (scale.cpu() for scale in sinkhorn_scales(scaled.to(device), 50, zero, 0.0, 0.0))
    for f in (p[:, :, None] * scaled * q[:, None, :], sinkhorn(x, 50)):
        assert f.isfinite().all()
        assert f.square().sum() > 1


@pytest.mark.parametrize("device", DEVICES)
def test_sinkhorn_floors(device):
    """Rows and columns below the floor have the scale zero, the others do not feel them."""
    x = normal(1, 40, 50).float()
    x[:, 3] *= 1e-6
    x[:, :, 7] *= 1e-6
    whole = torch.full((1,), 1e3, device=device)
    scales = sinkhorn_scales(x.to(device), 5, whole, 1e-9, 1e-9)
    assert scales.p[0].nonzero().flatten().tolist() == [i for i in range(40) if i != 3]
    assert scales.q[0].nonzero().flatten().tolist() == [i for i in range(50) if i != 7]
    x[:, 3], x[:, :, 7] = 0, 0
    wanted = sinkhorn_scales(x.to(device), 5, whole, 1e-9, 1e-9)
    torch.testing.assert_close(scales.p, wanted.p, rtol=1e-5, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_halves(device, scale):
    """hi has 11 bits of what is asked for, hi + lo 22, for any strides; NaN is hidden by 0."""
    for r, c in zip(sizes(device), reversed(sizes(device)), strict=True):
        x = normal(3, r, c)
        exact = x * scale
        given = exact.float()
        given[2] = torch.nan
        power = 2.0 ** -round(torch.tensor(scale).log2().item())
        scale_b = torch.tensor([power, power, 0.0], device=device)
        rows, columns = normal(3, r, seed=1).abs(), normal(3, c, seed=2).abs()
        wanted = rows[:, :, None] * exact * power * columns[:, None, :] * 512.0
        wanted[2] = 0
        for layout in (
            given,
            given.mT.contiguous().mT,
            given.repeat_interleave(2, dim=2)[..., ::2],
        ):
            for dim, kind in ((2, "rows"), (1, "columns")):
                both, squares = halves(
                    layout.to(device), split=True, scale_b=scale_b, factor=512.0, squares=kind,
                    rows_br=rows.float().to(device), columns_bc=columns.float().to(device),
                )  # fmt: skip
                assert relative(both.hi, wanted) < 5e-4
                assert relative(both.hi.double() + both.lo.double(), wanted) < 1e-6
                exact_squares = wanted.square().sum(dim=dim)
                # Entries below 6e-3 lose bits to float16's smallest number, 6e-8.
                torch.testing.assert_close(
                    squares.double().cpu(), exact_squares, rtol=1e-5, atol=1e-9
                )
            single, squares = halves(
                layout.to(device), split=False, scale_b=scale_b, squares="rows"
            )
            kept = single.hi.double().square().sum(dim=2)
            torch.testing.assert_close(squares.double(), kept, rtol=1e-6, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_halves_of_triangles(device):
    """Zeros above the diagonal, and what is too large for float16."""
    x = normal(2, 37, 37).float()
    x[0, 5, 2] = 1e30
    result, _ = halves(x.to(device), split=False, lower=True, factor=4.0)
    expected = torch.tril(x * 4.0).clamp(-LARGEST, LARGEST)
    torch.testing.assert_close(result.hi.float().cpu(), expected, rtol=5e-4, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("b", [1, 3])
def test_products(device, b):
    """Halves multiply to float16's rounding, hi + lo to float32's; a Gram matrix likewise.

    Tensor cores truncate their sums: by 1e-5 of long ones whose terms have one sign.
    """
    for m, n in zip(sizes(device), reversed(sizes(device)), strict=True):
        k = max(m, n)
        x, y = normal(b, m, k).to(device), normal(b, k, n, seed=1).to(device)
        for split, tolerance in ((False, 1e-3), (True, 1e-6 if k < 100 else 3e-5)):
            a = halves(x.float(), split=split)[0]
            c = halves(y.float(), split=split)[0]
            assert relative(product(a, c), x @ y) < tolerance
            assert relative(product(c.mT, a.mT), (x @ y).mT) < tolerance
            assert relative(torch.tril(gram(a)), torch.tril(x.mT @ x)) < tolerance
        exact, hi = Halves(a.hi, None), a.hi.double()
        assert relative(product(exact, exact.mT), hi @ hi.mT) < tolerance


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("split", [False, True])
def test_forms_of_products(device, split):
    """Sizes that the kernel takes, in whole tiles and not: what is asked for of each form, of
    factors in any place of larger matrices, set or added; the rest of the target stays.

    Tolerances as above.
    """
    for n, form in itertools.product((80, 272), ("full", "symmetric", "lower", "upper")):
        m, k = (160, 128) if n == 80 or form in ("lower", "upper") else (48, 64)
        if device == "cuda":
            m, n, k = 8 * m, 8 * n, 16 * k
        tolerance = 1e-3 if not split else 1e-6 if k < 200 else 2e-5
        if form in ("lower", "upper"):
            n = k
        x, y = normal(2, m, k).to(device), normal(2, n, k, seed=1).to(device)
        right = {"symmetric": x, "lower": torch.triu(y), "upper": torch.tril(y)}.get(form, y)
        seconds = halves(right.float(), split=split)[0].mT, halves(right.mT.float(), split=split)[0]
        wide = halves(torch.cat([y[:, :1].expand_as(x), x], dim=2).float(), split=split)[0]
        asked = torch.tril if form == "symmetric" else torch.clone
        exact = x @ right.mT
        down = halves(x.mT.float(), split=split)[0].mT
        for a, b in itertools.product((wide.columns(slice(k, 2 * k)), down), seconds):
            assert relative(asked(product(a, b, 0.5, form)), asked(0.5 * exact)) < tolerance
            target = torch.ones(2, m, exact.shape[2] + 32, device=device)
            part = target[:, :, 16:-16]
            set_product(part, a, b, 1.0, form)
            assert relative(asked(part), asked(exact)) < tolerance
            part.fill_(1.0)
            add_product(part, a, b, -1.0, form)
            assert relative(asked(part), asked(1.0 - exact)) < tolerance
            assert (target[:, :, :16] == 1).all() and (target[:, :, -16:] == 1).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_reflections(device, scale):
    """QR's Q for matrices of full rank, an orthonormal one for all: without a row or a column, of
    rank one, of equal columns, of columns down to 1e-30 or 1e-35. NaN stays in its matrix.

    Rounding of float32 times the root of the size, and the condition for what is compared with Q.
    """
    for m in sizes(device):
        for k in {1, m // 2 + 1, m}:
            if m > MOST_ROWS:
                continue
            exact = normal(8, m, k)
            exact[0] += 10 * torch.eye(m, k)
            exact[1] = 0
            exact[2, 0] = 0
            exact[3, :, -1] = 0
            exact[4] = exact[4, :, :1] @ exact[4, :1]
            exact[5] = exact[5, :, :1]
            exact[6] *= 10.0 ** torch.linspace(0, -30 if scale >= 1 else -5, k, dtype=exact.dtype)
            a = (exact * scale).float()
            a[7] = torch.nan
            q = orthonormal_columns(a.to(device))
            same = orthonormal_columns(a.mT.contiguous().mT.to(device))
            assert torch.equal(q[:7], same[:7])
            q = q[:7].double().cpu()
            rounding = 1e-6 * m**0.5
            assert (q.mT @ q - torch.eye(k, dtype=q.dtype)).abs().max() < rounding
            unit = a[:7].double()
            unit /= unit.abs().amax(dim=1, keepdim=True).clamp(min=1e-300)
            assert torch.tril(q.mT @ unit, diagonal=-1).abs().max() < 10 * rounding
            expected = torch.linalg.qr(exact[0]).Q
            torch.testing.assert_close(q[0], expected, rtol=0, atol=10 * rounding)


@pytest.mark.parametrize("device", DEVICES)
def test_strides_are_refused(device):
    """These two kernels read rows of whole matrices; `test_halves` has what takes any strides."""
    x = normal(2, 40, 40).float().to(device).mT
    ones = torch.ones(2, 40, device=device)
    with pytest.raises(ValueError, match="contiguous"):
        factor(x, ones, ones[:, 0], inverse=True)
    with pytest.raises(ValueError, match="contiguous"):
        sinkhorn_scales(x, 5, ones[:, 0], 0.0, 0.0)


@pytest.mark.gpu
def test_results_repeat():
    """Programs that wait for each other give the same bits in every run."""
    x = torch.randn(3, 1000, 1500, device="cuda")
    s = x @ x.mT
    d = s.diagonal(dim1=1, dim2=2).contiguous()
    shift = torch.full((3,), 1e-6, device="cuda")
    first = factor(s.clone(), d, shift, inverse=True)
    for _ in range(20):
        again = factor(s.clone(), d, shift, inverse=True)
        assert torch.equal(torch.tril(first.l_bkk), torch.tril(again.l_bkk))
        for rows in first.blocks:
            one, two = first.w_bkk[:, rows, rows], again.w_bkk[:, rows, rows]
            assert torch.equal(torch.tril(one), torch.tril(two))


@pytest.mark.gpu
def test_twin_with_a_warning():
    """What the kernels are not written for is said, once."""
    from megatron_aro.kernels import support

    support._warn.cache_clear()
    with pytest.warns(UserWarning, match="float64"):
        assert not use_triton(torch.zeros(1, device="cuda", dtype=torch.float64))


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreted run")
def test_interpreted():
    """The CPU tests above with the kernels themselves, executed by Triton's interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-k", "cpu", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]
