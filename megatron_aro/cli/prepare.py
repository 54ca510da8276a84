"""Tokenize text into Megatron's .bin and .idx files, with documents held out for validation.

    megatron-aro prepare-data FILE_OR_FOLDER... --tokenizer qwen.tiktoken --out data

Inputs are described in `megatron_aro.cli.documents`, tokenizers in `.vocabularies`. OUT gets
train.{bin,idx}, valid.{bin,idx} and manifest.json: inputs, counts and hashes. A document is held
out by the hash of its text, so that copies of it fall on the same side, and an added file moves no
other. The result does not depend on the number of processes. Interrupted, it goes on where it was.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_aro.cli import documents, vocabularies
from megatron_aro.cli.corpus import write_whole
from megatron_aro.cli.vocabularies import Vocabulary

_SPLITS = ("train", "valid")
_PART = 64 << 20  # bytes of small files that one process takes at once
_read_bytes: Any = None  # in a worker: shared with all, bytes read so far


class Settings(NamedTuple):
    """What decides the ids that are written, beside the inputs."""

    tokenizer: str
    eod: str | None
    key: str
    held_out: float


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add `prepare-data` to the subcommands of an argparse parser."""
    parser = commands.add_parser(
        "prepare-data",
        help="tokenize text into .bin and .idx files",
        description=__doc__.split("\n")[0],
    )
    parser.add_argument(
        "inputs",
        nargs="+",
        type=Path,
        metavar="FILE_OR_FOLDER",
        help="JSONL, Parquet or text, also packed as .gz, .bz2, .xz or .zst",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the result")
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="NAME",
        help="bytes, a file of tiktoken ranks (qwen.tiktoken) or a HuggingFace folder",
    )
    parser.add_argument("--suffix", default="", help="of the files that are taken from folders")
    parser.add_argument("--key", default="text", help="of the text in a record (%(default)s)")
    parser.add_argument("--eod", help="token that ends a document, where the folder names none")
    parser.add_argument(
        "--held-out",
        type=float,
        default=0.005,
        metavar="SHARE",
        help="of the documents that go to valid; 0 for none (default %(default)s)",
    )
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Prepare, and print what Megatron needs to know.

    Raises:
        ValueError: an input or a setting cannot be used.
    """
    if not 0 <= args.held_out < 1:
        raise ValueError(f"--held-out is {args.held_out}: it must be at least 0 and below 1.")
    if args.workers < 1:
        raise ValueError(f"--workers is {args.workers}: it must be at least 1.")
    settings = Settings(args.tokenizer, args.eod, args.key, args.held_out)
    files = documents.find(args.inputs, args.suffix)
    manifest = prepare(files, args.out, settings, args.workers)
    for split, counts in manifest["splits"].items():
        print(f"{split}: {counts['documents']:,} documents, {counts['tokens']:,} tokens")
    paths = [f"--{split}-data-path {args.out / split}" for split in manifest["splits"]]
    print(f"Megatron's flags: {' '.join([manifest['flags'], *paths])}")


def prepare(files: Sequence[Path], out: Path, settings: Settings, workers: int) -> dict[str, Any]:
    """Write the splits and the manifest, which is returned; kept if it is there and still true.

    Raises:
        ValueError: a file cannot be read, or a split got no document.
    """
    vocabulary = vocabularies.load(settings.tokenizer, settings.eod)
    parts = _parts(files)
    names = [_fingerprint(part, settings, vocabulary) for part in parts]
    whole = hashlib.sha256(" ".join(names).encode()).hexdigest()
    record = out / "manifest.json"
    if record.exists():
        manifest = json.loads(record.read_text())
        if manifest["fingerprint"] == whole:
            print("Already prepared from the same files and settings: kept.")
            return manifest
        record.unlink()
    folder = out / "parts"
    folder.mkdir(parents=True, exist_ok=True)
    jobs = {
        name: part
        for name, part in zip(names, parts, strict=True)
        if not (folder / f"{name}.json").exists()
    }
    if len(jobs) < len(parts):
        print(f"{len(parts) - len(jobs)} of {len(parts)} parts were ready before.")
    _run_jobs(jobs, folder, settings, min(workers, max(1, len(jobs))))
    manifest = _merge(names, folder, out, settings, vocabulary)
    manifest = {"fingerprint": whole, **manifest}
    write_whole(record, json.dumps(manifest, indent=1))
    shutil.rmtree(folder)
    return manifest


def _parts(files: Sequence[Path]) -> list[list[Path]]:
    """Files that one process takes at once: one of many documents, or small ones together."""
    parts: list[list[Path]] = []
    room = 0
    for file in files:
        size = file.stat().st_size
        if documents.holds_many(file) or size > room:
            parts.append([])
            room = 0 if documents.holds_many(file) else _PART
        parts[-1].append(file)
        room -= min(size, room)
    return parts


def _fingerprint(part: Sequence[Path], settings: Settings, vocabulary: Vocabulary) -> str:
    """Of names, sizes and times, not of contents: finding out what is left to do must be quick."""
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in part]
    decides = (settings.key, settings.held_out, vocabulary.identity, stats)
    return hashlib.sha256(repr(decides).encode()).hexdigest()[:32]


def _run_jobs(jobs: dict[str, list[Path]], folder: Path, settings: Settings, workers: int) -> None:
    if not jobs:
        return
    context = multiprocessing.get_context("spawn")
    done = context.Value("Q", 0)
    total = sum(file.stat().st_size for part in jobs.values() for file in part)
    progress = _Progress(total)
    with concurrent.futures.ProcessPoolExecutor(workers, context, _start, (done,)) as pool:
        waiting = {pool.submit(_tokenize, jobs[name], folder / name, settings) for name in jobs}
        try:
            while waiting:
                finished, waiting = concurrent.futures.wait(waiting, timeout=1)
                progress.show(done.value)
                for future in finished:
                    future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    progress.end()


def _start(done: Any) -> None:
    global _read_bytes
    _read_bytes = done


def _count(number: int) -> None:
    with _read_bytes.get_lock():
        _read_bytes.value += number


def _tokenize(files: Sequence[Path], prefix: Path, settings: Settings) -> None:
    """Write a part: <prefix>.<split>.{bin,idx}, and last <prefix>.json."""
    import numpy as np

    vocabulary = vocabularies.load(settings.tokenizer, settings.eod)
    builders = {split: _builder(f"{prefix}.{split}.bin", vocabulary) for split in _SPLITS}
    counts = {split: {"documents": 0, "tokens": 0} for split in _SPLITS}
    inputs = []
    for path in files:
        file = documents.HashedFile(path, _count)
        found = empty = 0
        for text in documents.read(path, settings.key, file):
            if not text.strip():
                empty += 1
                continue
            found += 1
            split = "valid" if _is_held_out(text, settings.held_out) else "train"
            ids = np.array([*vocabulary.encode(text), vocabulary.eod])
            builders[split].add_document(ids, [len(ids)])
            counts[split]["documents"] += 1
            counts[split]["tokens"] += len(ids)
        facts = {"path": str(path), "bytes": path.stat().st_size, "sha256": file.sha256()}
        inputs.append({**facts, "documents": found, "empty": empty})
    for split, builder in builders.items():
        builder.finalize(f"{prefix}.{split}.idx")
    write_whole(Path(f"{prefix}.json"), json.dumps({"inputs": inputs, "splits": counts}))


def _is_held_out(text: bytes, share: float) -> bool:
    return int.from_bytes(hashlib.sha256(text).digest()[:8]) < share * 2**64


def _merge(
    names: Sequence[str], folder: Path, out: Path, settings: Settings, vocabulary: Vocabulary
) -> dict[str, Any]:
    """Put the parts together in the order of the inputs; returns the manifest."""
    parts = [json.loads((folder / f"{name}.json").read_text()) for name in names]
    splits = {}
    for split in _SPLITS:
        if split == "valid" and not settings.held_out:
            for ending in ("bin", "idx"):  # of an earlier preparation
                (out / f"{split}.{ending}").unlink(missing_ok=True)
            continue
        counts = {
            what: sum(part["splits"][split][what] for part in parts)
            for what in ("documents", "tokens")
        }
        if not counts["documents"]:
            raise ValueError(
                f"No document fell into the {split} split with --held-out {settings.held_out}: "
                "give more text, or another share."
            )
        builder = _builder(f"{folder}/{split}.bin", vocabulary)
        for name, part in zip(names, parts, strict=True):
            if part["splits"][split]["documents"]:
                builder.add_index(f"{folder}/{name}.{split}")
        builder.finalize(f"{folder}/{split}.idx")
        for ending in ("bin", "idx"):
            path = out / f"{split}.{ending}"
            os.replace(folder / path.name, path)
            with path.open("rb") as file:
                counts[f"{ending}_sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
        splits[split] = counts
    return {
        "settings": settings._asdict(),
        "vocabulary": {
            "size": vocabulary.size,
            "eod": vocabulary.eod,
            "identity": vocabulary.identity,
        },
        "flags": vocabulary.flags,
        "splits": splits,
        "inputs": [facts for part in parts for facts in part["inputs"]],
    }


def _builder(path: str, vocabulary: Vocabulary) -> Any:
    with warnings.catch_warnings(action="ignore"):  # of packages that matter to training alone
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    return IndexedDatasetBuilder(path, dtype=DType.optimal_dtype(vocabulary.size))


class _Progress:
    """A bar on a terminal, a line for every tenth elsewhere."""

    def __init__(self, total: int) -> None:
        self.total, self.began, self.tenths = max(1, total), time.monotonic(), 0
        self.live = sys.stderr.isatty()

    def show(self, done: int) -> None:
        """After `done` bytes of the inputs."""
        share = min(1.0, done / self.total)
        tenths = int(10 * share)
        if not self.live and tenths == self.tenths:
            return
        self.tenths = tenths
        rate = done / max(1e-9, time.monotonic() - self.began)
        left = (self.total - done) / rate if rate else 0.0
        filled = "#" * int(30 * share)
        text = (
            f"[{filled:30}] {share:4.0%}  {rate / 2**20:.1f} MiB/s  "
            f"{int(left) // 60}:{int(left) % 60:02} left"
        )
        start, end = ("\r\033[K", "") if self.live else ("", "\n")
        print(f"{start}{text}", end=end, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leave the last line standing."""
        self.show(self.total)
        if self.live:
            print(file=sys.stderr)
