"""compute_updates as a whole: hard inputs, isolation of elements, syncs, precision, refusals."""

import dataclasses
import itertools
import math
from contextlib import contextmanager

import pytest
import torch
from aro_cases import (
    PROJECTIONS,
    QRS,
    SETTINGS,
    SHAPES,
    counts_by_rung,
    hard_inputs,
    make_batch,
    normal,
)
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_aro.config import AROConfig
from megatron_aro.rotation import (
    advance_momentum,
    apply_updates,
    compute_updates,
    step,
)


def rms(x: torch.Tensor) -> torch.Tensor:
    """[b], in float64."""
    return x.double().square().mean(dim=(1, 2)).sqrt()


@pytest.mark.parametrize("projection, rotation", SETTINGS)
@pytest.mark.parametrize("qr", QRS)
def test_hard_inputs(projection, rotation, qr):
    """Any rank, shape, zeros and scale, float32 and float64: U is finite and has its RMS or is 0.

    And R is orthonormal to the 1e-2 that scqr2 grants itself; Householder's is at rounding. A
    single scqr pass promises nothing.
    """
    config = AROConfig(projection=projection, rotation=rotation, qr=qr)
    for (m, n), dtype in itertools.product(SHAPES, (torch.float32, torch.float64)):
        scales = (1.0, 1e-30, 1e30) if dtype == torch.float32 else (1.0, 1e-250, 1e250)
        for scale in scales:
            momentum = (hard_inputs(m, n) * scale).to(dtype)
            batch = make_batch(momentum.clone(), config)
            for _ in range(3):
                (update,) = compute_updates([batch], config)
                size = rms(update)
                # 1e-5: the rounding of a float32 norm.
                assert ((size == 0) | ((size / 0.2 - 1).abs() < 1e-5)).all()
                assert (size[[4, 5, 9, 10]] > 0).all() and size[0] == 0
                assert batch.rotation.isfinite().all()
                if qr != "scqr":
                    r = batch.rotation.double()
                    error = (r.mT @ r - torch.eye(min(m, n))).abs().max()
                    assert error < (1e-2 if qr == "scqr2" else 30 * torch.finfo(dtype).eps)
            assert torch.equal(batch.momentum, momentum)


@pytest.mark.parametrize("projection, rotation", SETTINGS)
@pytest.mark.parametrize("shape", [(7, 33), (33, 7), (12, 12)])
def test_float32_is_float64(projection, rotation, shape):
    """One step in float32 is the step in float64 to 1e-3 of the update's length.

    6e-8 times the condition of A, squared by eigen and a Cholesky pass: up to 1e4. sign jumps for
    entries that rounding turns over: one of n entries turned changes its length by 2 / sqrt(mn).
    """
    config = AROConfig(projection=projection, rotation=rotation)
    momentum = normal(6, *shape, dtype=torch.float64)
    batches = [make_batch(momentum.to(dtype), config) for dtype in (torch.float32, torch.float64)]
    if projection == "adam":  # from V = 0, the first step would be that of sign
        for batch in batches:
            second = normal(*batch.second_moment.shape, seed=1, dtype=torch.float64).square() + 0.1
            batch.second_moment = second.to(batch.momentum.dtype)
    singles, doubles = compute_updates(batches, config)
    difference = torch.linalg.vector_norm(singles - doubles, dim=(1, 2))
    relative = difference / torch.linalg.vector_norm(doubles, dim=(1, 2))
    if projection == "sign" and rotation != "none" and shape[0] >= shape[1]:
        pytest.skip("A may be singular, R arbitrary: test_hard_inputs says what holds then")
    assert relative.max() < 1e-3


