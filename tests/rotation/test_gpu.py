"""The mathematics on CUDA: the same results, one wait for the device, TF32 only where asked."""

import copy
import warnings

import pytest
import torch
from aro_cases import (
    GOLDEN_ROTATIONS,
    PROJECTIONS,
    QRS,
    ROTATIONS,
    SETTINGS,
    SHAPES,
    counts_by_rung,
    golden_results,
    hard_inputs,
    make_batch,
    normal,
    weights_after_steps,
)

from megatron_aro.config import AROConfig
from megatron_aro.optimizer import ARO
from megatron_aro.rotation import compute_updates

pytestmark = pytest.mark.gpu


def step(momenta: list[torch.Tensor], config: AROConfig):
    """Updates, batches and counts of one call on fresh state."""
    batches = [make_batch(momentum, config) for momentum in momenta]
    updates = compute_updates(batches, config)
    return updates, batches, counts_by_rung(batches)


def cosines(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cosine_similarity(a.flatten(1).double(), b.flatten(1).double())


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("rotation", GOLDEN_ROTATIONS)
def test_golden(projection, rotation):
    """The golden cases in float64, to the 1e-9 of the definition."""
    golden = golden_results()
    for key in golden:
        if f"/{projection}/{rotation}/" in key:
            shape, _, _, qr = key.split("/")
            names = {"projection": projection, "rotation": rotation, "qr": qr}
            inputs = golden[f"{shape}/W0"], golden[f"{shape}/G"]
            weights = weights_after_steps(*inputs, device="cuda", **names)
            difference = abs(torch.tensor(weights) - torch.tensor(golden[key])).max()
            assert difference < 1e-9, key


@pytest.mark.parametrize("projection", ["sinkhorn", "rownorm"])
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("shape", [(128, 384), (384, 128)])
def test_float32_is_float64(projection, rotation, shape):
    """float32 on CUDA is float64 on the CPU to 1 - cos = 1e-4: rounding times the condition.

    1e-2 for polar, which also feels 16 eps of the old R: on the CPU 3e-4 where the others have
    5e-8 (the tall shape; its first A is badly conditioned).
    """
    config = AROConfig(projection=projection, rotation=rotation)
    momentum = normal(4, *shape, dtype=torch.float64)
    expected = compute_updates([make_batch(momentum, config)], config)
    (update,), _, counts = step([momentum.float().cuda()], config)
    assert (1 - cosines(update.cpu(), expected[0])).max() < (1e-2 if rotation == "polar" else 1e-4)
    # In halves the first A of one of the tall ones is beyond what another pass may mend.
    beyond = shape[0] > shape[1] and rotation in ("aro", "eigen")
    assert counts["householder"] == beyond and counts["kept"] == 0


@pytest.mark.parametrize("projection, rotation", SETTINGS)
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_hard_inputs(projection, rotation, precision):
    """Any rank, shape, zeros and scale: U is finite and has its RMS or is 0, R is orthonormal."""
    config = AROConfig(projection=projection, rotation=rotation, precision=precision)
    for scale in (1.0, 1e-30, 1e30):
        momenta = [(hard_inputs(m, n) * scale).float().cuda() for m, n in SHAPES]
        updates, batches, counts = step(momenta, config)
        assert counts["kept"] == 0
        for update, batch in zip(updates, batches, strict=True):
            size = update.square().mean(dim=(1, 2)).sqrt()
            # 1e-4: a float32 norm; 2e-2: scqr2's own 1e-2 and the TF32 that measures it.
            assert ((size == 0) | ((size / 0.2 - 1).abs() < 1e-4)).all()
            r = batch.rotation.double()
            error = r.mT @ r - torch.eye(r.shape[2], device="cuda", dtype=r.dtype)
            assert error.abs().max() < 2e-2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_momentum_stays_alone(bad):
    """NaN or Inf in one element: U = 0 and R as it was there, the others' bits unchanged."""
    config = AROConfig()
    clean = normal(3, 64, 96).cuda()
    dirty = clean.clone()
    dirty[1, 50, 70] = bad
    (expected,), (wanted,), _ = step([clean], config)
    (update,), (batch,), _ = step([dirty], config)
    assert not update[1].any() and torch.equal(batch.rotation[1], torch.eye(64, device="cuda"))
    assert torch.equal(update[::2], expected[::2])
    assert torch.equal(batch.rotation[::2], wanted.rotation[::2])


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("qr", QRS)
def test_syncs(rotation, qr):
    """torch reports one synchronizing operation for all batches, and one more where some matrix
    of scqr2 must climb."""
    config = AROConfig(rotation=rotation, qr=qr, scqr_eps=1e-11)
    momenta = [hard_inputs(m, n).float().cuda() for m, n in SHAPES]
    step(momenta, config)  # handles and workspaces are made once
    batches = [make_batch(momentum, config) for momentum in momenta]
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            compute_updates(batches, config)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    syncs = [str(w.message) for w in caught if "called a synchronizing" in str(w.message)]
    expected = 0 if qr == "qr" or rotation == "none" else 1
    if qr == "scqr2":
        expected += any(batch.fallbacks[:, 1:].any() for batch in batches)
    assert len(syncs) == expected, syncs


def test_tf32_is_a_setting():
    """precision decides, not the caller; and the caller's setting is what it was.

    On well-conditioned momenta TF32 turns the update by less than 1 - cos = 1e-3, and it turns it.
    """
    momentum = normal(2, 128, 256).cuda()
    results = {}
    try:
        for caller in ("highest", "high"):
            torch.set_float32_matmul_precision(caller)
            for precision in ("fp32", "tf32"):
                (update,), _, _ = step([momentum], AROConfig(precision=precision))
                results[caller, precision] = update
            assert torch.get_float32_matmul_precision() == caller
            assert torch.backends.cuda.matmul.allow_tf32 == (caller == "high")
    finally:
        torch.set_float32_matmul_precision("highest")
    for precision in ("fp32", "tf32"):
        assert torch.equal(results["highest", precision], results["high", precision])
    turned = 1 - cosines(results["high", "fp32"], results["high", "tf32"])
    assert (turned > 0).all() and (turned < 1e-3).all()


def test_mixed_precision_apis():
    """A caller that mixes the old and the new API, where torch's own getter raises, trains too."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with pytest.raises(RuntimeError):
            torch.get_float32_matmul_precision()
        (update,), _, _ = step([normal(2, 64, 128).cuda()], AROConfig())
        assert update.isfinite().all()
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_thin_experts(precision):
    """64 matrices of 1024 x 512, the shape of Sigma-MoE's experts, half of them of low rank.

    Single-pass Cholesky QR of the full 1024 x 1024 A is NaN here; the thin one must be finite and
    orthonormal, whatever rung it takes.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    options = {"device": "cuda", "generator": generator}
    momentum = torch.randn(64, 1024, 512, **options)
    momentum[::2] = torch.randn(32, 1024, 40, **options) @ torch.randn(32, 40, 512, **options)
    (update,), (batch,), counts = step([momentum], AROConfig(precision=precision))
    assert update.isfinite().all() and counts["factorizations"] == 64 and counts["kept"] == 0
    error = batch.rotation.mT @ batch.rotation - torch.eye(512, device="cuda")
    assert error.abs().max() < 2e-2
    print(counts, f"max |R^T R - I| = {error.abs().max().item():.1e}")


def test_autocast_and_determinism():
    """Under the caller's bf16 autocast, and again, the same bits."""
    momenta = [normal(4, 96, 200).cuda(), normal(3, 200, 96).cuda()]
    plain, _, _ = step(momenta, AROConfig())
    with torch.autocast("cuda", dtype=torch.bfloat16):
        cast, _, _ = step(momenta, AROConfig())
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


def test_optimizer():
    """ARO on CUDA: the CPU's weights, a skipped matrix, and a state that resumes bit for bit."""
    cpu = [torch.nn.Parameter(normal(*shape)) for shape in ((16, 40), (40, 16))]
    gpu = [torch.nn.Parameter(w.detach().cuda()) for w in cpu]
    optimizers = ARO(cpu, 1e-2), ARO(gpu, 1e-2)
    for seed in range(4):
        for mine, theirs in zip(cpu, gpu, strict=True):
            mine.grad = normal(*mine.shape, seed=seed + 10)
            theirs.grad = mine.grad.cuda()
        if seed == 2:
            cpu[0].grad[0, 0] = gpu[0].grad[0, 0] = float("nan")
        for optimizer in optimizers:
            optimizer.step()
    assert [optimizer.skipped for optimizer in optimizers] == [1, 1]
    for mine, theirs in zip(cpu, gpu, strict=True):
        # Rounding times the condition of A, on four updates of lr * RMS = 2e-3.
        torch.testing.assert_close(theirs.cpu(), mine, rtol=0, atol=1e-5)
    resumed_weights = [torch.nn.Parameter(w.detach().clone()) for w in gpu]
    resumed = ARO(resumed_weights, 1e-2)
    resumed.load_state_dict(copy.deepcopy(optimizers[1].state_dict()))  # torch's shares tensors
    assert resumed.fallbacks == optimizers[1].fallbacks
    for mine, theirs in zip(gpu, resumed_weights, strict=True):
        mine.grad = normal(*mine.shape, seed=20).cuda()
        theirs.grad = mine.grad.clone()
    optimizers[1].step()
    resumed.step()
    assert all(torch.equal(a, b) for a, b in zip(gpu, resumed_weights, strict=True))
