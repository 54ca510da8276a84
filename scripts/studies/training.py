"""Train what a table of runs says, piece by piece, in as many processes as there are GPUs.

    python scripts/studies/training.py --data FOLDER --results FOLDER [--minutes 9]

A process trains one run after another, so that Megatron and Triton start once. Each finished run is
a JSON file in FOLDER of --results; runs that are there are not repeated. No run is begun that would
not end within --minutes. --pack FILE keeps all results in one file, rewritten after each run; such
a file, given by --resume, counts as finished on a fresh machine. Failures are results too, with the
reason; the next piece tries them again. Losses on different text cannot be compared, so a result
says which it was trained on, by a hash, and one of other text does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).with_name("training.yaml")
SETTINGS = (
    "optimizer seed world_size global_batch_size seq_length train_iters train_samples".split()
)
MARGIN = 1.15  # of the time that a run is expected to take


@dataclass(frozen=True)
class Planned:
    """A run of the table; `rate` is None where AdamW's best one is to be taken."""

    model: str
    method: str
    seed: int
    rate: float | None = None

    @property
    def name(self) -> str:
        rate = "" if self.rate is None else f"-{self.rate:g}"
        return f"{self.model}-{self.method}{rate}-seed{self.seed}"


def read_table(path: Path) -> dict:
    """A table with what it does not say itself from the one that it extends."""
    table = yaml.safe_load(path.read_text())
    extended = table.pop("extends", None)
    return {**read_table(path.with_name(extended)), **table} if extended else table


def planned(table: dict) -> list[Planned]:
    """All runs, in the order of the table."""
    found = []
    for model, methods, seed in table["runs"]:
        for method in methods.split():
            sweep = method == "sweep"
            rates = [float(rate) for rate in table["rates"]] if sweep else [None]
            name = "adamw" if sweep else method
            found += [Planned(model, name, seed, rate) for rate in rates]
    return found


def finished(args: argparse.Namespace) -> dict[str, dict]:
    """Name -> result of runs that have ended well, on the text of --data."""
    results = [json.loads(path.read_text()) for path in sorted(args.results.glob("*.json"))]
    return {
        result["name"]: result
        for result in results
        if "failed" not in result and result.get("corpus") == args.corpus
    }


def best_rate(table: dict, done: dict[str, dict], model: str) -> float | None:
    """AdamW's best by the last validation loss; None while its sweep has not ended."""
    losses = {}
    for run in planned(table):
        if run.model == model and run.rate is not None:
            if run.name not in done:
                return None
            losses[run.rate] = last_validation(done[run.name])
    return min(losses, key=losses.__getitem__)


def fingerprint(data: Path) -> str:
    """Of the tokens of both splits."""
    digest = hashlib.sha256()
    for split in ("train", "valid"):
        with (data / f"{split}.bin").open("rb") as tokens:
            digest.update(hashlib.file_digest(tokens, "sha256").digest())
    return digest.hexdigest()[:8]


def last_validation(result: dict) -> float:
    return result["validation"][max(result["validation"], key=int)]


