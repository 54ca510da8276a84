"""The step in float16 halves: QR's answer, whatever the momentum is; on the CPU by the twins."""

import itertools

import pytest
import torch

from megatron_aro.config import AROConfig
from megatron_aro.rotation import (
    FALLBACK_RUNGS,
    MatrixBatch,
    compute_updates,
    fast,
    initial_rotation,
    step,
)
from megatron_aro.rotation.orthonormal import Orthonormal
from megatron_aro.sharding.cost import workspace_bytes

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(1, 9), (9, 1), (1, 1), (7, 33), (33, 7), (12, 12), (40, 40)]
# What `fast` turns: A = M (P X Q)^T, or M X^T.
TURNED = [
    ("sinkhorn", "aro"),
    ("rownorm", "aro"),
    ("sinkhorn", "eigen"),
    ("sign", "eigen"),
    ("adam", "eigen"),
]
# 1 - cos of the update to float64 on graded momenta.
ANGLE = {"fp16": 1e-3, "fp16x3": 1e-6}


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """Also on the CPU, which gains nothing from it and takes it nowhere else."""
    covers = fast.covers
    monkeypatch.setattr(fast, "covers", lambda config, m: covers(config, _OnDevice(m.dtype)))


class _OnDevice:
    is_cuda = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def batch_of(
    momentum: torch.Tensor, rotation: torch.Tensor | None = None, projection: str = "sinkhorn"
) -> MatrixBatch:
    b, m, n = momentum.shape
    if rotation is None:
        rotation = initial_rotation(b, m, n, dtype=momentum.dtype, device=momentum.device)
    counts = torch.zeros(b, len(FALLBACK_RUNGS), dtype=torch.int64, device=momentum.device)
    moment = momentum.new_zeros(b, min(m, n), n) if projection == "adam" else None
    return MatrixBatch(momentum, rotation, counts, moment)


def graded(b: int, m: int, n: int, power: float, noise: float) -> torch.Tensor:
    """Singular values i^power and noise of that share."""
    k = min(m, n)
    u, v = (torch.linalg.qr(normal(b, x, k, seed=x)).Q for x in (m, n))
    x = u * torch.arange(1, k + 1, dtype=u.dtype) ** power @ v.mT
    e = normal(b, m, n, seed=3)
    size = torch.linalg.vector_norm(x, dim=(1, 2)) / torch.linalg.vector_norm(e, dim=(1, 2))
    return x + noise * size[:, None, None] * e


def error(r: torch.Tensor) -> float:
    r = r.double().cpu()
    return (r.mT @ r - torch.eye(r.shape[2], dtype=r.dtype)).abs().max().item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["fp16", "fp16x3"])
@pytest.mark.parametrize("shape", [(2, 40, 100), (2, 90, 60)])
@pytest.mark.parametrize("blocks", [100, 32])
@pytest.mark.parametrize(("projection", "rotation"), TURNED[:3])
def test_is_the_step_of_float64(device, precision, shape, blocks, projection, rotation, in_blocks):
    """Warm frames and graded momenta: the step of float64 with Householder QR, no fall-backs.

    Not of sign and adam, of which rounding turns entries near zero round.
    """
    in_blocks(blocks)
    of = {"projection": projection, "rotation": rotation}
    config, exact = AROConfig(precision=precision, **of), AROConfig(qr="qr", **of)
    for power, noise in ((-0.5, 0.0), (-0.5, 0.3), (-1.0, 0.0), (-1.0, 0.3)):
        momentum = graded(*shape, power, noise)
        start = batch_of(momentum)
        for _ in range(2):
            compute_updates([start], exact)
        (expected,) = compute_updates([batch_of(momentum, start.rotation.clone())], exact)
        batch = batch_of(momentum.float().to(device), start.rotation.float().to(device))
        (update,) = compute_updates([batch], config)
        cosine = torch.cosine_similarity(update.double().cpu().flatten(1), expected.flatten(1))
        assert (1 - cosine).max() < ANGLE[precision]
        assert error(batch.rotation) < 1e-4
        assert batch.fallbacks.tolist() == [[1, 0, 0, 0]] * 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("projection", "rotation"), TURNED[:3])