@pytest.mark.parametrize("projection, rotation", SETTINGS)
def test_not_contiguous(projection, rotation):
    """A transposed or strided momentum gives what its copy gives (1e-5: other order of sums)."""
    config = AROConfig(projection=projection, rotation=rotation)
    for momentum in (
        normal(2, 14, 6).mT,
        normal(2, 6, 28)[:, :, ::2],
        normal(1, 6, 14).expand(3, 6, 14),
    ):
        (expected,) = compute_updates([make_batch(momentum.contiguous(), config)], config)
        (update,) = compute_updates([make_batch(momentum, config)], config)
        torch.testing.assert_close(update, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("projection, rotation", SETTINGS)
def test_zero_momentum(projection, rotation):
    """M = 0 keeps R bit for bit, also an R that is not exactly orthonormal, and U = 0."""
    config = AROConfig(projection=projection, rotation=rotation)
    batch = make_batch(torch.zeros(2, 5, 8), config)
    batch.rotation.copy_(normal(2, 5, 5))
    before = batch.rotation.clone()
    (update,) = compute_updates([batch], config)
    assert torch.equal(batch.rotation, before) and not update.any()


@pytest.mark.parametrize("projection, rotation", SETTINGS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_momentum_stays_alone(projection, rotation, bad):
    """NaN or Inf in one element: its U is 0, its state as before, the others' bits unchanged."""
    config = AROConfig(projection=projection, rotation=rotation)
    clean, dirty = (make_batch(normal(3, 6, 10), config) for _ in range(2))
    for batch in clean, dirty:
        compute_updates([batch], config)
    before = dirty.rotation.clone()
    second_before = None if dirty.second_moment is None else dirty.second_moment.clone()
    clean.momentum, dirty.momentum = normal(3, 6, 10, seed=1), normal(3, 6, 10, seed=1)
    dirty.momentum[1, 2, 3] = bad
    (expected,), (update,) = compute_updates([clean], config), compute_updates([dirty], config)
    assert not update[1].any() and torch.equal(dirty.rotation[1], before[1])
    pairs = [(update, expected), (dirty.rotation, clean.rotation)]
    if second_before is not None:
        assert torch.equal(dirty.second_moment[1], second_before[1])
        pairs.append((dirty.second_moment, clean.second_moment))
    for got, wanted in pairs:
        assert torch.equal(got[[0, 2]], wanted[[0, 2]])


@pytest.mark.parametrize("dtype, u", [(torch.float32, 6e-8), (torch.float64, 1.1e-16)])
def test_rows_of_rounding_count_as_zero(dtype, u):
    """Rows of R^T M below 2 u / sqrt(m) ||M||_F are zero in D, rows above have full length.

    M has orthogonal rows, so that eigen from the identity keeps R = I and Y = M up to signs.
    """
    hadamard = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
    threshold = 2 * u / math.sqrt(4) * math.sqrt(2)  # of rows that are as long as the first two
    sizes = torch.tensor([1.0, 1.0, 1.1 * threshold, 0.9 * threshold], dtype=torch.float64)
    momentum = (sizes[:, None] * hadamard).to(dtype)[None]
    config = AROConfig(projection="rownorm", rotation="eigen", qr="qr")
    (update,) = compute_updates([make_batch(momentum, config)], config)
    expected = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=dtype) * 0.4 * math.sqrt(4 / 3)
    torch.testing.assert_close(torch.linalg.vector_norm(update[0], dim=1), expected)


def test_deterministic():
    """Two runs have the same bits."""
    config = AROConfig()
    runs = []
    for _ in range(2):
        batches = [
            make_batch(hard_inputs(9, 5).float(), config),
            make_batch(normal(3, 4, 8), config),
        ]
        runs.append([*compute_updates(batches, config), *(batch.rotation for batch in batches)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


class _HostReads(TorchDispatchMode):
    """Counts operations whose result the host has to wait for."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if any(part in name for part in self.NAMES) and "nonzero_static" not in name:
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


@contextmanager
def host_reads(monkeypatch):
    """The dispatcher's reads, and Tensor methods that copy to the host without showing there."""
    with monkeypatch.context() as patch, _HostReads() as mode:
        for name in ("tolist", "cpu", "numpy", "item", "__bool__", "__int__", "__float__"):
            original = getattr(torch.Tensor, name)

            def counted(self, *args, _name=name, _original=original, **kwargs):
                mode.seen.append(_name)
                return _original(self, *args, **kwargs)

            patch.setattr(torch.Tensor, name, counted)
        yield mode.seen


@pytest.mark.parametrize("projection, rotation", SETTINGS)
@pytest.mark.parametrize("qr", QRS)
def test_one_host_read(projection, rotation, qr, monkeypatch):
    """One read for all batches together; where some climb by scqr2, one more."""
    config = AROConfig(projection=projection, rotation=rotation, qr=qr, scqr_eps=1e-11)
    batches = [make_batch(hard_inputs(m, n).float(), config) for m, n in SHAPES]
    with host_reads(monkeypatch) as reads:
        compute_updates(batches, config)
    expected = 0 if qr == "qr" or rotation == "none" else 1
    if qr == "scqr2":
        expected += any(batch.fallbacks[:, 1:].any() for batch in batches)
    assert reads == ["tolist"] * expected
    if reads and rotation not in ("polar", "rgd"):  # whose A is orthonormal, or nearly so
        assert counts_by_rung(batches)["householder"] > 0


def test_climbing_together(monkeypatch):
    """Matrices of a shape climb with those of other batches, as many as the largest batch has, and
    each gets what it would get alone, and is counted once."""
    config, sizes = AROConfig(projection="sign"), []
    for name in ("_extra_pass", "_householder"):
        original = getattr(step, name)

        def counted(part, frame, config, _original=original):
            sizes.append(len(part.momentum))
            return _original(part, frame, config)

        monkeypatch.setattr(step, name, counted)
    hard = hard_inputs(9, 9).float()[torch.arange(11).repeat(2)]
    hard[11:] *= 3.0
    batches = [make_batch(m.clone(), config) for m in (hard[:1], hard[1:8], hard[8:])]
    batches.insert(1, make_batch(hard_inputs(9, 20).float(), config))
    together = compute_updates(batches, config)
    assert max(sizes) > 7 and max(sizes) <= 14  # rank one, equal rows, ...
    alone = [make_batch(m[None].clone(), config) for m in hard]
    expected = [compute_updates([batch], config)[0] for batch in alone]
    del batches[1], together[1]
    counts = torch.cat([batch.fallbacks for batch in batches])
    assert (counts[:, 1:].sum(dim=1) <= counts[:, 0]).all()
    assert counts[:, 1].any() and counts[:, 2].any()
    # Of a momentum of low rank the update has as much rounding as A's null space lets in.
    torch.testing.assert_close(torch.cat(together), torch.cat(expected), rtol=0, atol=1e-4)


@pytest.mark.parametrize("rotation", ["aro", "none"])
def test_no_matrices(rotation):
    """A batch of none, alone and beside others, has an update of none."""
    config = AROConfig(rotation=rotation)
    none, some = (make_batch(torch.zeros(b, 5, 7), config) for b in (0, 2))
    for batches in ([none], [none, some], [some, make_batch(torch.zeros(0, 4, 7), config)]):
        for batch, update in zip(batches, compute_updates(batches, config), strict=True):
            assert update.shape == batch.momentum.shape


def test_step_one_and_six():
    """advance_momentum and apply_updates in place, on any shapes, 1-D slices and nothing at all."""
    shapes = [(3, 4), (7,), (2, 3, 4)]
    momenta, gradients, weights, updates = (
        [normal(*shape, seed=seed) for shape in shapes] for seed in range(4)
    )
    expected = [0.9 * m + 0.1 * g for m, g in zip(momenta, gradients, strict=True)]
    advance_momentum(momenta, gradients, 0.9)
    torch.testing.assert_close(momenta, expected)
    expected = [(1 - 0.5 * 0.1) * w - 0.5 * u for w, u in zip(weights, updates, strict=True)]
    apply_updates(weights, updates, 0.5, 0.1)
    torch.testing.assert_close(weights, expected)
    advance_momentum([], [], 0.9)
    apply_updates([], [], 0.5, 0.1)
    assert compute_updates([], AROConfig()) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_dtype_is_refused(dtype):
    """Half precision has no room for the algorithm: said, not tried."""
    batch = make_batch(torch.ones(1, 4, 4), AROConfig())
    batch.momentum, batch.rotation = batch.momentum.to(dtype), batch.rotation.to(dtype)
    with pytest.raises(ValueError, match=str(dtype)):
        compute_updates([batch], AROConfig())


def test_wrong_state_is_refused():
    """The message names the tensor, what it is and what it must be."""
    good = make_batch(normal(2, 4, 6), AROConfig())
    wrong = dataclasses.replace(good, rotation=good.rotation[:, :, :3])
    with pytest.raises(ValueError, match=r"rotation is \(2, 4, 3\).*must be \(2, 4, 4\)"):
        compute_updates([wrong], AROConfig())
    with pytest.raises(ValueError, match="second_moment is None"):
        compute_updates([good], AROConfig(projection="adam"))
    with pytest.raises(ValueError, match="rotation is .*float64"):
        compute_updates([dataclasses.replace(good, rotation=good.rotation.double())], AROConfig())


def test_a_momentum_of_denormals_is_zero():
    """What is left of a momentum whose gradients ended long ago moves nothing.

    The smallest denormal times 0.95 rounds to itself, so such a momentum never becomes zero.
    """
    config = AROConfig()
    batch = make_batch(normal(2, 6, 9), config)
    batch.momentum[1] *= 1e-39
    (update,) = compute_updates([batch], config)
    assert update[0].any() and not update[1].any()
    assert torch.equal(batch.rotation[1], torch.eye(6))


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("rotation", ["aro", "eigen", "polar", "rgd"])
def test_a_thin_rotation_finds_a_momentum_outside_of_its_span(projection, rotation):
    """R starts in the first k rows; where M has zeros there, and R^T M is zero, R moves to M.

    In one step to a full update in the span of M (polar's, to what it keeps of R), and the matrix
    beside it does not notice.
    """
    config = AROConfig(projection=projection, rotation=rotation)
    momentum = normal(2, 12, 4)
    clean = make_batch(momentum.clone(), config)
    momentum[1, :8] = 0
    batch = make_batch(momentum, config)
    (expected,), (update,) = (compute_updates([x], config) for x in (clean, batch))
    assert torch.equal(update[0], expected[0])
    assert rms(update)[1].item() == pytest.approx(0.2, rel=1e-5)
    assert update[1, :8].abs().max() < 1e-3