def flags(table: dict, run: Planned, rate: float, data: Path, cache: Path) -> list[str]:
    """Megatron's, of a run."""
    steps = table["steps"]
    return [
        *table["common"].split(),
        *table["models"][run.model].split(),
        *table["methods"][run.method].split(),
        *("--train-iters", str(steps), "--lr-decay-iters", str(steps)),
        *("--lr", f"{rate:g}", "--min-lr", f"{rate / 10:g}", "--seed", str(run.seed)),
        *("--eval-interval", str(max(1, steps // table["evaluations"]))),
        *("--eval-iters", str(table["eval-iters"]), "--data-cache-path", str(cache)),
        *("--train-data-path", str(data / "train"), "--valid-data-path", str(data / "valid")),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", str(table["vocabulary"])),
    ]


def seconds(table: dict, done: dict[str, dict], run: Planned) -> float:
    """What a run is expected to take: as the slowest like it, else of its model, else of all.

    Args:
        done: results of this machine.
    """
    like = [r for r in done.values() if r["model"] == run.model and r["method"] == run.method]
    like = like or [r for r in done.values() if r["model"] == run.model] or list(done.values())
    return max((r["seconds"] for r in like), default=table["guess"])


def claim(table: dict, args: argparse.Namespace) -> tuple[Planned, float] | None | bool:
    """The next run and its rate; True: nothing yet, others' sweeps go on; None: nothing more."""
    done = finished(args)
    left = args.deadline - time.time()
    claims = args.results / "claims"
    here = {name: result for name, result in done.items() if (claims / name).exists()}
    waits = False
    for run in planned(table):
        taken = claims / run.name
        if taken.exists() or MARGIN * seconds(table, here, run) > left:
            continue
        rate = run.rate or best_rate(table, done, run.model)
        if run.name in done and rate in (None, done[run.name]["rate"]):
            continue
        if rate is None:
            waits = True
            continue
        with contextlib.suppress(FileExistsError):
            taken.touch(exist_ok=False)
            return run, rate
    return waits or None


def work(args: argparse.Namespace) -> int:
    """Train one run after another; 1 after a failure, when the process is not to be trusted."""
    table = read_table(args.table)
    while claimed := claim(table, args):
        if claimed is True:
            time.sleep(1)
            continue
        run, rate = claimed  # type: ignore[misc]
        log = args.results / "logs" / f"{run.name}.log"
        result: dict[str, Any] = {"name": run.name, **asdict(run), "rate": rate}
        result["corpus"] = args.corpus
        began = time.time()
        try:
            cache = args.results / "cache" / str(args.worker)  # not shared: written while read
            result |= train(flags(table, run, rate, args.data, cache), log)
        except (Exception, SystemExit) as error:
            reason = traceback.format_exception_only(error)[-1].strip()
            result |= {"failed": reason, "trace": traceback.format_exc()[-3000:]}
        result["seconds"] = round(time.time() - began, 1)
        keep(args.results / f"{run.name}.json", result)
        print(run.name, result["seconds"], "s", result.get("failed", ""), flush=True)
        if "failed" in result:
            return 1
    return 0


def train(argv: list[str], log: Path) -> dict[str, Any]:
    """One training in this process, read from what Megatron prints."""
    import torch
    from megatron.training.training import destroy_global_state

    from megatron_aro import pretrain_gpt
    from megatron_aro.cli import runs

    attend_by_torch()
    if torch.cuda.is_available():
        lose_by_torch()
    gc.collect()
    with log.open("w") as file, contextlib.redirect_stdout(file):
        pretrain_gpt.train(argv)
    destroy_global_state()
    run = runs.read(log)
    gpu = torch.cuda.is_available()
    return {
        "flags": argv,
        "settings": {name: run.settings.get(name) for name in SETTINGS},  # all: the flags
        "losses": run.losses,
        "rates": run.rates,
        "times": run.times,
        "validation": run.validation,
        "parameters": runs.parameters(run),
        "objectives": objectives(log.read_text()),
        "fallbacks": fallbacks(log.read_text()),
        "device": torch.cuda.get_device_name() if gpu else "CPU",
        "versions": {name: version(name) for name in ("torch", "megatron-core")},
    }


def attend_by_torch() -> None:
    """Megatron's local attention by torch's kernel, which keeps no scores in memory.

    Causal, no dropout, as many key as query heads: what the table's models have.
    """
    import torch
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    def forward(self: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        heads = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # from [s, b, heads, d]
        out = torch.nn.functional.scaled_dot_product_attention(
            *heads, is_causal=True, scale=self.softmax_scale
        )
        return out.permute(2, 0, 1, 3).flatten(2)

    DotProductAttention.forward = forward


@cache
def lose_by_torch() -> None:
    """Megatron's local cross entropy by compiled torch, which makes no float32 logits in memory.

    One rank, no padded vocabulary: what the table's models have.
    """
    import torch
    from megatron.core.models.common.language_module.language_module import LanguageModule

    @torch.compile(dynamic=False)
    def losses(labels: Any, logits: Any) -> Any:
        s, b, v = logits.shape
        found = torch.nn.functional.cross_entropy(
            logits.reshape(s * b, v).float(), labels.t().reshape(s * b), reduction="none"
        )
        return found.view(s, b).t().contiguous()  # of which Megatron takes a view

    LanguageModule.compute_language_model_loss = lambda self, labels, logits: losses(labels, logits)


def objectives(log: str) -> dict[str, float]:
    """Kind of matrix -> J over the eigen-rotation's, at the last reading of ARO's monitor."""
    last = log.rpartition("> ARO at iteration")[2].splitlines()
    if len(last) < 3 or "J / J eigen" not in last[1]:
        return {}
    rows = [line.split() for line in last[2:]]
    return {row[0]: float(row[8]) for row in rows if len(row) == 10 and row[0] != "step"}


def fallbacks(log: str) -> dict[str, int]:
    """Rung of orthonormalisation -> how often it was climbed in the whole training."""
    found: Counter[str] = Counter()
    for said in re.findall(r"> ARO: fall-backs of .* steps: (.*)", log):
        for count, rung in re.findall(r"(\d+) ([a-z ]+)", said):
            found[rung] += int(count)
    return dict(found)


def keep(path: Path, content: Any) -> None:
    """Write a whole file or none."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, default=str))
    os.replace(part, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--pack", type=Path)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.corpus = fingerprint(args.data)
    for name in ("claims", "logs"):
        (args.results / name).mkdir(parents=True, exist_ok=True)
    return work(args) if args.worker is not None else oversee(args)


def oversee(args: argparse.Namespace) -> int:
    """Keep a process a GPU at work, and the results packed."""
    import torch

    deadline = time.time() + 60 * args.minutes
    for stale in (args.results / "claims").iterdir():
        stale.unlink()
    if args.resume and args.resume.exists():
        for result in json.loads(args.resume.read_text()):
            keep(args.results / f"{result['name']}.json", result)
    gpus = list(map(str, range(torch.cuda.device_count() or 1)))
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        gpus = visible.split(",")
    command = [sys.executable, "-W", "ignore", __file__, "--deadline", str(deadline)]
    for name in ("table", "data", "results"):
        command += [f"--{name}", str(getattr(args, name))]

    def start(number: int) -> subprocess.Popen:
        own = {"CUDA_VISIBLE_DEVICES": gpus[number], "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        with (args.results / f"worker{number}.err").open("a") as errors:
            return subprocess.Popen(
                [*command, "--worker", str(number)], env={**os.environ, **own}, stderr=errors
            )

    workers = {number: start(number) for number in range(len(gpus))}
    packed: dict[Path, int] | None = None
    while workers:
        time.sleep(0.5)
        for number, worker in list(workers.items()):
            if worker.poll() is not None:
                del workers[number]
                if worker.returncode == 1:
                    workers[number] = start(number)
        now = {path: path.stat().st_mtime_ns for path in sorted(args.results.glob("*.json"))}
        if args.pack and now != packed:
            packed = now
            keep(args.pack, [json.loads(path.read_text()) for path in now])
    done, all_runs = finished(args), planned(read_table(args.table))
    print(f"{len(done)} of {len(all_runs)} runs have finished.")
    for path in sorted(args.results.glob("*.json")):
        if failed := json.loads(path.read_text()).get("failed"):
            print(f"not possible or failed: {path.stem}: {failed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