@pytest.mark.parametrize("size", [4, 8, 24])
def test_quiet_rows_before_loud_ones(device, projection, rotation, size):
    """Whatever a first row is to the others, and whoever answers in the end: float64's update.

    The columns of R N are as large as the ratio of rows, 3e4 here, which float16 does not hold.
    """
    of = {"projection": projection, "rotation": rotation}
    for power in (0, -1, -2, -3, -3.5, -4, -4.5):
        x = normal(20, size, 4 * size, seed=size)
        x[:, 0] *= 10.0**power
        (expected,) = compute_updates([batch_of(x)], AROConfig(qr="qr", **of))
        (update,) = compute_updates([batch_of(x.float().to(device))], AROConfig(**of))
        cosine = torch.cosine_similarity(update.double().cpu().flatten(1), expected.flatten(1))
        assert (1 - cosine).max() < 1e-4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rms", [1e-6, 1.0, 1e6])
def test_any_size_of_updates(device, rms):
    """It is not asked of float16."""
    x = normal(2, 32, 96)
    (expected,) = compute_updates([batch_of(x)], AROConfig(qr="qr"))
    (update,) = compute_updates([batch_of(x.float().to(device))], AROConfig(update_rms=rms))
    torch.testing.assert_close(
        update.double().cpu() / rms, expected / 0.2, rtol=0, atol=5e-3
    )  # float16's 5e-4 of entries of up to 5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("projection", "rotation"), TURNED[:3])
