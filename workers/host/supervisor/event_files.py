"""Read the metrics in TensorBoard event files and W&B run files that a job writes into its folder.

A record of an event file is a length, a checksum, an `Event` of protobuf, and a checksum. Only the fields of scalars
are read. A job can write anything into its folder, so links and other special files are skipped, and all sizes are
bounded.
"""

from __future__ import annotations

import os
import stat
import struct
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from contracts.telemetry.metrics import MetricItem, MetricSource
from workers.host.supervisor.protobuf import MALFORMED, iterate_fields
from workers.host.supervisor.wandb_files import read_history
from workers.metric_values import MetricCollector

MAX_FILES: Final = 16
MAX_ENTRIES: Final = 2000  # of folders, per search
MAX_LEVELS: Final = 4
MAX_READ_BYTES: Final = 2**20  # of a file per read
MAX_RECORD_BYTES: Final = 2**20  # larger records are skipped, for example images
NAME_PART: Final = "tfevents"
SEARCH_INTERVAL_S: Final = 10.0
WANDB_SUFFIX: Final = ".wandb"


class Scalar(NamedTuple):
    """A value of an event file."""

    tag: str
    step: int
    value: float


class EventFiles:
    """Follow the event files and W&B run files below folders that were written since the start of the job.

    Files of other users are skipped. `owners` are user IDs.
    """

    def __init__(self, folders: Sequence[Path], rank: int, owners: frozenset[int]) -> None:
        self._folders, self._owners, self._began_s = folders, owners, time.time()
        self._collector = MetricCollector(rank)
        self._offsets: dict[Path, int] = {}
        self._search_due_s = 0.0

    def read(self, called: Collection[MetricSource] = (), *, final: bool = False) -> list[MetricItem]:
        """Return the metrics of new records. With `final`, search for new files first.

        Args:
            called: Libraries whose calls the meter reads. The files of these libraries are skipped.
        """
        if final or time.monotonic() >= self._search_due_s:
            self._search_due_s = time.monotonic() + SEARCH_INTERVAL_S
            for path in self._find_files():
                if len(self._offsets) < MAX_FILES:
                    self._offsets.setdefault(path, 0)
        for path in self._offsets:
            if ("wandb" if path.suffix == WANDB_SUFFIX else "SummaryWriter") not in called:
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
                        elif (
                            _is_metric_file(entry.name) and entry.stat(follow_symlinks=False).st_mtime >= self._began_s
                        ):
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
        is_wandb = path.suffix == WANDB_SUFFIX
        self._offsets[path] += self._add_history(data, self._offsets[path]) if is_wandb else self._add_events(data)

    def _add_history(self, data: bytes, offset: int) -> int:
        history, used = read_history(data, offset)
        for step, values in history:
            self._collector.add("wandb", step, values)
        return used

    def _add_events(self, data: bytes) -> int:
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
        return used


def _is_metric_file(name: str) -> bool:
    return NAME_PART in name or (name.startswith("run-") and name.endswith(WANDB_SUFFIX))


def parse_event(event: bytes) -> list[Scalar]:
    """Return the scalars of a serialized `Event`. A malformed event has none."""
    try:
        step, scalars = 0, list[tuple[str, float]]()
        for number, value in iterate_fields(event):
            if number == 2 and isinstance(value, int):
                step = value
            elif number == 5 and isinstance(value, bytes):
                found = (_parse_value(part) for field, part in iterate_fields(value) if field == 1)
                scalars += [scalar for scalar in found if scalar is not None]
    except (*MALFORMED, struct.error):
        return []
    return [Scalar(tag, step, value) for tag, value in scalars]


def _parse_value(message: int | bytes) -> tuple[str, float] | None:
    """Return the tag and the number of a `Summary.Value`, None for other kinds of values."""
    tag, number = "", None
    if not isinstance(message, bytes):
        return None
    for field, value in iterate_fields(message):
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
    for field, value in iterate_fields(message):
        if field == 1 and isinstance(value, int):
            kind = value
        elif field in (4, 5, 6) and isinstance(value, bytes):
            content = value
    formats = {1: "<f", 2: "<d"}
    if kind not in formats or len(content) != struct.calcsize(formats[kind]):
        return None
    (number,) = struct.unpack(formats[kind], content)
    return float(number)
