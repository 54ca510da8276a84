"""Time ARO against Muon on this machine: its step of matrices, or whole iterations of a training.

Steps are timed in one process, the variants in turns, and the medians are compared: figures of
different runs or cards say nothing about each other. Times are of the device: each variant is a
CUDA graph, so that what the host takes to launch it is left out. Beside it stands the time from
call to end on this host, whose wait for the device is in it.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from megatron_aro.cli import iterations
from megatron_aro.config import AROConfig, Precision
from megatron_aro.rotation import (
    FALLBACK_RUNGS,
    MatrixBatch,
    attempt_rotation,
    compute_updates,
    finish_update,
    initial_rotation,
)
from megatron_aro.version import __version__

# (number of matrices, rows, columns), oriented; the matrices that one rank owns.
ROWS: dict[str, list[tuple[int, int, int]]] = {
    "1 x 4096x12288": [(1, 4096, 12288)],
    "3 x 4096x12288": [(3, 4096, 12288)],
    "1 x 4096x2560": [(1, 4096, 2560)],
    "4 x 4096x2560": [(4, 4096, 2560)],
    "1 x 4096x7680": [(1, 4096, 7680)],
    "1 x 4096x24576": [(1, 4096, 24576)],
    "64 x 1024x512": [(64, 1024, 512)],
    "1024 x 1024x512": [(1024, 1024, 512)],
    "16 x 2048x6144, 2048x2048": [(16, 2048, 6144), (16, 2048, 2048)],
    "GPT-2 124M": [(48, 768, 768), (24, 768, 3072)],
}
STEPS = 5  # of Newton-Schulz, Muon's default


@dataclass
class Figures:
    """One row of the table. Times in ms; errors are the largest over the kinds of momenta."""

    row: str
    device: dict[str, float]
    """"muon", the faster of a call for each matrix and one for the batch, "scqr2" and "scqr"."""
    called: dict[str, float]
    """The same with the launches of this host."""
    floor: float
    """Arithmetic at the rate of a float16 product, plus bytes at copy speed, both measured."""
    workspace_mib: int
    syncs: int
    angle: float
    """1 - cos to float64 with Householder QR."""
    orthonormality: float
    fallbacks: dict[str, int]
    ill_conditioned: float
    """As `called` of scqr2, on momenta of condition 1e6, with the ladder."""
    ill_fallbacks: dict[str, int]
    """Of one step there."""


def momenta(b: int, m: int, n: int, kind: str, seed: int) -> Tensor:
    """[b, m, n] on the GPU: "random", or singular values "i^-0.5" or "i^-1", "+noise" for 30%, or
    from 1 to 1e-6, "condition 1e6"."""
    generator = torch.Generator("cuda").manual_seed(seed)
    noise = torch.randn(b, m, n, device="cuda", generator=generator)
    if kind == "random":
        return noise
    k = min(m, n)
    if kind == "condition 1e6":
        values = torch.logspace(0, -6, k, device="cuda")
    else:
        values = torch.arange(1, k + 1, device="cuda") ** float(kind.removesuffix("+noise")[2:])
    left = torch.linalg.qr(torch.randn(b, m, k, device="cuda", generator=generator)).Q
    right = torch.linalg.qr(torch.randn(b, n, k, device="cuda", generator=generator)).Q
    x = (left * values) @ right.mT
    if kind.endswith("+noise"):
        size = 0.3 * torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
        x += noise * (size / math.sqrt(m * n))
    return x


def batch_of(momentum: Tensor, rotation: Tensor | None = None) -> MatrixBatch:
    b, m, n = momentum.shape
    if rotation is None:
        rotation = initial_rotation(b, m, n, dtype=momentum.dtype, device=momentum.device)
    counts = torch.zeros(b, len(FALLBACK_RUNGS), dtype=torch.int64, device=momentum.device)
    return MatrixBatch(momentum, rotation, counts)


def muon(groups: list[Tensor], batched: bool) -> None:
    """Newton-Schulz as Megatron's Muon runs it by default, bfloat16."""
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        for group in groups:
            for x in [group] if batched else group:
                newton_schulz(x, STEPS)
    finally:
        torch.set_float32_matmul_precision(before)


