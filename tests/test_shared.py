"""Stacks of one matrix are that matrix: sharing with nobody is not sharing."""

from __future__ import annotations

import pytest
import torch

from megatron_aro.config import AROConfig
from megatron_aro.rotation import (
    MatrixBatch,
    advance_momentum,
    compute_updates,
    initial_rotation,
    new_fallback_counts,
)
from megatron_aro.runtime.sharing import Sharing
from megatron_aro.sharding.groups import Member, plan_groups

SHAPES = {"wide": (12, 40), "another": (12, 40), "square": (12, 12), "thin": (12, 5)}
WIDE = {"wide": (12, 40), "another": (12, 40), "wider": (12, 90)}


@pytest.mark.parametrize(
    ("projection", "shapes"), [("sinkhorn", SHAPES), ("rownorm", SHAPES), ("adam", WIDE)]
)
def test_a_group_of_one_steps_as_a_matrix_of_its_own(projection: str, shapes: dict) -> None:
    """Updates, rotations and moments over four steps; float32 sums in another order, 1e-5.

    Gaussian gradients: momenta are far from singular, square ones less so (1e-3). Adam's first
    step is one of signs, of which those that are not wide make singular matrices.
    """
    aro = AROConfig(sharing="global", projection=projection)
    members = [Member(name, f"{name}.w", shape, 0) for name, shape in shapes.items()]
    plan = plan_groups(members, [0.0], lambda m, k: 1.0)
    sharing = Sharing(plan, 0, None, torch.device("cpu"), aro)
    momenta = {f"{name}.w": torch.zeros(shape) for name, shape in shapes.items()}
    moments = {name: sharing.second_moment(name) for name in momenta}
    batches = {}
    for name, momentum in momenta.items():
        m, n = momentum.shape
        batches[name] = MatrixBatch(
            momentum[None],
            initial_rotation(1, m, n, dtype=torch.float32, device="cpu"),
            new_fallback_counts(1, "cpu"),
            torch.zeros(1, min(m, n), n) if projection == "adam" else None,
        )
    generator = torch.Generator().manual_seed(7)
    for _ in range(4):
        for momentum in momenta.values():
            advance_momentum([momentum], [torch.randn(momentum.shape, generator=generator)], 0.9)
        sharing.rotate(momenta, moments)
        ours = sharing.updates()
        for name, batch in batches.items():
            ((theirs,),) = compute_updates([batch], aro)
            assert theirs.square().mean().sqrt() == pytest.approx(0.2)

            close = 1e-3 if name == "square.w" else 1e-5
            assert (ours[name] - theirs).abs().max() < close, name
            rotation = sharing.state()[f"rotation.{name.removesuffix('.w')}"]
            assert (rotation - batch.rotation[0]).abs().max() < 2 * close, name
            if projection == "adam":
                assert torch.allclose(moments[name], batch.second_moment[0], rtol=1e-3, atol=1e-6)
    for name, batch in batches.items():
        counts = sharing.state()[f"fallbacks.{name.removesuffix('.w')}"]
        assert counts.tolist() == batch.fallbacks[0].tolist() and counts[0] == 4
        assert not torch.equal(batch.rotation[0], torch.eye(*batch.rotation[0].shape))
