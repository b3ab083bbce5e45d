"""Follow the log files of an attempt's ranks with limited reads, and limit their size on disk."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import NamedTuple

from contracts.telemetry.items import MAX_OPEN_CHARS, MAX_OPEN_LINE_CHARS, MAX_OPEN_LINES, LogItem
from contracts.terminal_text import TerminalText, shorten_line
from workers.host.rank_files import LAUNCHER_RANK, LAUNCHER_STDOUT, find_run_folder, limit_log_size, open_log
from workers.host.supervisor.failure_evidence import ErrorOutput, FailureEvidence

log = logging.getLogger(__name__)

MAX_READ_BYTES = 256 * 1024  # of one log per read
MAX_COUNTED_BYTES = 8 * 2**20  # of all logs per read, to count lines that are left out
MAX_REWRITTEN_LINES = 20_000  # of all logs per read, about 0.1 s of a CPU
MIN_REWRITTEN_LINES = 1_000  # of one log per read
TAIL_LINES = 40
FOLLOW_INTERVAL_S = 0.25
OPEN_INTERVAL_S = 1.0  # between two states of lines that change
SETTLE_S = 2.0  # without a change, until a finished line above the cursor is complete


class LogFile(NamedTuple):
    """A file below the log folder, and the rank that writes it."""

    path: tuple[str, ...]
    rank: int
    is_error: bool


class LogPart(NamedTuple):
    """Complete lines of a file, and the number of lines left out before them."""

    lines: list[str]
    skipped: int = 0


def _merge(parts: Iterator[LogPart]) -> list[LogPart]:
    """Join parts that have nothing left out between them."""
    merged: list[LogPart] = []
    for part in parts:
        if merged and not part.skipped:
            merged[-1].lines.extend(part.lines)
        else:
            merged.append(part)
    return merged


class Budget:
    """Limits of one read of all logs."""

    def __init__(self) -> None:
        self.countable_bytes, self.rewritten_lines = MAX_COUNTED_BYTES, MAX_REWRITTEN_LINES


class FollowedFile:
    """A log file that is read as a terminal shows it."""

    def __init__(self) -> None:
        self._offset, self._settled_s = 0, time.monotonic()
        self._text = TerminalText()

    def get_open_lines(self) -> list[str]:
        return self._text.get_open_lines()

    def read(self, descriptor: int, budget: Budget, *, final: bool) -> Iterator[LogPart]:
        """Yield what the file has in addition to the last read."""
        size = os.fstat(descriptor).st_size
        if size < self._offset:  # the rank started its log again
            yield LogPart(self._text.feed(b"", final=True))
            self._offset = 0
        uncounted = size - MAX_READ_BYTES - self._offset - max(0, budget.countable_bytes)
        if uncounted > 0:
            lines = self._text.feed(b"", final=True)
            yield LogPart([*lines, f"[{uncounted:,} bytes of this log are not shown, and their lines are not counted]"])
            self._offset += uncounted
        skipped = 0
        while size - self._offset > MAX_READ_BYTES:
            wanted = min(MAX_READ_BYTES, size - MAX_READ_BYTES - self._offset)
            chunk = os.pread(descriptor, wanted, self._offset)
            if not chunk:
                break
            budget.countable_bytes -= len(chunk)
            self._offset += len(chunk)
            skipped += yield from self._skip(chunk)
        data = os.pread(descriptor, size - self._offset, self._offset)
        self._offset += len(data)
        shown = _limit_rewritten_lines(data, budget)
        if len(shown) < len(data):
            skipped += yield from self._skip(data[: len(data) - len(shown)])
        lines = self._text.feed(shown, final=final)
        if time.monotonic() - self._settled_s >= SETTLE_S:
            lines += self._text.settle()
            self._settled_s = time.monotonic()
        if lines or skipped:
            yield LogPart(lines, skipped)

    def _skip(self, data: bytes) -> Generator[LogPart, None, int]:
        """Leave out some bytes. Yield lines that are complete by this, and return the number of lines left out."""
        newlines, was_empty = data.count(b"\n"), self._text.is_line_empty
        if lines := self._text.skip(data):
            yield LogPart(lines)
        return newlines - (newlines > 0 and not was_empty)


def _limit_rewritten_lines(data: bytes, budget: Budget) -> bytes:
    """Return the end of some bytes, with as many changes of written lines as the budget allows."""
    allowed = max(MIN_REWRITTEN_LINES, budget.rewritten_lines)
    while (rewritten := _count_rewritten_lines(data)) > allowed:
        data = data[len(data) // 2 :]
    budget.rewritten_lines -= rewritten
    return data


def _count_rewritten_lines(data: bytes) -> int:
    # Carriage returns within one line cost nothing, because its last state is its text.
    returns = data.count(b"\r") - data.count(b"\r\n")
    return data.count(b"\x1b[") * (returns > 0) + data.count(b"\b") + min(returns, data.count(b"\n"))


class LogTail:
    """New lines per rank, of the files that torchrun writes for these ranks. Thread-safe.

    Of a log that grows by more than MAX_READ_BYTES between two reads, the middle is left out. The lines left out are
    counted. If there are too many bytes to count lines, a line says how many bytes are left out.
    """

    def __init__(self, folder: Path, ranks: range, log_bytes: int, owners: frozenset[int]) -> None:
        self._folder, self._ranks, self._log_bytes, self._owners = folder, ranks, log_bytes, owners
        self._files: dict[LogFile, FollowedFile] = {}
        self._next_line: dict[int, int] = {}
        self._open_lines: dict[int, tuple[list[str], float]] = {}  # as last sent, and when
        self._last_lines: dict[int, deque[str]] = {}
        self._last_error: dict[int, str] = {}
        self._errors: dict[int, ErrorOutput] = {}
        self._run: str | None = None
        self._lock = threading.Lock()

    def read(self, *, final: bool = False) -> list[LogItem]:
        """Return new lines, and the lines that can still change. With `final`, all lines are complete."""
        with self._lock:
            items: dict[int, list[LogItem]] = {}
            open_lines: dict[int, list[str]] = {}
            budget = Budget()
            for file in self._list_files():
                descriptor = open_log(self._folder, file.path, self._owners)
                if descriptor is None:
                    continue
                followed = self._files.setdefault(file, FollowedFile())
                try:
                    parts = _merge(followed.read(descriptor, budget, final=final))
                    limit_log_size(descriptor, self._log_bytes)
                finally:
                    os.close(descriptor)
                items.setdefault(file.rank, []).extend(self._make_item(file, part) for part in parts)
                open_lines.setdefault(file.rank, []).extend(followed.get_open_lines())
            for rank, lines in open_lines.items():
                self._add_open_lines(rank, items[rank], _limit_open_lines(lines))
            return [item for rank_items in items.values() for item in rank_items]

    def get_last_lines(self, rank: int) -> list[str]:
        return list(self._last_lines.get(rank, ()))

    def get_last_error(self, rank: int) -> str:
        """Return the last line with text that a rank wrote to stderr."""
        return self._last_error.get(rank, "")

    def find_evidence(self, rank: int, recorded: str, *, by_signal: bool) -> FailureEvidence:
        """Return the evidence of the failure of a rank, see `ErrorOutput.find_evidence`."""
        errors = self._errors.get(rank)
        return errors.find_evidence(recorded, by_signal=by_signal) if errors else FailureEvidence(recorded)

    def _list_files(self) -> list[LogFile]:
        files = [LogFile(("launcher.log",), LAUNCHER_RANK, True), LogFile((LAUNCHER_STDOUT,), LAUNCHER_RANK, False)]
        self._run = self._run or find_run_folder(self._folder)
        if self._run is not None:
            for local_rank, rank in enumerate(self._ranks):
                folder = (self._run, "attempt_0", str(local_rank))
                files += [LogFile((*folder, "stderr.log"), rank, True), LogFile((*folder, "stdout.log"), rank, False)]
        return files

    def _make_item(self, file: LogFile, part: LogPart) -> LogItem:
        first = self._next_line.get(file.rank, 0) + part.skipped
        self._next_line[file.rank] = first + len(part.lines)
        self._last_lines.setdefault(file.rank, deque(maxlen=TAIL_LINES)).extend(part.lines)
        if file.is_error:
            self._errors.setdefault(file.rank, ErrorOutput()).add(part.lines)
        if file.is_error and (last := next((line for line in reversed(part.lines) if line.strip()), "")):
            self._last_error[file.rank] = last
        item = LogItem(kind="log", rank=file.rank, time=time.time(), first=first, lines=part.lines)
        if part.skipped:
            item["skipped"] = part.skipped
        return item

    def _add_open_lines(self, rank: int, items: list[LogItem], lines: list[str]) -> None:
        """Add the lines that can still change to the last item of a rank, if there is news."""
        now = time.monotonic()
        last_lines, last_s = self._open_lines.get(rank, ([], 0.0))
        if not items:
            if lines == last_lines or now - last_s < OPEN_INTERVAL_S:
                return
            first = self._next_line.get(rank, 0)
            items.append(LogItem(kind="log", rank=rank, time=time.time(), first=first, lines=[]))
        items[-1]["open"] = lines
        self._open_lines[rank] = lines, now


def _limit_open_lines(lines: list[str]) -> list[str]:
    """Return the last lines within the limits of an item."""
    shortened = [shorten_line(line, MAX_OPEN_LINE_CHARS) for line in lines[-MAX_OPEN_LINES:]]
    while sum(map(len, shortened)) > MAX_OPEN_CHARS:
        del shortened[0]
    return shortened


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