def graphs(variants: dict[str, Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
    """Replays of the variants as CUDA graphs, which take turns with one pool of memory."""
    replays: dict[str, Callable[[], Any]] = {}
    pool = torch.cuda.graph_pool_handle()
    for name, run in variants.items():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            run()
        replays[name] = graph.replay
    return replays


def milliseconds(variants: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Medians of device time, the variants in turns."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(repeats + 2):
        for name, run in variants.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            if repeat >= 2:  # before, kernels are compiled and memory is found
                times[name].append(start.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}


def ceilings() -> tuple[float, float]:
    """Operations per second of a float16 product, and bytes per second of a copy."""
    a = torch.randn(8192, 8192, device="cuda").half()
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    time = milliseconds({"product": lambda: a @ a, "copy": lambda: target.copy_(source)}, 10)
    return 2 * 8192**3 / time["product"] * 1e3, 2 * 2**30 / time["copy"] * 1e3


def floor(shapes: list[tuple[int, int, int]], rate: float, bandwidth: float) -> float:
    """Milliseconds of the least work: four products with M or f, three with R, one Cholesky; M
    read twice, X written once and read by five iterations and a product, twice, U written."""
    total = 0.0
    for b, m, n in shapes:
        k = min(m, n)
        operations = 8 * m * k * n + 6 * m * k * k + k**3
        total += b * (operations / rate + 4 * (3 * m * n + 14 * k * n + 8 * m * k) / bandwidth)
    return 1e3 * total


def syncs(run: Callable[[], Any]) -> int:
    """How often the host waits for the device."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(w.message) for w in caught)


def errors(shape: tuple[int, int, int], kind: str, config: AROConfig) -> tuple[float, float]:
    """1 - cos of a step to float64 with Householder QR, and |Q^T Q - I|, in a frame that two
    earlier steps made; of two matrices at most."""
    b, m, n = shape
    b = min(b, 2)
    batch = batch_of(momenta(b, m, n, kind, 0))
    for seed in 1, 2:
        compute_updates([batch], config)
        noise = momenta(b, m, n, "random", seed)
        noise *= 0.02 * torch.linalg.vector_norm(batch.momentum) / torch.linalg.vector_norm(noise)
        batch.momentum = batch.momentum + noise
    exact = batch_of(batch.momentum.double(), batch.rotation.double())
    (update,) = compute_updates([batch], config)
    (expected,) = compute_updates([exact], AROConfig(qr="qr"))
    r = batch.rotation.double()
    eye = torch.eye(r.shape[2], dtype=r.dtype, device=r.device)
    cosine = torch.cosine_similarity(update.double().flatten(1), expected.flatten(1))
    return (1 - cosine).max().item(), (r.mT @ r - eye).abs().max().item()


def measure(row: str, precision: Precision, repeats: int, ceiling: tuple[float, float]) -> Figures:
    """Speed on random momenta in the frame of the identity, accuracy on the graded ones."""
    shapes = ROWS[row]
    configs = {qr: AROConfig(qr=qr, precision=precision) for qr in ("scqr2", "scqr")}
    figures = _speed(row, configs, repeats, floor(shapes, *ceiling))
    for shape in shapes:
        for kind in "i^-0.5", "i^-0.5+noise", "i^-1", "i^-1+noise":
            angle, error = errors(shape, kind, configs["scqr2"])
            figures.angle = max(figures.angle, angle)
            figures.orthonormality = max(figures.orthonormality, error)
    return figures


def _speed(row: str, configs: dict[str, AROConfig], repeats: int, least: float) -> Figures:
    batches = [batch_of(momenta(*shape, "random", 0)) for shape in ROWS[row]]
    groups = [batch.momentum for batch in batches]
    variants: dict[str, Callable[[], Any]] = {
        qr: partial(compute_updates, batches, config) for qr, config in configs.items()
    }
    variants["muon, batched"] = partial(muon, groups, batched=True)
    if max(map(len, groups)) <= 64:
        variants["muon, each"] = partial(muon, groups, batched=False)
    hard = [_ill_conditioned(*shape) for shape in ROWS[row]]
    on_hard = partial(compute_updates, hard, configs["scqr2"])
    time = milliseconds(variants | {"hard": on_hard}, repeats)
    called = _fastest(time)
    on_device = {qr: partial(_launch, batches, config) for qr, config in configs.items()}
    device = _fastest(milliseconds(graphs(variants | on_device), repeats))
    for batch in (*batches, *hard):
        batch.fallbacks.zero_()
    on_hard()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    variants["scqr2"]()
    workspace = torch.cuda.max_memory_allocated() - before
    return Figures(
        row=row,
        device=device,
        called=called,
        floor=least,
        workspace_mib=workspace >> 20,
        syncs=syncs(variants["scqr2"]),
        angle=0.0,
        orthonormality=0.0,
        fallbacks=_counts(batches),
        ill_conditioned=time["hard"],
        ill_fallbacks=_counts(hard),
    )


def _ill_conditioned(b: int, m: int, n: int) -> MatrixBatch:
    """Four different ones, again and again: making them takes long."""
    few = momenta(min(b, 4), m, n, "condition 1e6", 0)
    return batch_of(few.repeat(-(-b // len(few)), 1, 1)[:b])


def _counts(batches: list[MatrixBatch]) -> dict[str, int]:
    counts = torch.stack([batch.fallbacks.sum(dim=0) for batch in batches]).sum(dim=0).tolist()
    return dict(zip(FALLBACK_RUNGS, counts, strict=True))


def _launch(batches: list[MatrixBatch], config: AROConfig) -> None:
    """`compute_updates` as far as the device sees it, where nothing climbs the ladder."""
    for batch, attempt in [(batch, attempt_rotation(batch, config)) for batch in batches]:
        finish_update(batch, attempt, config)


def _fastest(time: dict[str, float]) -> dict[str, float]:
    muon = min(ms for name, ms in time.items() if name.startswith("muon"))
    return {"muon": muon, "scqr2": time["scqr2"], "scqr": time["scqr"]}


def table(figures: list[Figures]) -> str:
    """The figures as Markdown."""
    lines = [
        "| matrices | Muon, ms | scqr2, ms | / Muon | scqr, ms | / Muon | called: Muon, scqr2 | "
        "floor / scqr2 | workspace, MiB | syncs | 1 - cos | Q^T Q - I | fall-backs | "
        "condition 1e6: ms, fall-backs |",
        "|---|" + "---|" * 13,
    ]
    for f in figures:
        muon, two, one = f.device["muon"], f.device["scqr2"], f.device["scqr"]
        taken, ill = (
            sum(of.values()) - of[FALLBACK_RUNGS[0]] for of in (f.fallbacks, f.ill_fallbacks)
        )
        lines.append(
            f"| {f.row} | {muon:.2f} | {two:.2f} | {two / muon:.2f} | {one:.2f} | "
            f"{one / muon:.2f} | {f.called['muon']:.2f}, {f.called['scqr2']:.2f} | "
            f"{f.floor / two:.0%} | {f.workspace_mib:,} | {f.syncs} | "
            f"{f.angle:.0e} | {f.orthonormality:.0e} | {taken} | "
            f"{f.ill_conditioned:.2f}, {ill} |"
        )
    return "\n".join(lines)


def compare(paths: list[Path]) -> str:
    """Two tables of one card, one after the other.

    Raises:
        ValueError: the files are of different cards, or numbers of them.
    """
    reports = [json.loads(path.read_text()) for path in paths]
    cards = sorted({f"{report['gpus']} x {report['card']}" for report in reports})
    if len(cards) > 1:
        raise ValueError(f"figures of different cards cannot be compared: {' and '.join(cards)}.")
    return "\n\n".join(
        f"{path}, {report['date']}\n\n{_table_of(report)}"
        for path, report in zip(paths, reports, strict=True)
    )


def _table_of(report: dict[str, Any]) -> str:
    if "flags" in report:
        return iterations.table([iterations.Iterations(**row) for row in report["rows"]])
    return table([Figures(**row) for row in report["rows"]])


def run(args: argparse.Namespace) -> None:
    if args.compare:
        print(compare(args.compare))
        return
    if args.iteration:
        report = _describe(args, args.gpus)
        aro = ["--aro-precision", args.precision]
        rows = iterations.measure(args.flags, args.gpus, args.repeats, args.rounds, aro)
        _publish(report | {"flags": args.flags}, iterations.table(rows), rows, args.json)
        return
    if args.flags:
        raise ValueError("Megatron's flags are for --iteration.")
    if not torch.cuda.is_available():
        raise ValueError("bench measures a GPU, and there is none: run it on the training machine.")
    unknown = [row for row in args.rows if row not in ROWS]
    if unknown:
        raise ValueError(f"--rows {unknown[0]!r} is unknown: choose from {', '.join(ROWS)}.")
    ceiling = ceilings()
    figures = []
    for row in args.rows:
        figures.append(measure(row, args.precision, args.repeats, ceiling))
        torch.cuda.empty_cache()
        print(table(figures).splitlines()[-1], flush=True)
    report = _describe(args, 1)
    report |= {"product_tflops": ceiling[0] / 1e12, "copy_tbs": ceiling[1] / 1e12}
    _publish(report, table(figures), figures, args.json)


def _describe(args: argparse.Namespace, gpus: int) -> dict[str, Any]:
    return {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
        "gpus": gpus,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": {
            "megatron-aro": __version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            **{x: _installed(x) for x in ("triton", "megatron-core", "emerging-optimizers")},
        },
        "precision": args.precision,
    }


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _publish(report: dict[str, Any], text: str, rows: list[Any], path: Path | None) -> None:
    print(f"\n{report['gpus']} x {report['card']}, precision {report['precision']}\n\n{text}")
    if path:
        report["rows"] = [asdict(row) for row in rows]
        path.write_text(json.dumps(report, indent=1) + "\n")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="time steps, or whole iterations, against Muon's on this machine",
        description=__doc__.split("\n")[0],
    )
    parser.add_argument(
        "--iteration",
        action="store_true",
        help="train with AdamW, Muon and ARO in turns, with Megatron's flags from after --",
    )
    parser.add_argument("--gpus", type=int, default=1, help="for --iteration: how many")
    parser.add_argument(
        "--rounds", type=int, default=2, help="for --iteration: how often each has its turn"
    )
    parser.add_argument("--rows", nargs="+", default=list(ROWS), help="rows of the table")
    parser.add_argument("--precision", choices=get_args(Precision), default=AROConfig().precision)
    parser.add_argument("--repeats", type=int, default=10, help="timed runs or iterations")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument(
        "--compare", nargs=2, type=Path, metavar="JSON", help="print two earlier files of one card"
    )
    parser.add_argument("flags", nargs="*", metavar="-- FLAG", help="for --iteration: Megatron's")
    parser.set_defaults(run=run)
