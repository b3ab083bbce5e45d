"""Read the scalars in TensorBoard event files that a job writes into its folder.

A record of a file is a length, a checksum, an `Event` of protobuf, and a checksum. Only the fields of scalars are read.
A job can write anything into its folder, so links and other special files are skipped, and all sizes are bounded.
"""

from __future__ import annotations

import os
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from contracts.telemetry.metrics import MetricItem
from workers.metric_values import MetricCollector

MAX_FILES: Final = 16
MAX_ENTRIES: Final = 2000  # of folders, per search
MAX_LEVELS: Final = 4
MAX_READ_BYTES: Final = 2**20  # of a file per read
MAX_RECORD_BYTES: Final = 2**20  # larger records are skipped, for example images
NAME_PART: Final = "tfevents"
SEARCH_INTERVAL_S: Final = 10.0
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types of protobuf


class Scalar(NamedTuple):
    """A value of an event file."""

    tag: str
    step: int
    value: float


class EventFiles:
    """Follow the event files below folders that were written since the start of the job.

    Files of other users are skipped. `owners` are user IDs.
    """

    def __init__(self, folders: Sequence[Path], rank: int, owners: frozenset[int]) -> None:
        self._folders, self._owners, self._began_s = folders, owners, time.time()
        self._collector = MetricCollector(rank)
        self._offsets: dict[Path, int] = {}
        self._search_due_s = 0.0

    def read(self, *, final: bool = False) -> list[MetricItem]:
        """Return the metrics of new records. With `final`, search for new files first."""
        if final or time.monotonic() >= self._search_due_s:
            self._search_due_s = time.monotonic() + SEARCH_INTERVAL_S
            for path in self._find_files():
                if len(self._offsets) < MAX_FILES:
                    self._offsets.setdefault(path, 0)
        for path in self._offsets:
            self._read_file(path)
        return self._collector.take(final=final)

    def _find_files(self) -> Iterator[Path]:
        pending, num_entries = [(folder, 0) for folder in self._folders], 0
        while pending:
            folder, level = pending.pop()
            try:
                with os.scandir(folder) as entries:
                    for entry in entries:
                        num_entries += 1
                        if num_entries > MAX_ENTRIES:
                            return
                        if entry.is_dir(follow_symlinks=False):
                            if level < MAX_LEVELS:
                                pending.append((Path(entry.path), level + 1))
                        elif NAME_PART in entry.name and entry.stat(follow_symlinks=False).st_mtime >= self._began_s:
                            yield Path(entry.path)
            except OSError:
                continue

    def _read_file(self, path: Path) -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid not in self._owners:
                return
            data = os.pread(descriptor, MAX_READ_BYTES + 16, self._offsets[path])
        except OSError:
            return
        finally:
            os.close(descriptor)
        used = 0
        while len(data) - used >= 12:
            (size,) = struct.unpack_from("<Q", data, used)
            if size > MAX_RECORD_BYTES:
                used = min(used + size + 16, 2**62) if size < 2**62 else 2**62  # a record of an image, or no event file
                break
            if len(data) - used < size + 16:
                break
            for scalar in parse_event(data[used + 12 : used + 12 + size]):
                self._collector.add("event file", scalar.step, {scalar.tag: scalar.value})
            used += size + 16
        self._offsets[path] += used


def parse_event(event: bytes) -> list[Scalar]:
    """Return the scalars of a serialized `Event`. A malformed event has none."""
    try:
        step, scalars = 0, list[tuple[str, float]]()
        for number, value in _iterate_fields(event):
            if number == 2 and isinstance(value, int):
                step = value
            elif number == 5 and isinstance(value, bytes):
                found = (_parse_value(part) for field, part in _iterate_fields(value) if field == 1)
                scalars += [scalar for scalar in found if scalar is not None]
    except (IndexError, KeyError, UnicodeDecodeError, ValueError, struct.error):
        return []
    return [Scalar(tag, step, value) for tag, value in scalars]


def _parse_value(message: int | bytes) -> tuple[str, float] | None:
    """Return the tag and the number of a `Summary.Value`, None for other kinds of values."""
    tag, number = "", None
    if not isinstance(message, bytes):
        return None
    for field, value in _iterate_fields(message):
        if field == 1 and isinstance(value, bytes):
            tag = value[:1000].decode()
        elif field == 2 and isinstance(value, bytes):
            (number,) = struct.unpack("<f", value)
        elif field == 8 and isinstance(value, bytes):
            number = _parse_tensor(value)
    return None if number is None or not tag else (tag, number)


def _parse_tensor(message: bytes) -> float | None:
    """Return the number of a `TensorProto` with one float or double."""
    kind, content = 1, b""
    for field, value in _iterate_fields(message):
        if field == 1 and isinstance(value, int):
            kind = value
        elif field in (4, 5, 6) and isinstance(value, bytes):
            content = value
    formats = {1: "<f", 2: "<d"}
    if kind not in formats or len(content) != struct.calcsize(formats[kind]):
        return None
    (number,) = struct.unpack(formats[kind], content)
    return float(number)


def _iterate_fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
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
