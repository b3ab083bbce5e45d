"""Read the history in run files of W&B, such as `wandb/offline-run-*/run-*.wandb`.

A file is a header and blocks. A record of a block is a checksum, a length, a kind, and a part of a protobuf `Record`.
"""

from __future__ import annotations

import json
import struct
from typing import Any, Final, NamedTuple

from workers.host.supervisor.protobuf import MALFORMED, iterate_fields

FILE_HEADER: Final = b":W&B"
FILE_HEADER_BYTES: Final = 7
BLOCK_BYTES: Final = 32768
PART_HEADER_BYTES: Final = 7
MAX_RECORD_BYTES: Final = 2**19  # larger records are skipped, for example tables
MAX_JSON_BYTES: Final = 2**16  # of a value
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4  # kinds of parts
_NOT_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


class LoggedStep(NamedTuple):
    """Values of one call of `wandb.log`."""

    step: int
    values: dict[str, Any]


def read_history(data: bytes, offset: int) -> tuple[list[LoggedStep], int]:
    """Return the steps in a section of a file, and the size of their records.

    Args:
        offset: Position of the section in the file. It is the start of a record.
    """
    if offset == 0 and not data.startswith(FILE_HEADER):
        return [], 0
    steps: list[LoggedStep] = []
    position = used = max(0, FILE_HEADER_BYTES - offset)
    record: bytes | None = None  # parts of the current record
    while True:
        left = BLOCK_BYTES - (offset + position) % BLOCK_BYTES
        if left < PART_HEADER_BYTES:  # padding
            position += left
            continue
        if len(data) - position < PART_HEADER_BYTES:
            break
        _checksum, size, kind = struct.unpack_from("<IHB", data, position)
        if kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST) or size > left - PART_HEADER_BYTES:
            if len(data) - position < left:  # the writer has not written the rest of the block
                break
            position, record = position + left, None
            used = position
            continue
        end = position + PART_HEADER_BYTES + size
        if end > len(data):
            break
        part, position = data[position + PART_HEADER_BYTES : end], end
        if kind in (_WHOLE, _FIRST):
            record = part
        elif record is not None:
            record += part
        if kind in (_WHOLE, _LAST) and record is not None and (step := parse_record(record)) is not None:
            steps.append(step)
        if kind in (_WHOLE, _LAST) or record is None or len(record) > MAX_RECORD_BYTES:
            record, used = None, position
    return steps, used


def parse_record(record: bytes) -> LoggedStep | None:
    """Return the values of a record with history, None for other kinds of records."""
    try:
        for number, value in iterate_fields(record):
            if number == 2 and isinstance(value, bytes):
                return _parse_history(value)
    except (*MALFORMED, struct.error):
        pass
    return None


def _parse_history(message: bytes) -> LoggedStep:
    step, values = 0, dict[str, Any]()
    for number, value in iterate_fields(message):
        if number == 2 and isinstance(value, bytes):
            step = next((num for field, num in iterate_fields(value) if field == 1 and isinstance(num, int)), 0)
        elif number == 1 and isinstance(value, bytes):
            name, logged = _parse_item(value)
            if name and not name.startswith("_"):  # for example `_timestamp`
                values[name] = logged
    return LoggedStep(step, values)


def _parse_item(message: bytes) -> tuple[str, Any]:
    """Return the name and the value of a `HistoryItem`. The value is None for large JSON."""
    name, nested = "", list[str]()
    logged: Any = None
    for field, value in iterate_fields(message):
        if field == 1 and isinstance(value, bytes):
            name = value[:1000].decode()
        elif field == 2 and isinstance(value, bytes):
            nested.append(value[:1000].decode())
        elif field == 5 and isinstance(value, int):
            logged = value - 2**64 if value >= 2**63 else value
        elif field == 6 and isinstance(value, bytes):
            (logged,) = struct.unpack("<d", value)
        elif field in (8, 16) and isinstance(value, bytes) and len(value) <= MAX_JSON_BYTES:
            logged = json.loads(value)
    if isinstance(logged, str):
        logged = _NOT_FINITE.get(logged, logged)
    return name or ".".join(nested), logged
