"""Read the fields of serialized protobuf messages, without their definitions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

# Errors of malformed messages. UnicodeDecodeError is a ValueError, and JSON inside a message can be nested deeply.
MALFORMED: Final = (IndexError, KeyError, ValueError, RecursionError)
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types


def iterate_fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field. Fixed numbers stay bytes."""
    position = 0
    while position < len(message):
        key, position = _read_varint(message, position)
        kind = key & 7
        if kind == _VARINT:
            value, position = _read_varint(message, position)
            yield key >> 3, value
            continue
        size, position = (
            _read_varint(message, position) if kind == _BYTES else ({_FIXED64: 8, _FIXED32: 4}[kind], position)
        )
        if position + size > len(message):
            raise ValueError("a field exceeds its message")
        yield key >> 3, message[position : position + size]
        position += size


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = message[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
        shift += 7
        if shift > 63:
            raise ValueError("a number has more than 64 bits")
