"""Going on with Megatron's own AdamW from ARO's checkpoint, as --aro-init-exp-avg says, only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from aro_runs import ARO as _ARO
from aro_runs import DISTRIBUTED, GATED, MOE, train_frozen
from logical_state import logical, train_watched
from pool import Pool
from runs import TINY

SHORT = ["--train-iters", "6"]
ARO = [*_ARO, *SHORT]
ADAM = [*TINY, "--optimizer", "adam", *SHORT]
MOMENTUM = ["--aro-init-exp-avg", "momentum"]
ZERO = ["--aro-init-exp-avg", "zero"]
TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
PP2 = ["--pipeline-model-parallel-size", "2"]
EP2 = ["--expert-model-parallel-size", "2"]
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "3000"]
RESHARDABLE = ["--dist-ckpt-optim-fully-reshardable"]
BF16 = ["--bf16"]
STEPS = 3  # before the change

State = dict[str, torch.Tensor]


def save(pool: Pool, folder: Path, ranks: int, argv: list[str]) -> tuple[State, list[float]]:
    """Train six steps, save after three: the logical state then, and the losses after it."""
    keep = ["--save", str(folder), "--save-interval", str(STEPS)]
    results = pool.run(ranks, train_watched, [*argv, *keep], iteration=STEPS)
    assert results[0].exit_status == 0
    (folder / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
    losses = next(rank.losses for rank in results if rank.losses)
    return logical([rank.inspected for rank in results]), losses[STEPS:]


def go_on(
    pool: Pool, folder: Path, ranks: int, argv: list[str], iteration: int = 0
) -> tuple[State, list[float]]:
    """The logical state after so many steps of AdamW, and all its losses."""
    argv = [*argv, "--load", str(folder)]
    results = pool.run(ranks, train_watched, argv, iteration=iteration)
    assert results[0].exit_status == 0
    losses = next(rank.losses for rank in results if rank.losses)
    return logical([rank.inspected for rank in results]), losses


def expected_moment(name: str, momentum: torch.Tensor) -> torch.Tensor:
    """What docs/checkpoints.md says, of a whole parameter in float64; experts are apart here."""
    squares = momentum.double().square()
    rows, columns = squares.mean(1, keepdim=True), squares.mean(0, keepdim=True)
    beta, beta2 = 0.95, 0.999  # ARO's momentum, Megatron's --adam-beta2
    averaged = (1 - beta) / (1 + beta) * (1 - beta ** (2 * STEPS))
    return rows * columns / squares.mean() / averaged * (1 - beta2**STEPS)


Layout = tuple[int, list[str]]
# (model, layout that saves, layouts that go on).
MATRIX: dict[str, tuple[list[str], Layout, dict[str, Layout]]] = {
    "distributed, DP 2": (
        GATED,
        (2, [*DISTRIBUTED, *RESHARDABLE]),
        {
            "TP 2 replicated": (2, TP2),
            "DP 2, small buckets": (2, [*DISTRIBUTED, *OVERLAP]),
        },
    ),
    "bf16, distributed, DP 2": (
        [*GATED, *BF16],
        (2, [*DISTRIBUTED, *RESHARDABLE]),
        {"one process": (1, []), "TP 2": (2, [*TP2, *DISTRIBUTED])},
    ),
    "bf16, TP 2 replicated": (
        [*GATED, *BF16],
        (2, TP2),
        {"DP 2 replicated": (2, []), "PP 2, distributed": (2, [*PP2, *DISTRIBUTED])},
    ),
    "experts, DP 2": (
        MOE,
        (2, []),
        {
            "EP 2 distributed": (2, [*EP2, *DISTRIBUTED]),
            "EP 2 x expert TP 2": (4, [*EP2, *TP2]),
        },
    ),
}


@pytest.mark.parametrize(("model", "saves", "goes_on"), MATRIX.values(), ids=MATRIX.keys())
def test_state_arrives_in_any_layout(
    pool: Pool, tmp_path: Path, model: list[str], saves: Layout, goes_on: dict[str, Layout]
) -> None:
    """Weights, momenta and AdamW's moments bit for bit; new second moments by their definition.

    The last to a few roundings of float32, since sums of the squares go over ranks.
    """
    ranks, flags = saves
    saved, losses = save(pool, tmp_path, ranks, [*ARO, *model, *flags])
    matrices = {name[:-8] for name in saved if name.endswith(".exp_avg")}
    matrices -= {name[:-11] for name in saved if name.endswith(".exp_avg_sq")}
    assert len(matrices) == (2 * (2 + 1 + 4 * 2) if model is MOE else 2 * 4)
    for name, (ranks, flags) in goes_on.items():
        state, after = go_on(pool, tmp_path, ranks, [*ADAM, *model, *flags, *MOMENTUM])
        made = {f"{matrix}.exp_avg_sq" for matrix in matrices}
        counts = {f"{matrix}.step" for matrix in matrices}
        ours = ("rotation.", "fallbacks.")
        assert state.keys() == {n for n in saved if not n.startswith(ours)} | made | counts, name
        for key, tensor in state.items():
            if key in made:
                momentum = saved[key.replace(".exp_avg_sq", ".exp_avg")]
                assert momentum.any()
                wanted = expected_moment(key, momentum).float()
                assert torch.allclose(tensor, wanted, rtol=1e-5, atol=0), (name, key)
            elif key in counts:
                assert tensor == STEPS, (name, key)
            else:
                assert torch.equal(tensor, saved[key]), (name, key)
        # The first loss is the same weights'; AdamW then trains on.
        assert after[0] == pytest.approx(losses[0], abs=2e-3), name
        assert len(after) == 3 and after[2] < after[0] + 0.02, name


def test_updates_after_the_change_have_adamws_size(pool: Pool, tmp_path: Path) -> None:
    """Root mean squares of 0.2 to 1, as AdamW's are, where zero second moments would give 3.

    From a zero momentum the first is smaller: a tenth of the gradient is all there is.
    """
    lr = 1e-3
    flags = ["--lr-decay-style", "constant", "--lr-warmup-iters", "0", "--weight-decay", "0"]
    flags += [*GATED, "--lr", str(lr), "--min-lr", str(lr)]
    saved, losses = save(pool, tmp_path, 1, [*ARO, *flags])
    for start, least, most in ((MOMENTUM, 0.2, 1.0), (ZERO, 0.05, 1.0)):
        begun, _ = go_on(pool, tmp_path, 1, [*ADAM, *flags, *start])
        stepped, after = go_on(pool, tmp_path, 1, [*ADAM, *flags, *start], iteration=1)
        for layer in range(2):
            for matrix in ("self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2"):
                name = f"decoder.layers.{layer}.{matrix}.weight"
                assert f"{name}.exp_avg_sq" not in saved  # ARO's
                assert torch.equal(begun[f"{name}.param"], saved[f"{name}.param"])
                assert begun[f"{name}.exp_avg"].any() == (start == MOMENTUM)
                update = (begun[f"{name}.param"] - stepped[f"{name}.param"]) / lr
                rms = float(update.square().mean().sqrt())
                assert least < rms < most, (start, name, rms)
        word = "embedding.word_embeddings.weight.exp_avg"
        assert torch.equal(begun[word], saved[word]) and saved[word].any()
        assert after == pytest.approx(losses, abs=0.05)  # ARO's own


def test_what_cannot_be_taken_over_is_refused(pool: Pool, tmp_path: Path) -> None:
    """One sentence each, with the flag that helps, before any weight changes."""
    argv = [*ARO, *GATED]
    pieces, whole, torch_ = (tmp_path / name for name in ("pieces", "whole", "torch"))
    save(pool, pieces, 2, [*argv, *DISTRIBUTED])
    save(pool, whole, 1, argv)
    save(pool, torch_, 1, [*argv, "--ckpt-format", "torch"])
    everything = tmp_path / "everything"
    save(pool, everything, 1, [*argv, "--aro-mode", "full-model"])
    frozen = ["--save", str(tmp_path / "frozen"), "--save-interval", "3"]
    pool.run(1, train_frozen, [*argv, "--train-iters", "3", *frozen], "linear_fc1")
    adam = [*ADAM, *GATED]
    sgd = ["sgd" if flag == "adam" else flag for flag in adam]
    muon = ["muon" if flag == "adam" else flag for flag in adam]
    for folder, ranks, flags, said in (
        (whole, 1, adam, "--aro-init-exp-avg momentum (or zero), or take its weights alone with"),
        (whole, 1, [*sgd, *MOMENTUM], "go on with its optimizer or with AdamW, or take its weight"),
        (whole, 1, [*muon, *MOMENTUM], "go on with its optimizer or with AdamW, or take its weigh"),
        (whole, 1, [*adam, *MOMENTUM, "--fp16"], "--aro-init-exp-avg does not work with --fp16"),
        (whole, 1, [*adam, *MOMENTUM, "--no-save-optim"], "has --no-save-optim, with which"),
        (whole, 1, [*adam, *MOMENTUM, *BF16], "The checkpoint's run had --bf16 off"),
        (
            tmp_path / "frozen",
            1,
            [*adam, *MOMENTUM],
            "has no exp_avg of decoder.layers.mlp.linear_f",
        ),
        (everything, 1, [*adam, *MOMENTUM], "does not take checkpoints of --aro-mode full-model"),
        (pieces, 2, [*adam, *MOMENTUM, *DISTRIBUTED], "--dist-ckpt-optim-fully-reshardable"),
        (torch_, 1, [*adam, *MOMENTUM, "--ckpt-format", "torch"], "of format torch take the weig"),
    ):
        refused = pool.train(ranks, [*flags, "--load", str(folder)])[0]
        assert refused.exit_status == 2 and not refused.losses
        assert said in refused.stderr, (said, refused.stderr[-500:])
        assert "--no-load-optim" in refused.stderr
    weights = ["--load", str(pieces), "--no-load-optim"]
    assert len(pool.train(2, [*adam, *DISTRIBUTED, *weights])[0].losses) == 3


def test_adamws_own_checkpoints_load_as_always(pool: Pool, tmp_path: Path) -> None:
    """To the bit, with the flag that a job which restarts still has, and without."""
    straight = pool.train(1, [*ADAM, *GATED, "--save", str(tmp_path), "--save-interval", "3"])[0]
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    for flags in ([], MOMENTUM, ZERO):
        resumed = pool.train(1, [*ADAM, *GATED, *flags, "--load", str(tmp_path)])[0]
        assert resumed.losses == straight.losses[3:]
        assert "ARO" not in resumed.stdout
        for name, weight in straight.weights.items():
            assert torch.equal(resumed.weights[name], weight)


def test_a_run_that_has_changed_goes_on_from_its_own_checkpoints(
    pool: Pool, tmp_path: Path
) -> None:
    """ARO's, then AdamW's, saved and resumed with one command line: bit for bit."""
    save(pool, tmp_path, 1, [*ARO, *GATED])
    argv = [*ADAM, *GATED, *MOMENTUM, "--load", str(tmp_path)]
    straight = pool.train(1, [*argv, "--save", str(tmp_path), "--save-interval", "1"])[0]
    assert straight.exit_status == 0 and len(straight.losses) == 3
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    resumed = pool.train(1, argv)[0]
    assert resumed.losses == straight.losses[1:]
    for name, weight in straight.weights.items():
        assert torch.equal(resumed.weights[name], weight)


def test_mean_squares_of_gradients_follow_from_a_momentums() -> None:
    """Rows and columns of any size, gradients without a mean: the estimate is theirs.

    Each of 256 x 512 elements is within a factor of 2 of its second moment: the weighted means of
    512 squares in a row and 256 in a column have standard deviations of 8% and 11%.
    """
    from megatron_aro.megatron.to_adam import gradients_to_momenta, second_moments

    generator = torch.Generator().manual_seed(1)
    rows = torch.logspace(-0.5, 0, 256, dtype=torch.float64)[:, None]
    columns = torch.logspace(0, -0.5, 512, dtype=torch.float64)
    for beta, steps in ((0.95, 3), (0.95, 80), (0.9, 20)):
        momentum = torch.zeros(256, 512)
        for _ in range(steps):
            noise = torch.randn(256, 512, generator=generator)
            momentum = beta * momentum + (1 - beta) * (noise * rows * columns).float()
        scale = gradients_to_momenta(beta, steps)
        cpu = torch.device("cpu")
        (made,) = second_moments([momentum], scale, [None], None, cpu)
        ratio = made.double() / (rows * columns).square()
        assert 0.9 < ratio.mean() < 1.1 and ratio.min() > 0.5 and ratio.max() < 2
    nothing = torch.zeros(2, 4, 4)  # an expert that saw no token, beside one that did
    nothing[1] = torch.randn(4, 4, generator=generator)
    (made,) = second_moments([nothing], 1.0, [None], None, cpu)
    assert not made[0].any() and (made[1] > 0).all()
