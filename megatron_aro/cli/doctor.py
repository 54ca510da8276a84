"""Check this machine: versions, GPUs, their linear algebra and collectives, and ARO itself.

Takes half a minute and starts no processes. A note is something missing that some runs need, or a
version that is not tested; the exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from megatron_aro.version import TESTED, __version__

# Package -> what a machine without it cannot do.
_REQUIRED = ("numpy", "psutil", "pyyaml")
_OPTIONAL = {
    "triton": "no fused kernels",
    "emerging-optimizers": "no --optimizer muon",
    "megatron-bridge": "no recipes of Megatron-Bridge",
    "tensorboard": "no --tensorboard-dir",
    "matplotlib": "no figures of compare and the quickstart",
}
_GPU_PACKAGES = {
    "transformer_engine.pytorch": "add configs/local.yaml (--transformer-impl local)",
    "apex": "add --no-gradient-accumulation-fusion unless transformer-engine is there",
}
_SELF_TEST_SECONDS = 10.0


class Check(NamedTuple):
    """Status is ok, note or failed."""

    name: str
    status: str
    detail: str


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add `doctor` to the subcommands of an argparse parser."""
    parser = commands.add_parser(
        "doctor",
        help="check this machine",
        description=" ".join(__doc__.split("\n\n")[0].split()),
        epilog=" ".join(__doc__.split("\n\n")[1].split()),
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print every check; returns 1 if one failed, else 0."""
    checks = []
    for check in _all_checks():
        checks.append(check)
        if not args.json:
            print(f"{check.status:7} {check.name:22} {check.detail}", flush=True)
    failed = [check.name for check in checks if check.status == "failed"]
    if args.json:
        results = [check._asdict() for check in checks]
        print(json.dumps({"ok": not failed, "checks": results}, indent=2))
    else:
        print(f"\nFailed: {', '.join(failed)}" if failed else "\nReady.")
    return 1 if failed else 0


def _all_checks() -> Iterator[Check]:
    yield Check("megatron-aro", "ok", f"{__version__}, Python {platform.python_version()}")
    yield _caught("torch", _torch)
    yield _caught("megatron-core", _megatron)
    yield from (_package(name, "") for name in _REQUIRED)
    yield from (_package(name, without) for name, without in _OPTIONAL.items())
    try:
        import torch
    except ImportError:
        return
    if torch.cuda.is_available():
        yield from (_module(name, instead) for name, instead in _GPU_PACKAGES.items())
        yield _caught("GPUs", _gpus)
        yield _caught("NCCL", lambda: _all_reduce("nccl", "cuda"))
        devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    else:
        yield Check("GPUs", "note", "none: Megatron trains on the CPU over gloo")
        yield _caught("gloo", lambda: _all_reduce("gloo", "cpu"))
        devices = ["cpu"]
    for device in devices:
        yield _caught(f"Cholesky, QR on {device}", functools.partial(linear_algebra, device))
    yield _caught(f"ARO on {devices[0]}", functools.partial(self_test, devices[0]))
    yield _caught("--optimizer aro", _flags)


def _caught(name: str, check: Callable[[], Check | str]) -> Check:
    """The check; whatever it raises is a failure of the machine, not of the doctor."""
    try:
        found = check()
    except Exception as error:
        words = " ".join(str(error).split())
        return Check(name, "failed", f"{type(error).__name__}: {words}"[:300])
    return found if isinstance(found, Check) else Check(name, "ok", found)


def _judged(name: str, found: str, tested: tuple[str, ...]) -> Check:
    if any(found == t or found.startswith(t + ".") for t in tested):
        return Check(name, "ok", found)
    return Check(name, "note", f"{found}; tested with {', '.join(tested)}")


def _torch() -> Check:
    import torch

    found = str(torch.__version__).partition("+")[0]
    judged = _judged("torch", found, TESTED["torch"])
    return judged._replace(detail=f"{judged.detail}, CUDA {torch.version.cuda or 'none'}")


def _megatron() -> Check:
    from megatron_aro.cli.parsing import quiet

    with quiet():
        from megatron_aro.megatron import support

        support.check_megatron_version()
    found = support.megatron_version.partition("+")[0]  # a git checkout adds a commit
    return _judged("megatron-core", found, TESTED["megatron-core"])


def _flags() -> str:
    from megatron_aro.cli import parsing

    known = parsing.known_flags()
    ours = sum(flag.startswith("--aro-") for flag in known)
    return f"Megatron's parser knows it: {ours} of its {len(known)} flags are ARO's"


def _package(name: str, without: str) -> Check:
    try:
        found = version(name)
    except PackageNotFoundError:
        status, what = ("note", f": {without}") if without else ("failed", "")
        return Check(name, status, f"not installed{what}")
    return _judged(name, found, TESTED[name]) if name in TESTED else Check(name, "ok", found)


def _module(name: str, instead: str) -> Check:
    shown = name.partition(".")[0]
    try:
        module = importlib.import_module(name)
    except Exception as error:  # built for another torch it raises anything
        missing = isinstance(error, ModuleNotFoundError)
        why = "not installed" if missing else f"does not load ({error})"
        return Check(shown, "note", f"{why}: {instead}")
    found = getattr(sys.modules[shown], "__version__", getattr(module, "__version__", "there"))
    return Check(shown, "ok", str(found))


def _gpus() -> str:
    import torch

    names = []
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        free, total = (bytes_ / 2**30 for bytes_ in torch.cuda.mem_get_info(i))
        names.append(
            f"{properties.name} (sm_{properties.major}{properties.minor}, {free:.0f} of "
            f"{total:.0f} GiB free)"
        )
    return "; ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _all_reduce(backend: str, device: str) -> str:
    """A sum over a group of this process alone: the library loads and a collective runs."""
    import torch
    import torch.distributed as dist

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    store = dist.TCPStore("localhost", port, 1, is_master=True)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        ones = torch.ones(1 << 20, device=device)
        dist.all_reduce(ones)
        if ones.sum().item() != 1 << 20:
            raise RuntimeError("an all-reduce gave a wrong sum")
    finally:
        dist.destroy_process_group()
    if backend == "nccl":
        return "{}.{}.{}; an all-reduce runs".format(*torch.cuda.nccl.version())
    return "an all-reduce runs"


def linear_algebra(device: str) -> str:
    """Factorise a batch and one larger matrix in float32, as ARO does, and look at the results.

    Raises:
        RuntimeError: a factorisation is wrong, or fails.
    """
    import torch

    generator = torch.Generator(device=device).manual_seed(0)
    for b, n in ((8, 128), (1, 1024)):
        a = torch.randn(b, 2 * n, n, generator=generator, device=device)
        gram = (a.double().mT @ a.double()).float()
        factor, failed = torch.linalg.cholesky_ex(gram)
        error = ((factor @ factor.mT - gram).norm() / gram.norm()).item()
        q, r = torch.linalg.qr(a)
        rebuilt = ((q @ r - a).norm() / a.norm()).item()
        product = q.double().mT @ q.double()
        skew = (product - torch.eye(n, device=device, dtype=product.dtype)).abs().max().item()
        for what, size in {
            "Cholesky: L Lᵀ - A": error,
            "QR: Q R - A": rebuilt,
            "QR: QᵀQ - I": skew,
        }.items():
            if failed.any() or not size < 1e-3:  # NaN too
                raise RuntimeError(f"{what} is off by {size:.1e} at {b} x {n} x {n}")
    return f"right to {max(error, rebuilt, skew):.0e}"


def self_test(device: str, seconds: float = _SELF_TEST_SECONDS) -> str:
    """Step wide, square and tall matrices with ARO, and compare with float64 on the CPU.

    Each matrix W minimises ||W - T||² by its gradient W - T. Steps are taken until the time is
    up; the first ten also in float64.

    Raises:
        RuntimeError: the updates differ, or the loss does not fall.
    """
    import torch

    from megatron_aro.optimizer import ARO

    generator = torch.Generator().manual_seed(0)
    shapes = ((128, 384), (256, 256), (384, 128))
    targets = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    exact = [torch.zeros_like(target).requires_grad_() for target in targets]
    tested = [torch.zeros(*s, device=device, requires_grad=True) for s in shapes]
    there = [target.to(device, torch.float32) for target in targets]
    optimizers = [ARO(exact, lr=0.05, weight_decay=0), ARO(tested, lr=0.05, weight_decay=0)]

    def step(optimizer: ARO, weights: list, goals: list) -> None:
        for weight, goal in zip(weights, goals, strict=True):
            weight.grad = weight.detach() - goal
        optimizer.step()

    def distance() -> float:
        pairs = zip(tested, there, strict=True)
        return sum((weight.detach() - goal).square().sum().item() for weight, goal in pairs)

    began, steps, first = time.monotonic(), 0, distance()
    while steps < 10 or time.monotonic() - began < seconds and steps < 100:
        step(optimizers[1], tested, there)
        steps += 1
        if steps <= 10:
            step(optimizers[0], exact, targets)
        if steps == 10:
            cosines = [
                torch.cosine_similarity(
                    a.detach().flatten(), b.detach().cpu().double().flatten(), 0
                )
                for a, b in zip(exact, tested, strict=True)
            ]
            if not min(cosines) > 1 - 1e-3:  # NaN too
                raise RuntimeError(f"after 10 steps 1 - cos to float64 is {1 - min(cosines):.1e}")
    last = distance()
    if not last < first / 2:
        raise RuntimeError(f"in {steps} steps the loss went from {first:.4g} to {last:.4g}")
    each = 1e3 * (time.monotonic() - began) / steps
    return f"{steps} steps of {each:.0f} ms, float64's to 1 - cos = {1 - min(cosines).item():.0e}"
