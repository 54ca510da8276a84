"""Files of text, whatever they are packed in, as documents.

By the ending of a name, once .gz, .bz2, .xz, .zst or .zstd is taken off: .jsonl, .ndjson and .json
hold a JSON object a line, .parquet a row a document, any other file is one document.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import importlib
import io
import json
import lzma
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

_LINES = (".jsonl", ".ndjson", ".json")
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zstd")


class HashedFile(io.RawIOBase):
    """A file that is read from begin to end once, and hashed on the way.

    Args:
        on_read: called with the number of bytes of each read.
    """

    def __init__(self, path: Path, on_read: Callable[[int], None]) -> None:
        self._file = path.open("rb", buffering=0)
        self._hash = hashlib.sha256()
        self._on_read = on_read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer) or 0
        self._hash.update(memoryview(buffer)[:count])
        self._on_read(count)
        return count

    def sha256(self) -> str:
        """Of the whole file: what nobody has read is read now."""
        while self.readinto(bytearray(1 << 20)):
            pass
        self._file.close()
        return self._hash.hexdigest()


def find(inputs: Iterable[Path], suffix: str = "") -> list[Path]:
    """The non-empty files given, and those in folders given, in the order of their names.

    Raises:
        ValueError: an input does not exist, or there is no file.
    """
    found: list[Path] = []
    for path in inputs:
        if not path.exists():
            raise ValueError(f"Input {path} does not exist.")
        below = sorted(path.rglob(f"*{suffix}")) if path.is_dir() else [path]
        found += [file for file in below if file.is_file() and file.stat().st_size]
    if not found:
        ending = f" with names that end in {suffix}" if suffix else ""
        raise ValueError(f"There are no files{ending} in {', '.join(map(str, inputs))}.")
    return list(dict.fromkeys(found))


def holds_many(path: Path) -> bool:
    """Whether a file is of many documents."""
    return _kind(path) in (*_LINES, ".parquet")


def read(path: Path, key: str, file: HashedFile) -> Iterator[bytes]:
    """The documents of a file, as UTF-8 (a file that is one document: as it is).

    Args:
        key: of the text in a JSON object, or the column.

    Raises:
        ValueError: a line is no JSON object with such a text, or the file is damaged; file and
            line are named.
    """
    try:
        if _kind(path) == ".parquet":
            yield from _rows(path, key)
            return
        with _unpacked(path, io.BufferedReader(file, 1 << 20)) as stream:
            if _kind(path) in _LINES:
                for number, line in enumerate(stream, 1):
                    if line.strip():
                        yield _text(line, key, f"{path}, line {number}")
            else:
                yield stream.read()
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _kind(path: Path) -> str:
    name = path.name.lower()
    for packed in _PACKED:
        name = name.removesuffix(packed)
    return Path(name).suffix


def _unpacked(path: Path, file: io.BufferedReader) -> BinaryIO | Any:
    packed = path.suffix.lower()
    if packed in (".zst", ".zstd"):
        return io.BufferedReader(
            _package("zstandard", path)
            .ZstdDecompressor()
            .stream_reader(file, read_across_frames=True)
        )
    for suffix, module in {".gz": gzip, ".bz2": bz2, ".xz": lzma}.items():
        if packed == suffix:
            return module.open(file)
    return file


def _text(line: bytes, key: str, where: str) -> bytes:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error}).") from None
    text = record.get(key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        there = ", ".join(map(str, record)) if isinstance(record, dict) else "no object"
        raise ValueError(f"{where}: there is no text {key!r}, but {there}: give --key.")
    return text.encode(errors="replace")


def _rows(path: Path, key: str) -> Iterator[bytes]:
    table = _package("pyarrow.parquet", path).ParquetFile(path)
    if key not in table.schema_arrow.names:
        names = ", ".join(table.schema_arrow.names)
        raise ValueError(f"{path}: there is no column {key!r}, but {names}: give --key.")
    for batch in table.iter_batches(columns=[key]):
        for value in batch.column(0):
            yield (value.as_py() or "").encode(errors="replace")


def _package(name: str, path: Path) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise ValueError(f"{path} needs the package {package}: install it.") from None
