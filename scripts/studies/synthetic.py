"""Mean and spread of the alignment score of rotations on a power-law gradient with noise.

    python scripts/studies/synthetic.py

A gradient G = U diag(i^-1) V^T is seen through noise U diag(i^-1/2) Z, Z Gaussian: both have power
laws in one eigenbasis U. The alignment score of a rotation R is the cosine of G and R f(R^T M),
M = G + noise; its mean and standard deviation are over draws of the noise. Rotations: those that
policies choose from M itself (eigen: the eigenvectors of M M^T; aro: QR(M f(R0^T M)^T) from a given
R0), and random ones that know nothing of M, far (uniform) and near (turned away from U a little).
"""

from __future__ import annotations

import time

import torch
from results import COLOURS, arguments, keep
from torch import Tensor

from megatron_aro.config import AROConfig
from megatron_aro.rotation import MatrixBatch, compute_updates, new_fallback_counts
from megatron_aro.rotation.projections import project

M, N = 32, 64
NOISE = 2.0  # its Frobenius norm over the gradient's
PERTURBATION = 0.1  # of the eigenbasis that aro starts from, radians by which each pair is turned
NEAR = (0.01, 0.3)  # the same of the random rotations near U
PROJECTIONS = ("sinkhorn", "sign", "rownorm")


def main() -> None:
    began = time.perf_counter()
    sizes = {"draws": 200, "rotations": 1000, "seed": 0}
    args = arguments("synthetic", __doc__ or "", sizes)
    generator = torch.Generator().manual_seed(args.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def turned(u: Tensor, angles: Tensor) -> Tensor:
        """U turned by random rotations of so many radians a pair, [len(angles), M, M]."""
        x = normal(len(angles), M, M)
        return u @ torch.linalg.matrix_exp(angles[:, None, None] * (x - x.mT) / 2**0.5)

    u, v = torch.linalg.qr(normal(M, M)).Q, torch.linalg.qr(normal(N, M)).Q
    index = torch.arange(1, M + 1, dtype=torch.float64)
    gradient = u * index**-1.0 @ v.mT
    noise = u * index**-0.5 @ normal(args.draws, M, N)
    noise *= NOISE * gradient.norm() / noise.square().sum((1, 2)).mean().sqrt()
    momenta = gradient + noise

    spread = torch.rand(args.rotations, generator=generator, dtype=torch.float64)
    near = NEAR[0] * (NEAR[1] / NEAR[0]) ** spread
    random = {
        "random, far": torch.linalg.qr(normal(args.rotations, M, M)).Q,
        "random, near": turned(u, near),
    }
    starts = {
        "aro from identity": torch.eye(M, dtype=torch.float64),
        "aro from perturbed eigenbasis": turned(u, torch.tensor([PERTURBATION]).double())[0],
    }

    rows = []
    for f in PROJECTIONS:
        config = AROConfig(projection=f, qr="qr")

        def score(r: Tensor, config: AROConfig = config) -> Tensor:
            """[draws], of one rotation [M, M] or of one a draw."""
            one = torch.ones(1, 1, 1, dtype=torch.float64)
            return cosine(r @ project(r.mT @ momenta, config, None, one)[0])

        def cosine(d: Tensor) -> Tensor:
            return (d * gradient).sum((1, 2)) / d.flatten(1).norm(dim=1) / gradient.norm()

        def add(name: str, number: int, scores: Tensor, f: str = f) -> None:
            mean, deviation = scores.mean().item(), scores.std().item()
            rows.append(
                {"f": f, "rotation": name, "number": number, "mean": mean, "std": deviation}
            )

        add("none", 0, score(torch.eye(M, dtype=torch.float64)))
        add("eigen", 0, score(torch.linalg.eigh(momenta @ momenta.mT).eigenvectors))
        add("eigenbasis of G", 0, score(u))
        for name, start in starts.items():
            r = start.repeat(args.draws, 1, 1)
            batch = MatrixBatch(momenta, r, new_fallback_counts(args.draws, "cpu"))
            (update,) = compute_updates([batch], config)
            add(name, 0, cosine(update))
        for name, rotations in random.items():
            for number, r in enumerate(rotations):
                add(name, number, score(r))

    found = summary(rows)
    print(f"{'f':10}{'rotation':32}{'mean':>8}{'std':>9}{'mean / std':>12}")
    for row in found:
        mean, std = row["mean"], row["std"]
        print(f"{row['f']:10}{row['rotation']:32}{mean:8.4f}{std:9.4f}{mean / std:12.1f}")
    config_kept = {
        "m": M, "n": N, "noise": NOISE, "perturbation": PERTURBATION, "near": NEAR,
        "draws": args.draws, "rotations": args.rotations, "seed": args.seed,
    }  # fmt: skip
    keep(args.out, config_kept, found, draw(rows), began)


def summary(rows: list[dict]) -> list[dict]:
    """A row for each f and rotation; of random ones the means, and percentiles 5 and 95."""
    found = []
    for f, name in dict.fromkeys((row["f"], row["rotation"]) for row in rows):
        of = [row for row in rows if (row["f"], row["rotation"]) == (f, name)]
        row = {"f": f, "rotation": name, "number": len(of)}
        for key in ("mean", "std"):
            values = torch.tensor([x[key] for x in of], dtype=torch.float64)
            row[key] = values.mean().item()
            row[f"{key} 5%"], row[f"{key} 95%"] = values.quantile(
                values.new_tensor([0.05, 0.95])
            ).tolist()
        found.append(row)
    return found


def draw(rows: list[dict]):
    """One panel an f: standard deviation over mean, a point a rotation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(PROJECTIONS), figsize=(13, 4.2), layout="constrained")
    styles = {
        "random, far": {"s": 4, "color": "#bbbbbb"},
        "random, near": {"s": 4, "color": "#8fc09a"},
        "none": {"s": 60, "marker": "s", "color": COLOURS["none"]},
        "eigenbasis of G": {"s": 60, "marker": "D", "color": "#3a7d4a"},
        "eigen": {"s": 60, "marker": "^", "color": COLOURS["eigen"]},
        "aro from identity": {"s": 60, "marker": "o", "color": COLOURS["aro"]},
        "aro from perturbed eigenbasis": {"s": 110, "marker": "*", "color": COLOURS["aro"]},
    }
    for axes, f in zip(panels, PROJECTIONS, strict=True):
        for name, style in styles.items():
            of = [row for row in rows if (row["f"], row["rotation"]) == (f, name)]
            xs, ys = [row["mean"] for row in of], [row["std"] for row in of]
            axes.scatter(xs, ys, label=name, linewidths=0, **style)
        axes.set_title(f, loc="left")
        axes.set_xlabel("mean alignment with G")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("standard deviation over draws")
    panels[-1].legend(frameon=False, fontsize=8)
    return figure


if __name__ == "__main__":
    main()
