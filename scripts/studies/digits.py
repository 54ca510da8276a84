"""Alignment scores of rotations while a small network learns scikit-learn's digits.

    python scripts/studies/digits.py

The paper's MNIST-style stability figure (arXiv 2602.09006) on a data set that a package ships: a
perceptron 64-128-64-10, its two hidden matrices stepped by ARO with each rotation, the rest by
AdamW. At each step the alignment score is the cosine of a matrix's update and its gradient over all
training images (`true`), and of the update and the momentum that it was made from (`own`). Each
rotation is measured in its own training, and along one and the same trajectory, AdamW's, where all
of them see the same gradients.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from results import COLOURS, arguments, keep
from sklearn.datasets import load_digits
from torch import Tensor, nn

from megatron_aro import ARO

ROTATIONS = ("none", "polar", "eigen", "aro")
PROJECTIONS = ("sinkhorn", "sign")
LR, BATCH, HELD_OUT = 1e-2, 64, 360
WIDTH = 20  # steps that a spread is taken over
SCORES = ("true", "own", "loss")


def main() -> None:
    began = time.perf_counter()
    args = arguments("digits", __doc__ or "", {"steps": 300, "seeds": 5})
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 8.0 - 1.0, dtype=torch.float32)
    y = torch.tensor(labels)
    rows = []
    for f in PROJECTIONS:
        for seed in range(args.seeds):
            for shared in (False, True):
                for rotation in ROTATIONS:
                    said = {"f": f, "rotation": rotation, "seed": seed, "shared": int(shared)}
                    for row in train(x, y, f, rotation, seed, args.steps, shared):
                        rows.append(said | row)
    config = {
        "lr": LR, "batch": BATCH, "held out": HELD_OUT, "width": WIDTH, "orientation": "min-side",
        "steps": args.steps, "seeds": args.seeds,
    }  # fmt: skip
    summary = summarize(rows, args.steps)
    for number, row in enumerate([{name: name for name in summary[0]}, *summary]):
        cells = enumerate(row.values())
        print("".join(f"{v:12.4f}" if number and i > 2 else f"{v:>12}" for i, v in cells))
    keep(args.out, config, windows(rows, args.steps), draw(rows, args.steps), began)


def train(
    x: Tensor, y: Tensor, f: str, rotation: str, seed: int, steps: int, shared: bool
) -> Iterator[dict[str, float]]:
    """One row a step: both scores (mean of the two matrices) and the batch's loss.

    Args:
        shared: whether AdamW moves the weights, and ARO only says what it would have done.
    """
    torch.manual_seed(seed)
    order = torch.randperm(len(x))
    held_out, training = order[:HELD_OUT], order[HELD_OUT:]
    net = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    hidden = [net[0].weight, net[2].weight]
    rest = [p for p in net.parameters() if all(p is not w for w in hidden)]
    # Of copies where the trajectory is AdamW's.
    stepped = [nn.Parameter(w.detach().clone()) for w in hidden] if shared else hidden
    settings = {"projection": f, "rotation": rotation, "orientation": "min-side"}
    aro = ARO(stepped, LR, weight_decay=0.0, **settings)
    adamw = torch.optim.AdamW([*rest, *(hidden if shared else [])], LR, weight_decay=0.0)
    entropy = nn.functional.cross_entropy
    for step in range(steps):
        for optimizer in (aro, adamw):  # a cosine to 10%, as in the recipes
            rate = 0.55 + 0.45 * torch.cos(torch.tensor(torch.pi * step / steps)).item()
            optimizer.param_groups[0]["lr"] = LR * rate
        true = torch.autograd.grad(entropy(net(x[training]), y[training]), hidden)
        batch = training[torch.randint(len(training), (BATCH,))]
        loss = entropy(net(x[batch]), y[batch])
        net.zero_grad()
        loss.backward()
        before = [w.detach().clone() for w in stepped]
        for w, model in zip(stepped, hidden, strict=True):
            w.grad = model.grad.clone()
        aro.step()
        if shared:
            for w, model in zip(stepped, hidden, strict=True):
                model.grad = w.grad
        adamw.step()
        scores: dict[str, float] = {"true": 0.0, "own": 0.0}
        for w, old, gradient in zip(stepped, before, true, strict=True):
            update = (old - w.detach()).flatten()
            for name, other in (("true", gradient), ("own", aro.state[w]["exp_avg"])):
                scores[name] += torch.cosine_similarity(update, other.flatten(), dim=0).item() / 2
        row = {"step": step, **scores, "loss": loss.item()}
        if step == steps - 1:
            with torch.no_grad():
                row["held out"] = entropy(net(x[held_out]), y[held_out]).item()
        yield row


def spreads(rows: list[dict], name: str, steps: int) -> tuple[Tensor, Tensor]:
    """Mean over seeds and windows of WIDTH steps, and mean standard deviation within a window."""
    values = torch.tensor([row[name] for row in rows]).view(-1, steps // WIDTH, WIDTH)
    return values.mean((0, 2)), values.std(2).mean(0)


def summarize(rows: list[dict], steps: int) -> list[dict]:
    """A row for each f, trajectory and rotation."""
    found = []
    for f in PROJECTIONS:
        for shared in (0, 1):
            for rotation in ROTATIONS:
                of = select(rows, f, rotation, shared)
                row = {"f": f, "trajectory": "AdamW's" if shared else "own", "rotation": rotation}
                for name in ("true", "own"):
                    mean, deviation = spreads(of, name, steps)
                    row |= {
                        f"{name} mean": mean.mean().item(),
                        f"{name} std": deviation.mean().item(),
                    }
                last = torch.tensor([r["loss"] for r in of]).view(-1, steps)[:, -WIDTH:]
                row["train loss"] = last.mean().item()
                row["held out"] = sum(r.get("held out", 0.0) for r in of) / len(last)
                found.append(row)
    return found


def windows(rows: list[dict], steps: int) -> list[dict]:
    """What the figure shows, a row for each f, trajectory, rotation and window."""
    found = []
    for f in PROJECTIONS:
        for shared in (0, 1):
            for rotation in ROTATIONS:
                of = {n: spreads(select(rows, f, rotation, shared), n, steps) for n in SCORES}
                for window in range(steps // WIDTH):
                    row = {"f": f, "trajectory": "AdamW's" if shared else "own"}
                    row |= {"rotation": rotation, "first step": window * WIDTH}
                    for name, (mean, deviation) in of.items():
                        row[f"{name} mean"] = mean[window].item()
                        row[f"{name} std"] = deviation[window].item()
                    found.append(row)
    return found


def select(rows: list[dict], f: str, rotation: str, shared: int) -> list[dict]:
    key = (f, rotation, shared)
    return [row for row in rows if (row["f"], row["rotation"], row["shared"]) == key]


def draw(rows: list[dict], steps: int):
    """Scores over steps with their spread within a window; a row of panels an f."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(
        len(PROJECTIONS), 3, figsize=(13, 3.6 * len(PROJECTIONS)), layout="constrained"
    )
    at = torch.arange(steps // WIDTH) * WIDTH + WIDTH / 2
    for axes, f in zip(panels, PROJECTIONS, strict=True):
        titles = (
            "true, own trajectory",
            "true, AdamW's trajectory",
            "training loss, own trajectory",
        )
        for panel, (shared, name) in enumerate(((0, "true"), (1, "true"), (0, "loss"))):
            for rotation in ROTATIONS:
                mean, deviation = spreads(select(rows, f, rotation, shared), name, steps)
                colour = COLOURS[rotation]
                axes[panel].plot(at, mean, color=colour, label=rotation)
                if name == "true":
                    low, high = mean - deviation, mean + deviation
                    axes[panel].fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
            axes[panel].set_title(f"{f}: {titles[panel]}", loc="left", fontsize=10)
            axes[panel].grid(alpha=0.25)
            axes[panel].spines[["top", "right"]].set_visible(False)
        axes[0].set_ylabel("alignment score")
        axes[2].set_yscale("log")
    for panel in panels[-1]:
        panel.set_xlabel("step")
    panels[0, 0].legend(frameon=False)
    return figure


if __name__ == "__main__":
    main()
