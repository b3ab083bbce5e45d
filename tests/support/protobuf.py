"""Encode fields of Protocol Buffers messages, as in event files of TensorBoard and run files of W&B."""

from __future__ import annotations

import struct


def encode_varint(number: int) -> bytes:
    """Encode an integer of at least 0."""
    parts = []
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def encode_field(number: int, value: float | bytes) -> bytes:
    """Encode an integer as varint, a float as double, and bytes with their length."""
    if isinstance(value, int):
        return encode_varint(number << 3) + encode_varint(value)
    if isinstance(value, float):
        return encode_varint(number << 3 | 1) + struct.pack("<d", value)
    return encode_varint(number << 3 | 2) + encode_varint(len(value)) + value