@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_sizes_of_low_rank(device, projection, rotation, iterations):
    """After one iteration f(X) has any size; updates of rank 2 came out at a tenth of theirs."""
    config = AROConfig(projection=projection, rotation=rotation, sinkhorn_iters=iterations)
    for m, n in ((4, 4), (7, 33), (24, 24), (80, 70)):
        x = normal(4, m, 2) @ normal(4, 2, n, seed=1) + 1e-6 * normal(4, m, n, seed=2)
        (update,) = compute_updates([batch_of(x.float().to(device))], config)
        rms = update.square().mean(dim=(1, 2)).sqrt().cpu()
        torch.testing.assert_close(rms, torch.full((4,), 0.2), rtol=2e-3, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("iterations", [20, 50, 300])
def test_many_iterations_that_do_not_converge(device, iterations):
    """One row and one column beside nothing: scales fall out of float32, updates do not."""
    x = torch.zeros(1, 32, 96, device=device)
    x[0, :, 0] = normal(32).float()
    x[0, 0, 1:] = 1e-5 * normal(95).float()
    (update,) = compute_updates([batch_of(x)], AROConfig(sinkhorn_iters=iterations))
    assert update.square().mean().sqrt().item() == pytest.approx(0.2, rel=2e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["fp16", "fp16x3"])
@pytest.mark.parametrize("qr", ["scqr2", "scqr"])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize(("projection", "rotation"), TURNED)
def test_hard_inputs(device, precision, qr, scale, projection, rotation):
    """Any rank, shape, zeros and scale: U is finite and has its RMS or is 0, R is orthonormal: to
    1e-3 by the default, to the spec's 1e-2 where Gram matrices have float16's 11 bits.
    """
    config = AROConfig(precision=precision, qr=qr, projection=projection, rotation=rotation)
    orthonormal = {"fp16": 1e-2, "fp16x3": 1e-3}[precision]
    for m, n in SHAPES:
        x = normal(8, m, n)
        x[0] = 0
        x[1, 0] = 0
        x[2, :, -1] = 0
        x[3] = x[3, :, :1] @ x[3, :1]
        x[4] = x[4, :1]
        x[5, : (m + 1) // 2] = 0
        x[6] *= 10.0 ** torch.linspace(0, -30, n, dtype=x.dtype)
        batch = batch_of((x * scale).float().to(device), projection=projection)
        for _ in range(3):
            (update,) = compute_updates([batch], config)
            size = update.square().mean(dim=(1, 2)).sqrt()
            assert ((size == 0) | ((size / 0.2 - 1).abs() < 2e-3)).all()
            assert size[0] == 0 and (size[[4, 7]] > 0).all()
            assert batch.rotation.isfinite().all()
            assert qr == "scqr" or error(batch.rotation) < orthonormal
        assert not batch.fallbacks[:, 3].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_momentum_stays_alone(device, bad):
    """NaN or Inf in one matrix: U = 0 and R as it was there, the others' bits unchanged."""
    clean = normal(3, 20, 30).float().to(device)
    dirty = clean.clone()
    dirty[1, 5, 7] = bad
    config = AROConfig(precision="fp16x3")
    one, two = batch_of(clean), batch_of(dirty)
    (expected,), (update,) = compute_updates([one], config), compute_updates([two], config)
    assert not update[1].any() and torch.equal(two.rotation[1].cpu(), torch.eye(20))
    assert torch.equal(update[::2], expected[::2])
    assert torch.equal(two.rotation[::2], one.rotation[::2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rotation", ["aro", "eigen"])
@pytest.mark.parametrize(
    "shape", [(50, 6, 10), (50, 8, 8), (20, 24, 60), (20, 60, 24), (4, 96, 200)]
)
def test_rotations_of_low_rank_are_orthonormal(device, rotation, shape, in_blocks):
    """Gram matrices can be nearly singular with no pivot below 0.1: one in a thousand was."""
    in_blocks(32)
    b, m, n = shape
    noise = normal(b, m, n, seed=1)
    for seed, rank, share in itertools.product(range(6), (1, 5, min(m, n)), (0.0, 1e-6, 1e-4)):
        x = normal(b, m, rank, seed=seed) @ normal(b, rank, n, seed=seed + 100)
        x += share * x.square().mean().sqrt() * noise
        batch = batch_of(x.float().to(device))
        for _ in range(2):
            compute_updates([batch], AROConfig(rotation=rotation))
            assert error(batch.rotation) < 1e-3


@pytest.mark.parametrize("device", DEVICES)
def test_one_more_pass_is_qr_of_any_columns(device, in_blocks):
    """Or it fails: a failed pass leaves columns of any size, zeros and NaN. In several blocks."""
    in_blocks(32)
    q = normal(4, 90, 80) + 0.1 * normal(4, 90, 1, seed=1)
    expected = torch.linalg.qr(q).Q
    q *= 10.0 ** (12 * normal(4, 1, 80, seed=2).clamp(-1, 1))
    q[1, 7, 20], q[2, :, 50], q[3, :, 70] = torch.nan, 0, q[3, :, 10]
    again = fast.one_more(Orthonormal(q.float().to(device), torch.ones(4, device=device)))
    assert again.failed_b.tolist() == [False, True, True, True]
    result = again.q_bmk[0].double().cpu()
    sign = (result * expected[0]).sum(dim=0).sign()
    assert (result * sign - expected[0]).abs().max() < 1e-4


def test_rungs(monkeypatch):
    """A large inverse takes one more pass and no Householder; a hopeless one takes both, once.

    Power -2 on 6 square matrices: the largest entries of the inverse are 88 to 260 and 437, with
    the bound between. Tall ones of power -2 fail in the frame of the identity, which does not hold
    their range, and never again in the frame that Householder made.
    """
    config = AROConfig(precision="fp16x3")
    called = []
    householder = step.householder
    monkeypatch.setattr(step, "householder", lambda a: called.append(1) or householder(a))
    square = batch_of(graded(6, 40, 40, -2.0, 0.0).float())
    with monkeypatch.context() as patch:
        patch.setattr(fast, "LARGEST_INVERSE", 340.0)
        compute_updates([square], config)
    expected = [[1, 0, 0, 0]] * 6
    expected[3] = [1, 1, 0, 0]
    assert square.fallbacks.tolist() == expected
    assert not called and error(square.rotation) < 1e-3
    tall = batch_of(graded(6, 60, 30, -2.0, 0.0).float())
    for _ in range(3):
        compute_updates([tall], config)
        assert error(tall.rotation) < 1e-3
    assert tall.fallbacks.tolist() == [[3, 0, 1, 0]] * 6 and called == [1]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1152, 1152),
        (4, 512, 2048),
        (3, 768, 768),
        (2, 1536, 1536),
        (4, 1024, 640),
        (64, 512, 128),
    ],
)
def test_workspace(shape):
    """A step takes no more memory than `batch_limit` reckons with, and 1 MiB for vectors.

    In a warm frame, where nothing climbs.
    """
    b, m, n = shape
    momentum = graded(b, m, n, -0.5, 0.3)
    start = batch_of(momentum)
    for _ in range(2):
        compute_updates([start], AROConfig(qr="qr"))
    rotation = start.rotation.float().cuda()
    for _ in range(2):  # cuBLAS keeps what it takes at first
        batch = batch_of(momentum.float().cuda(), rotation.clone())
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        compute_updates([batch], AROConfig())
        taken = torch.cuda.max_memory_allocated() - before
    assert not batch.fallbacks[:, 1:].any()
    assert taken <= b * workspace_bytes(m, n) + 2**20
