"""Precision inside ARO is ARO's; the caller's setting comes back, whichever API made it."""

import itertools

import pytest
import torch
from aro_cases import make_batch

from megatron_aro.config import AROConfig
from megatron_aro.rotation import compute_updates
from megatron_aro.rotation.precision import (
    ROUNDOFF,
    ieee_products,
    of_halves,
    product,
    unit_roundoff,
)

_get, _set = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
NODES = [
    ("generic", "all"),
    ("cuda", "all"),
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("mkldnn", "all"),
    ("mkldnn", "matmul"),
]


def observed() -> list[str]:
    """Everything a caller can see of the setting, through both APIs."""
    seen = [_get(*node) for node in NODES]
    for read in (
        torch.get_float32_matmul_precision,
        lambda: str(torch.backends.cuda.matmul.allow_tf32),
    ):
        try:
            seen.append(read())
        except RuntimeError as error:  # the caller mixed the APIs
            seen.append(type(error).__name__)
    return seen


def legacy(value: str):
    return lambda: torch.set_float32_matmul_precision(value)


def legacy_flag(value: bool):
    return lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", value)


def new(backend: str, op: str, value: str):
    return lambda: _set(backend, op, value)


CALLERS = {
    "default": lambda: None,
    **{f"legacy {value}": legacy(value) for value in ("highest", "high", "medium")},
    **{f"legacy flag {value}": legacy_flag(value) for value in (True, False)},
    **{
        f"new {backend}.{op} {value}": new(backend, op, value)
        for (backend, op), value in itertools.product(NODES, ("tf32", "ieee", "none"))
    },
}


def reset() -> None:
    """torch's defaults."""
    torch.set_float32_matmul_precision("highest")
    for node in NODES:
        _set(*node, "tf32" if node == ("cuda", "conv") else "none")


@pytest.fixture(autouse=True)
def pristine():
    reset()
    yield
    reset()


def step() -> torch.Tensor:
    momentum = torch.randn(2, 5, 9, generator=torch.Generator().manual_seed(0))
    config = AROConfig(precision="tf32")
    return compute_updates([make_batch(momentum, config)], config)[0]


@pytest.mark.parametrize("caller", CALLERS.values(), ids=CALLERS.keys())
@pytest.mark.parametrize("parent", ["none", "tf32"])
def test_setting_is_restored(caller, parent):
    """What both APIs report is unchanged, and so is what follows a later change of a parent."""

    def after_parent_moves(act):
        """The settings seen when parents are changed after ``act``."""
        reset()
        _set("cuda", "all", parent)
        caller()
        act()
        seen = [observed()]
        for parent_node in ("generic", "all"), ("cuda", "all"), ("mkldnn", "all"):
            for value in "tf32", "ieee":
                _set(*parent_node, value)
                seen.append(observed())
        return seen

    assert after_parent_moves(step) == after_parent_moves(lambda: None)


def test_setting_inside():
    """Inside, products are IEEE on both backends; a TF32 product is TF32 on CUDA alone."""
    torch.set_float32_matmul_precision("medium")
    inside = []

    class Watched(torch.Tensor):
        def __matmul__(self, other):
            inside.append([_get("cuda", "matmul"), _get("mkldnn", "matmul")])
            return super().__matmul__(other)

    with ieee_products():
        for precision in ("tf32", "fp32"):
            product(torch.ones(2, 2).as_subclass(Watched), torch.ones(2, 2), precision)
    assert inside == [["tf32", "ieee"], ["ieee", "ieee"]]
    assert [_get("cuda", "matmul"), _get("mkldnn", "matmul")] == ["tf32", "bf16"]


def test_setting_is_restored_after_an_error():
    """An exception inside leaves nothing behind."""
    torch.set_float32_matmul_precision("high")
    before = observed()
    with pytest.raises(RuntimeError), ieee_products():
        product(torch.ones(2, 3), torch.ones(2, 3), "tf32")
    assert observed() == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_off_inside(dtype):
    """Under the caller's autocast the update has the same bits, and float32."""
    expected = step()
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(step(), expected) and torch.is_autocast_enabled("cpu")


def test_unit_roundoff():
    """On the CPU there is no TF32."""
    assert unit_roundoff(torch.zeros(1), "tf32") == 6e-8
    assert unit_roundoff(torch.zeros(1, dtype=torch.float64), "fp32") == 1.1e-16


@pytest.mark.parametrize("precision", ["fp16x3", "fp16"])
def test_products_of_halves(device: str, precision: str) -> None:
    """Each entry to four times the unit round-off, whatever the scales of rows and columns; of
    strides, zeros and what is not finite float32's answer, as far as this goes."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(2, *s, generator=generator).to(device) for s in ((33, 100), (70, 100)))
    a *= torch.logspace(-18, 18, 33, device=device)[:, None]
    b *= torch.logspace(15, -15, 70, device=device)[:, None]
    a[0, 3], b[1, 5] = 0.0, 0.0
    b = b.mT  # columns in rows
    expected = a.double() @ b.double()
    size = torch.linalg.vector_norm(a.double(), dim=2)[:, :, None]
    size = size * torch.linalg.vector_norm(b.double(), dim=1)[:, None, :]
    with ieee_products():
        found = of_halves(a, b, precision == "fp16x3")
    assert found.dtype == torch.float32 and not found[0, 3].any() and not found[1, :, 5].any()
    assert ((found - expected).abs() <= 4 * ROUNDOFF[precision] * size).all()
    a[1, 4, 7], b[0, 9, 2] = torch.nan, torch.inf
    with ieee_products():
        found = of_halves(a, b, precision == "fp16x3")
    bad = torch.zeros_like(found, dtype=torch.bool)
    bad[1, 4], bad[0, :, 2] = True, True
    assert torch.equal(found.isfinite(), ~bad)


@pytest.mark.gpu
def test_large_products_are_of_halves() -> None:
    """From SMALL operations on, and not before; float64 never."""
    a = torch.randn(1, 2048, 2048, device="cuda")
    with ieee_products():
        assert torch.equal(product(a, a, "fp16x3"), of_halves(a, a, True))
        assert torch.equal(product(a[0], a[0], "fp16"), of_halves(a, a, False)[0])
        part = a[:, :256, :256]
        assert torch.equal(product(part, part, "fp16x3"), part @ part)
        exact = a.double()
        assert torch.equal(product(exact, exact, "fp16x3"), exact @ exact)
