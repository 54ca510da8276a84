"""Files -> a byte-level corpus in Megatron's .bin/.idx format.

    python -m megatron_aro.cli.corpus FILE_OR_FOLDER... --out FOLDER [--suffix .py]

writes FOLDER/train.{bin,idx} and FOLDER/valid.{bin,idx}. Every file is one document: its bytes,
0..255, then the end-of-document id 256, which is what Megatron's
``--tokenizer-type NullTokenizer --vocab-size 257`` takes for it (vocab_size - 1). No tokenizer is
trained or fetched. Files are held out whole, by a hash of their names, so that validation text
never occurs in training and an added file moves no other.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

VOCAB_SIZE = 257
EOD = VOCAB_SIZE - 1
TOKENIZER_FLAGS = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB_SIZE)]


def collect(
    roots: Iterable[Path], suffix: str = "", exclude: Iterable[str] = ()
) -> dict[str, Path]:
    """Name -> path of the non-empty files under ``roots``, sorted by name.

    A name is the path relative to its root, with forward slashes: the same on every machine.

    Args:
        roots: files, or folders that are searched to the bottom.
        suffix: how a file's name must end.
        exclude: names of folders below a root that are left out.

    Raises:
        ValueError: a root does not exist, or two files have the same name.
    """
    excluded = set(exclude)
    found: dict[str, Path] = {}
    for root in roots:
        if not root.exists():
            raise ValueError(f"{root} does not exist.")
        base = root if root.is_dir() else root.parent
        for path in root.rglob(f"*{suffix}") if root.is_dir() else [root]:
            name = path.relative_to(base)
            if not path.is_file() or not path.stat().st_size or excluded & set(name.parts[:-1]):
                continue
            if name.as_posix() in found:
                raise ValueError(f"{path} and {found[name.as_posix()]} have the same name.")
            found[name.as_posix()] = path
    return dict(sorted(found.items()))


def is_held_out(name: str, share: float) -> bool:
    """Whether a file belongs to the validation corpus; true for ``share`` of all names."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8]) < share * 2**64


def build(files: Mapping[str, Path], out: Path, held_out: float = 0.05) -> dict[str, int | str]:
    """Write the two corpora to ``out``, unless they are there and made from the same bytes.

    Args:
        files: name -> path, from ``collect``.
        out: folder of train.{bin,idx}, valid.{bin,idx} and corpus.json, which is written last.
        held_out: share of the files that goes to the validation corpus.

    Returns:
        What corpus.json holds: ``sha256`` of all names and bytes, and the number of files and of
        tokens (one for each byte, one more for each file) of either split.

    Raises:
        ValueError: no file fell into one of the splits.
    """
    splits = {
        "train": [path for name, path in files.items() if not is_held_out(name, held_out)],
        "valid": [path for name, path in files.items() if is_held_out(name, held_out)],
    }
    facts: dict[str, int | str] = {"sha256": _fingerprint(files, held_out)}
    for split, paths in splits.items():
        if not paths:
            raise ValueError(
                f"None of the {len(files)} files fell into the {split} split with {held_out:.0%} "
                "of the files held out: give more files."
            )
        facts[f"{split}_files"] = len(paths)
        facts[f"{split}_tokens"] = sum(path.stat().st_size + 1 for path in paths)

    record = out / "corpus.json"
    if record.exists() and json.loads(record.read_text()) == facts:
        return facts
    record.unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    for split, paths in splits.items():
        _write(paths, out / split)
    write_whole(record, json.dumps(facts, indent=1))
    return facts


def _fingerprint(files: Mapping[str, Path], held_out: float) -> str:
    digest = hashlib.sha256(repr(held_out).encode())
    for name, path in files.items():
        digest.update(hashlib.sha256(name.encode()).digest())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _write(paths: Iterable[Path], prefix: Path) -> None:
    import numpy as np

    with warnings.catch_warnings(action="ignore"):  # of packages that matter to training alone
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(VOCAB_SIZE))
    for path in paths:
        tokens = np.append(np.frombuffer(path.read_bytes(), np.uint8).astype(np.uint16), EOD)
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(f"{prefix}.idx")


def write_whole(path: Path, text: str) -> None:
    """Write a whole file or, if interrupted, none."""
    part = path.with_suffix(".part")
    part.write_text(text)
    os.replace(part, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("roots", nargs="+", type=Path, metavar="FILE_OR_FOLDER")
    parser.add_argument("--out", type=Path, required=True, help="folder for the corpora")
    parser.add_argument("--suffix", default="", help="take only files whose names end so")
    parser.add_argument(
        "--held-out", type=float, default=0.05, help="share of files to validate on"
    )
    args = parser.parse_args()
    try:
        facts = build(collect(args.roots, args.suffix), args.out, args.held_out)
    except ValueError as error:
        sys.exit(str(error))
    print(json.dumps(facts, indent=1))
    print("Megatron's flags:", *TOKENIZER_FLAGS)


if __name__ == "__main__":
    main()
