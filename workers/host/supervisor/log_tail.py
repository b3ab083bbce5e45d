"""Follow the log files of an attempt's ranks with limited reads, and limit their size on disk."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from contracts.telemetry.items import LogItem
from workers.host.rank_files import LAUNCHER_RANK, find_run_folder, limit_log_size, open_log

log = logging.getLogger(__name__)

MAX_LINE_CHARS = 4096
MAX_READ_BYTES = 256 * 1024  # of one log per read
MAX_COUNTED_BYTES = 8 * 2**20  # of all logs per read, to count lines that are left out
TAIL_LINES = 40
FOLLOW_INTERVAL_S = 0.25


class LogFile(NamedTuple):
    """A file below the log folder, and the rank that writes it."""

    path: tuple[str, ...]
    rank: int
    is_error: bool


class LogTail:
    """New complete lines per rank, of the files that torchrun writes for these ranks. Thread-safe.

    Of a log that grows by more than MAX_READ_BYTES between two reads, the middle is left out. The lines left out are
    counted. If there are too many bytes to count lines, a line says how many bytes are left out.
    """

    def __init__(self, folder: Path, ranks: range, log_bytes: int, owners: frozenset[int]) -> None:
        self._folder, self._ranks, self._log_bytes, self._owners = folder, ranks, log_bytes, owners
        self._offsets: dict[LogFile, int] = {}
        self._next_line: dict[int, int] = {}
        self._last_lines: dict[int, deque[str]] = {}
        self._last_error: dict[int, str] = {}
        self._run: str | None = None
        self._lock = threading.Lock()

    def read(self, *, final: bool = False) -> list[LogItem]:
        """Return new lines. With `final`, an incomplete last line too."""
        with self._lock:
            items, countable_bytes = [], MAX_COUNTED_BYTES
            for file in self._list_files():
                descriptor = open_log(self._folder, file.path, self._owners)
                if descriptor is None:
                    continue
                try:
                    lines, skipped, counted_bytes = self._read_lines(file, descriptor, final, countable_bytes)
                    limit_log_size(descriptor, self._log_bytes)
                finally:
                    os.close(descriptor)
                countable_bytes -= counted_bytes
                if lines or skipped:
                    items.append(self._make_item(file, lines, skipped))
            return items

    def get_last_lines(self, rank: int) -> list[str]:
        return list(self._last_lines.get(rank, ()))

    def get_last_error(self, rank: int) -> str:
        """Return the last line with text that a rank wrote to stderr."""
        return self._last_error.get(rank, "")

    def _list_files(self) -> list[LogFile]:
        files = [LogFile(("launcher.log",), LAUNCHER_RANK, True)]
        self._run = self._run or find_run_folder(self._folder)
        if self._run is not None:
            for local_rank, rank in enumerate(self._ranks):
                folder = (self._run, "attempt_0", str(local_rank))
                files += [LogFile((*folder, "stderr.log"), rank, True), LogFile((*folder, "stdout.log"), rank, False)]
        return files

    def _make_item(self, file: LogFile, lines: list[str], skipped: int) -> LogItem:
        first = self._next_line.get(file.rank, 0) + skipped
        self._next_line[file.rank] = first + len(lines)
        self._last_lines.setdefault(file.rank, deque(maxlen=TAIL_LINES)).extend(lines)
        if file.is_error and (last := next((line for line in reversed(lines) if line.strip()), "")):
            self._last_error[file.rank] = last
        item = LogItem(kind="log", rank=file.rank, time=time.time(), first=first, lines=lines)
        if skipped:
            item["skipped"] = skipped
        return item

    def _read_lines(
        self, file: LogFile, descriptor: int, final: bool, countable_bytes: int
    ) -> tuple[list[str], int, int]:
        """Return the lines, the number of lines left out before them, and the bytes read to count these."""
        offset, size = self._offsets.get(file, 0), os.fstat(descriptor).st_size
        if size < offset:  # the rank started its log again
            offset = 0
        lines: list[str] = []
        skipped = counted_bytes = 0
        uncounted = size - MAX_READ_BYTES - offset - max(0, countable_bytes)
        if uncounted > 0:
            lines.append(f"[{uncounted:,} bytes of this log are not shown, and their lines are not counted]")
            offset += uncounted
        while size - offset > MAX_READ_BYTES:
            chunk = os.pread(descriptor, min(MAX_READ_BYTES, size - MAX_READ_BYTES - offset), offset)
            if not chunk:
                break
            skipped += chunk.count(b"\n")
            counted_bytes += len(chunk)
            offset += len(chunk)
        new = os.pread(descriptor, size - offset, offset)
        if not final and not new.endswith(b"\n"):
            new = new[: new.rfind(b"\n") + 1]
        self._offsets[file] = offset + len(new)
        text = new.decode("utf-8", "replace").replace("\0", "\ufffd").split("\n")
        lines += [line[:MAX_LINE_CHARS] for line in (text if text[-1] else text[:-1])]
        return lines, skipped, counted_bytes


async def follow_logs(
    get_tail: Callable[[], LogTail | None], add: Callable[[LogItem], None], finished: asyncio.Event
) -> None:
    """Add new lines until `finished` is set, as soon as there is a tail.

    Reads run in a thread, because a disk can block, and the ranks' records and the cancel flag must not wait for it.
    """
    final = False
    while not final:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FOLLOW_INTERVAL_S):
                await finished.wait()
        final = finished.is_set()
        tail = get_tail()
        if tail is None:
            continue
        try:
            for item in await asyncio.to_thread(tail.read, final=final):
                add(item)
        except OSError as error:
            log.warning("cannot read the logs: %s", error)
