"""Tokenizers of `prepare-data`: bytes, tiktoken ranks (Qwen), a local HuggingFace folder.

None of them reads from the network. Training takes the ids with Megatron's NullTokenizer, whose
flags each vocabulary names.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# How Qwen cuts text before it merges bytes; the ranks' file does not say.
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Vocabulary:
    """Text to ids 0..size - 1.

    Attributes:
        name: as it was asked for.
        size: of ids, the end of document and other special tokens included.
        eod: the id that ends a document.
        identity: a hash of what decides the ids.
        encode: UTF-8 text, which for bytes may be any, to ids without `eod`.
    """

    name: str
    size: int
    eod: int
    identity: str
    encode: Callable[[bytes], Sequence[int]]

    @property
    def flags(self) -> str:
        """What Megatron needs to take these ids."""
        flags = f"--tokenizer-type NullTokenizer --vocab-size {self.size}"
        if self.eod != self.size - 1:
            flags += f" --null-tokenizer-eod-id {self.eod}"
        return flags


def load(name: str, eod: str | None = None) -> Vocabulary:
    """The vocabulary `bytes`, or of a file *.tiktoken, or of a folder with a tokenizer.json.

    Args:
        eod: the text of the token that ends a document, for a folder that does not name one.

    Raises:
        ValueError: there is no such vocabulary, or a package is missing.
    """
    path = Path(name)
    if eod is not None and not path.is_dir():
        raise ValueError(f"--eod is for a HuggingFace folder: {name} has its own end of document.")
    if name == "bytes":
        return Vocabulary(name, 257, 256, "bytes", list)
    if path.is_dir():
        return _huggingface(path, eod)
    if path.suffix == ".tiktoken" and path.is_file():
        return _tiktoken(path)
    raise ValueError(
        f"There is no tokenizer {name}: give bytes, a file of tiktoken ranks (qwen.tiktoken), or a "
        "folder with a tokenizer.json."
    )


def _tiktoken(path: Path) -> Vocabulary:
    data = path.read_bytes()
    ranks: dict[bytes, int] = {}
    try:
        for line in data.splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error):
        raise ValueError(f"{path} does not hold tiktoken's ranks, `base64 rank` lines.") from None
    eod = len(ranks)
    encoding = _package("tiktoken").Encoding(
        path.stem,
        pat_str=_QWEN_WORDS,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": eod},
    )

    def encode(text: bytes) -> list[int]:
        return encoding.encode_ordinary(text.decode(errors="replace"))

    return Vocabulary(str(path), eod + 1, eod, hashlib.sha256(data).hexdigest(), encode)


def _huggingface(folder: Path, eod: str | None) -> Vocabulary:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no tokenizer.json, which a HuggingFace tokenizer needs.")
    tokenizer = _package("tokenizers").Tokenizer.from_file(str(file))
    config = folder / "tokenizer_config.json"
    if eod is None and config.is_file():
        named = json.loads(config.read_text()).get("eos_token")
        eod = named.get("content") if isinstance(named, dict) else named
    if eod is None:
        raise ValueError(f"{folder} does not say which token ends a document: give --eod.")
    number = tokenizer.token_to_id(eod)
    if number is None:
        raise ValueError(f"{file} has no token {eod}.")

    def encode(text: bytes) -> list[int]:
        return tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False).ids

    identity = hashlib.sha256(file.read_bytes() + eod.encode()).hexdigest()
    size = max(tokenizer.get_vocab().values()) + 1
    return Vocabulary(str(folder), size, number, identity, encode)


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(f"This tokenizer needs the package {name}: install it.") from None
