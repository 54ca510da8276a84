"""Losses of every layout against one process, from one checkpoint of weights."""

from __future__ import annotations

import pytest
from aro_runs import ARO, DISTRIBUTED, GATED, MOE
from pool import Pool

# What reassociation alone does. Gradients are summed in another order, 1e-7 of them; where a
# momentum is nearly singular, as those of the small square weights are, that decides a direction
# of an update that is of full size in all directions. One process that sums the batch in another
# order differs from itself by up to 8e-5 in eight steps (AdamW by 5e-7), layouts were seen to
# differ by up to 2e-4, and the loss falls by 0.5. `test_aro_training.py` compares to the bit.
TOLERANCE = 5e-4
STEPS = ["--micro-batch-size", "1", "--train-iters", "6"]
MODELS = {"dense": ["--num-layers", "4", *GATED], "moe": MOE}
FROM_CHECKPOINT = ["--finetune", "--no-load-optim", "--no-load-rng"]

TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
TP4 = ["--tensor-model-parallel-size", "4", "--sequence-parallel"]
PP2 = ["--pipeline-model-parallel-size", "2"]
CP2 = ["--context-parallel-size", "2"]
EP2 = ["--expert-model-parallel-size", "2"]
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "3000"]
SIX = ["--global-batch-size", "6"]
# (model, ranks, flags); a batch of six has its own run of one process.
LAYOUTS = {
    "DP 4": ("dense", 4, DISTRIBUTED),
    "DP 4 replicated": ("dense", 4, []),
    "DP 3": ("dense", 3, [*SIX, *DISTRIBUTED]),
    "TP 2 x DP 2": ("dense", 4, [*TP2, *DISTRIBUTED]),
    "TP 4": ("dense", 4, [*TP4, *DISTRIBUTED]),
    "PP 2 x DP 2": ("dense", 4, [*PP2, *DISTRIBUTED]),
    "PP 2, virtual": ("dense", 2, [*PP2, "--num-layers-per-virtual-pipeline-stage", "1"]),
    "CP 2 x DP 2": ("dense", 4, [*CP2, *DISTRIBUTED]),
    "DP 4, overlap, small buckets": ("dense", 4, [*DISTRIBUTED, *OVERLAP]),
    "EP 2 x DP 2": ("moe", 4, [*EP2, *DISTRIBUTED]),
    "EP 2, expert TP 2": ("moe", 4, [*TP2, *EP2, *DISTRIBUTED]),
}


@pytest.fixture(scope="module")
def loads(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Flags that start a model from its checkpoint, which one process saved."""
    flags = {}
    for name, model in MODELS.items():
        folder = tmp_path_factory.mktemp(name)
        save = ["--save", str(folder), "--save-interval", "1", "--train-iters", "1"]
        assert pool.train(1, [*ARO, *model, *save, "--lr-warmup-iters", "0"])[0].exit_status == 0
        flags[name] = [*ARO, *model, *STEPS, "--load", str(folder), *FROM_CHECKPOINT]
    return flags


@pytest.fixture(scope="module")
def one_process(pool: Pool, loads: dict[str, list[str]]) -> dict[tuple[str, bool], list[float]]:
    """Losses by model and whether the batch is six."""
    runs = {(name, False): argv for name, argv in loads.items()}
    runs["dense", True] = [*loads["dense"], *SIX]
    return {key: pool.train(1, argv)[0].losses for key, argv in runs.items()}


@pytest.mark.parametrize(("model", "ranks", "flags"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_losses_are_those_of_one_process(
    pool: Pool,
    loads: dict[str, list[str]],
    one_process: dict[tuple[str, bool], list[float]],
    model: str,
    ranks: int,
    flags: list[str],
) -> None:
    """Within `TOLERANCE`; the first two losses, before any update, to float32's rounding."""
    losses = pool.train(ranks, [*loads[model], *flags])[0].losses
    expected = one_process[model, flags[:2] == SIX]
    assert len(losses) == len(expected) == 6
    assert losses[:2] == pytest.approx(expected[:2], abs=2e-6)
    assert losses == pytest.approx(expected, abs=TOLERANCE)
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("micro_batch", ["2", "8"])
def test_one_process_differs_as_much_from_itself(
    pool: Pool,
    loads: dict[str, list[str]],
    one_process: dict[tuple[str, bool], list[float]],
    model: str,
    micro_batch: str,
) -> None:
    """The control of `TOLERANCE`: sums over the batch in another order, and nothing else."""
    (result,) = pool.train(1, [*loads[model], "--micro-batch-size", micro_batch])
    differences = [
        abs(a - b) for a, b in zip(result.losses, one_process[model, False], strict=True)
    ]
    assert max(differences[:2]) <= 2e-6
    assert 1e-5 < max(differences) < TOLERANCE
