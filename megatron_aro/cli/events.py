"""Read TensorBoard's event files: scalars and texts, without TensorBoard.

A file is a sequence of records: length (uint64), its checksum, an Event in protobuf's wire format,
its checksum. Of Event, Summary, Summary.Value and TensorProto only the fields named here are read.
Checksums are not looked at; a last record that is cut off, as of a run that goes on, is left out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Field numbers of the messages.
_WALL_TIME, _STEP, _SUMMARY = 1, 2, 5  # Event
_VALUE = 1  # Summary
_TAG, _SIMPLE, _TENSOR = 1, 2, 8  # Summary.Value
_CONTENT, _FLOATS, _DOUBLES, _STRINGS = 4, 5, 6, 8  # TensorProto


class Entry(NamedTuple):
    """Something written for a step; `value` is a float for a scalar and a str for a text."""

    time: float  # seconds since 1970
    step: int
    tag: str
    value: float | str


def read(path: Path) -> Iterator[Entry]:
    """All scalars and texts of an event file, in the order in which they were written.

    Raises:
        ValueError: the file is no event file.
    """
    data = path.read_bytes()
    position = 0
    while position + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, position)
        start, end = position + 12, position + 12 + length
        if end + 4 > len(data):
            return
        try:
            yield from _event(data[start:end])
        except (IndexError, struct.error, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not an event file of TensorBoard.") from error
        position = end + 4


def _event(data: bytes) -> Iterator[Entry]:
    time, step, summaries = 0.0, 0, []
    for number, value in _fields(data):
        if number == _WALL_TIME:
            (time,) = struct.unpack("<d", _bytes(value))
        elif number == _STEP and isinstance(value, int):
            step = value
        elif number == _SUMMARY:
            summaries.append(_bytes(value))
    for summary in summaries:
        for number, field in _fields(summary):
            if number == _VALUE:
                tag, written = _value(_bytes(field))
                if written is not None:
                    yield Entry(time, step, tag, written)


def _value(data: bytes) -> tuple[str, float | str | None]:
    tag, found = "", None
    for number, field in _fields(data):
        if number == _TAG:
            tag = _bytes(field).decode()
        elif number == _SIMPLE:
            (found,) = struct.unpack("<f", _bytes(field))
        elif number == _TENSOR:
            found = _tensor(_bytes(field))
    return tag, found


def _tensor(data: bytes) -> float | str | None:
    """The first element of a tensor of strings, float32 or float64; others are None."""
    for number, field in _fields(data):
        if number == _STRINGS:
            return _bytes(field).decode(errors="replace")
        if number in (_FLOATS, _DOUBLES) and _bytes(field):
            wide = number == _DOUBLES
            return struct.unpack_from("<d" if wide else "<f", _bytes(field))[0]
        if number == _CONTENT and len(_bytes(field)) == 4:
            return struct.unpack("<f", _bytes(field))[0]
    return None


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of a message: an int for a varint, else the bytes as they are."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, position = _varint(data, position)
            yield number, value
            continue
        if wire == 2:
            length, position = _varint(data, position)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise IndexError(f"wire type {wire}")
        if position + length > len(data):
            raise IndexError("a field is longer than its message")
        yield number, data[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise IndexError("a number in the place of bytes")
    return value
