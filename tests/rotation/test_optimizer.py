"""ARO as a torch.optim.Optimizer: groups, batches, state, refusals and bad gradients."""

import copy
import io

import pytest
import torch

from megatron_aro import optimizer as module
from megatron_aro.config import settings
from megatron_aro.optimizer import ARO

SHAPES = [(4, 9), (9, 4), (4, 9), (6, 6), (1, 3)]


def parameters(dtype=torch.float32, seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(*s, dtype=torch.float64, generator=generator).to(dtype))
        for s in SHAPES
    ]


def give_gradients(weights: list[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for w in weights:
        w.grad = torch.randn(*w.shape, dtype=torch.float64, generator=generator).to(w.dtype)


def run(weights: list[torch.nn.Parameter], optimizer: ARO, seeds: range) -> None:
    for seed in seeds:
        give_gradients(weights, seed)
        optimizer.step()


def test_arguments_are_the_settings():
    """Every setting of AROConfig is an argument with the same default (orientation: no names)."""
    optimizer = ARO(parameters(), lr=1e-2)
    for f in settings():
        expected = "left" if f.name == "orientation" else f.default
        assert getattr(optimizer.config, f.name) == expected
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


@pytest.mark.parametrize("orientation", ["left", "right", "min-side"])
def test_one_batch_per_shape(orientation, monkeypatch):
    """All groups are stepped in one call, one batch for each shape that is turned alike."""
    calls = []

    def recorded(batches, *args):
        calls.append(sorted(tuple(batch.momentum.shape) for batch in batches))
        return original(batches, *args)

    original = module.rot.compute_updates
    monkeypatch.setattr(module.rot, "compute_updates", recorded)
    weights = parameters()
    groups = [{"params": weights[:2]}, {"params": weights[2:], "lr": 1e-3, "momentum": 0.5}]
    run(weights, ARO(groups, 1e-2, orientation=orientation), range(1))
    turned = {
        "left": [(1, 1, 3), (1, 6, 6), (1, 9, 4), (2, 4, 9)],
        "right": [(1, 3, 1), (1, 4, 9), (1, 6, 6), (2, 9, 4)],
        "min-side": [(1, 1, 3), (1, 4, 9), (1, 6, 6), (2, 4, 9)],
    }
    assert calls == [turned[orientation]]


def test_groups_are_independent():
    """Parameters in groups, with their own settings, move as in optimizers of their own."""
    options = [
        {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.0, "orientation": "right"},
        {"lr": 3e-2, "momentum": 0.5, "weight_decay": 0.2, "orientation": "left"},
        {"lr": 0.0, "weight_decay": 0.1, "orientation": "min-side"},
        {},
        {"momentum": 0.0},
    ]
    together, apart = parameters(torch.float64), parameters(torch.float64)
    groups = [{"params": [w], **o} for w, o in zip(together, options, strict=True)]
    run(together, ARO(groups, lr=1e-3), range(4))
    singles = [ARO([w], **{"lr": 1e-3, **o}) for w, o in zip(apart, options, strict=True)]
    for seed in range(4):
        give_gradients(apart, seed)
        for single in singles:
            single.step()
    # Matrices in a batch may be summed in another order than alone.
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-12)


def test_update_is_decoupled_and_has_its_rms():
    """W = (1 - lr wd) W - lr U with RMS(U) = update_rms (1e-5: float32 rounding of W over lr)."""
    weights = parameters()
    before = [w.detach().clone() for w in weights]
    run(weights, ARO(weights, lr=1e-1, weight_decay=0.5, update_rms=0.4), range(1))
    for w, old in zip(weights, before, strict=True):
        update = ((1 - 0.05) * old - w.detach()) / 1e-1
        assert update.square().mean().sqrt().item() == pytest.approx(0.4, rel=1e-5)


def test_state():
    """exp_avg as stored, rotation of the oriented matrix, second_moment for adam only."""
    for projection in "sinkhorn", "adam":
        weights = parameters()
        optimizer = ARO(weights, 1e-2, projection=projection, orientation="right")
        assert not optimizer.state
        run(weights, optimizer, range(1))
        for w in weights:
            state, (columns, rows) = optimizer.state[w], w.shape
            shapes = {"exp_avg": w.shape, "rotation": (rows, min(w.shape))}
            if projection == "adam":
                shapes["second_moment"] = (min(w.shape), columns)
            assert {name: tuple(t.shape) for name, t in state.items()} == shapes
            torch.testing.assert_close(state["exp_avg"], 0.05 * w.grad)


@pytest.mark.parametrize("projection", ["sinkhorn", "adam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_resumed_run_is_bit_identical(projection, dtype):
    """state_dict through a file into a new optimizer: weights, state and counts bit for bit."""
    weights = parameters(dtype)
    optimizer = ARO(weights, 1e-2, projection=projection, orientation="min-side")
    run(weights, optimizer, range(3))
    weights[0].grad[0, 0] = float("nan")
    optimizer.step()
    file = io.BytesIO()
    torch.save([weights, optimizer.state_dict()], file)
    file.seek(0)
    resumed_weights, state = torch.load(file, weights_only=True)
    resumed = ARO(resumed_weights, 1e-2, projection=projection, orientation="min-side")
    resumed.load_state_dict(state)
    assert resumed.fallbacks == optimizer.fallbacks and resumed.skipped == optimizer.skipped == 1
    run(weights, optimizer, range(5, 8))
    run(resumed_weights, resumed, range(5, 8))
    assert all(torch.equal(a, b) for a, b in zip(weights, resumed_weights, strict=True))
    states = (optimizer.state_dict(), resumed.state_dict())
    for mine, theirs in zip(*(s["state"].values() for s in states), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert states[0]["counts"] == states[1]["counts"]
    assert states[0]["param_groups"] == states[1]["param_groups"]


def test_copy():
    """A deep copy goes on like the original and counts for itself."""
    weights = parameters()
    optimizer = ARO(weights, 1e-2)
    run(weights, optimizer, range(2))
    other_weights, other = copy.deepcopy((weights, optimizer))
    run(weights, optimizer, range(2, 4))
    assert other.fallbacks["factorizations"] == 2 * len(SHAPES)
    run(other_weights, other, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True))


def test_checkpoint_of_other_settings_is_refused():
    """A state saved with another projection does not load, and the optimizer stays as it was."""
    weights = parameters()
    state = ARO(weights, 1e-2, projection="adam").state_dict()
    optimizer = ARO(weights, 1e-2)
    with pytest.raises(ValueError, match="projection is 'sinkhorn', .* has 'adam'"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["projection"] == "sinkhorn"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("projection", ["sinkhorn", "adam"])
@pytest.mark.parametrize("orientation", ["left", "right"])
def test_bad_gradient(bad, projection, orientation):
    """The matrix keeps weight and state bit for bit and is counted; the others do not notice."""
    clean, dirty = parameters(), parameters()
    optimizers = [
        ARO(w, 1e-2, projection=projection, orientation=orientation) for w in (clean, dirty)
    ]
    for weights, optimizer in zip((clean, dirty), optimizers, strict=True):
        run(weights, optimizer, range(2))
        give_gradients(weights, 3)
    victim = dirty[0]
    victim.grad[1, 2] = bad
    before = copy.deepcopy((victim.detach(), optimizers[1].state[victim]))
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(victim, before[0])
    state = optimizers[1].state[victim]
    assert all(torch.equal(state[key], before[1][key]) for key in state)
    assert all(torch.equal(a, b) for a, b in zip(clean[1:], dirty[1:], strict=True))
    assert [optimizer.skipped for optimizer in optimizers] == [0, 1]


def test_bad_gradient_at_the_first_step():
    """A first gradient that is all NaN leaves a matrix that trains normally afterwards."""
    weights, reference = parameters(), parameters()
    optimizer = ARO(weights, 1e-2)
    for w in weights:
        w.grad = torch.full_like(w, float("nan"))
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(weights, reference, strict=True))
    run(weights, optimizer, range(2))
    run(reference, ARO(reference, 1e-2), range(2))
    assert all(torch.equal(a, b) for a, b in zip(weights, reference, strict=True))
    assert optimizer.skipped == len(SHAPES)


def test_parameters_without_gradient_are_left_alone():
    """No state, no weight decay; and a step without any gradient does nothing."""
    weights = parameters()
    optimizer = ARO(weights, 1e-2)
    optimizer.step()
    give_gradients(weights, 0)
    weights[2].grad = None
    before = weights[2].detach().clone()
    optimizer.step()
    assert torch.equal(weights[2], before) and weights[2] not in optimizer.state
    assert len(optimizer.state) == len(SHAPES) - 1
    assert optimizer.fallbacks["factorizations"] == len(SHAPES) - 1


def test_mixed_dtypes():
    """float32 and float64 parameters of one shape live in one optimizer."""
    weights = [*parameters(torch.float32), *parameters(torch.float64, seed=1)]
    run(weights, ARO(weights, 1e-2), range(2))
    assert all(w.isfinite().all() for w in weights)


def test_scheduler_changes_the_rate():
    """A torch scheduler's lr is the one that is used."""
    weights = parameters()
    optimizer = ARO(weights, 1.0, weight_decay=0.0)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    before = copy.deepcopy(weights)
    run(weights, optimizer, range(1))
    assert all(torch.equal(a, b) for a, b in zip(weights, before, strict=True))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"lr": -1e-3}, "lr is -0.001"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"lr": torch.tensor(1e-3)}, "lr is tensor"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"momentum": 1.0}, "momentum.* is 1.0"),
        ({"orientation": "residual"}, "residual.*Megatron"),
        ({"orientation": "up"}, "orientation.* is 'up'"),
        ({"projection": "muon"}, "projection.* is 'muon'"),
        ({"sinkhorn_iters": 0}, "sinkhorn_iters.* is 0"),
    ],
)
def test_wrong_settings_are_refused(change, message):
    """By the constructor and for a group alike; a refused group is not kept."""
    with pytest.raises(ValueError, match=message):
        ARO(parameters(), **{"lr": 1e-2, **change})
    optimizer = ARO(parameters(), 1e-2)
    message = (
        message if change.keys() & {"lr", "weight_decay", "momentum", "orientation"} else "same"
    )
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": parameters(), **change})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (0, 4)])
def test_parameters_that_are_no_matrices_are_refused(shape):
    """With the sentence that says what to do."""
    with pytest.raises(ValueError, match="torch.optim.AdamW"):
        ARO([torch.nn.Parameter(torch.ones(shape))], lr=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match="float32 main parameters"):
        ARO([torch.nn.Parameter(torch.ones(2, 2, dtype=dtype))], lr=1e-2)


def test_closure_and_sparse_gradients_are_refused():
    weights = parameters()
    optimizer = ARO(weights, 1e-2)
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: 0.0)
    weights[0].grad = torch.ones(4, 9).to_sparse()
    with pytest.raises(ValueError, match="SparseAdam"):
        optimizer.step()
