"""Follows the log files of an attempt's ranks, in bounded bites, and keeps them bounded on disk."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from contracts.telemetry.steps import LogItem
from workers.host.supervisor.logfile import cap, open_log, run_folder

LAUNCHER = -1
LINE_CHARS = 4096
BITE_BYTES = 256 * 1024  # of one log kept at a look
COUNTED_BYTES = 8 * 2**20  # of all logs read at a look to count the lines that are left out
TAIL_LINES = 40


class Log(NamedTuple):
    """A file below the log folder, and whose words are in it."""

    path: tuple[str, ...]
    rank: int
    is_error: bool


class LogTail:
    """New complete lines since the last look, by rank, of exactly the files that torchrun writes for these ranks.

    A log that grows by more than BITE_BYTES between two looks is cut: lines left out are counted, and where there are
    too many bytes to count lines in, a line says how many bytes. Safe to call from a thread; it blocks on disks only.
    """

    def __init__(self, folder: Path, ranks: range, log_bytes: int, owners: frozenset[int]) -> None:
        self._folder, self._ranks, self._log_bytes, self._owners = folder, ranks, log_bytes, owners
        self._offsets: dict[Log, int] = {}
        self._next_line: dict[int, int] = {}
        self._last: dict[int, deque[str]] = {}
        self._last_error: dict[int, str] = {}
        self._run: str | None = None
        self._lock = threading.Lock()

    def read(self, *, final: bool = False) -> list[LogItem]:
        """Lines that are new; with `final` an unfinished last line too."""
        with self._lock:
            items, countable = [], COUNTED_BYTES
            for log in self._logs():
                descriptor = open_log(self._folder, log.path, self._owners)
                if descriptor is None:
                    continue
                try:
                    lines, skipped, counted = self._new_lines(log, descriptor, final, countable)
                    cap(descriptor, self._log_bytes)
                finally:
                    os.close(descriptor)
                countable -= counted
                if lines or skipped:
                    items.append(self._item(log, lines, skipped))
            return items

    def last_lines(self, rank: int) -> list[str]:
        return list(self._last.get(rank, ()))

    def last_error(self, rank: int) -> str:
        """The last line with anything in it that a rank wrote to stderr."""
        return self._last_error.get(rank, "")

    def _logs(self) -> list[Log]:
        found = [Log(("launcher.log",), LAUNCHER, True)]
        self._run = self._run or run_folder(self._folder)
        if self._run is not None:
            for local, rank in enumerate(self._ranks):
                folder = (self._run, "attempt_0", str(local))
                found += [Log((*folder, "stderr.log"), rank, True), Log((*folder, "stdout.log"), rank, False)]
        return found

    def _item(self, log: Log, lines: list[str], skipped: int) -> LogItem:
        first = self._next_line.get(log.rank, 0) + skipped
        self._next_line[log.rank] = first + len(lines)
        self._last.setdefault(log.rank, deque(maxlen=TAIL_LINES)).extend(lines)
        if log.is_error and (said := next((line for line in reversed(lines) if line.strip()), "")):
            self._last_error[log.rank] = said
        item = LogItem(kind="log", rank=log.rank, time=time.time(), first=first, lines=lines)
        if skipped:
            item["skipped"] = skipped
        return item

    def _new_lines(self, log: Log, descriptor: int, final: bool, countable: int) -> tuple[list[str], int, int]:
        """Lines; lines left out before them; bytes read to count these."""
        offset, size = self._offsets.get(log, 0), os.fstat(descriptor).st_size
        if size < offset:  # the rank wrote its log anew
            offset = 0
        lines: list[str] = []
        skipped = counted = 0
        unseen = size - BITE_BYTES - offset - max(0, countable)
        if unseen > 0:
            lines.append(f"[{unseen:,} bytes of this log are not shown, and their lines are not counted]")
            offset += unseen
        while size - offset > BITE_BYTES:
            left_out = os.pread(descriptor, min(BITE_BYTES, size - BITE_BYTES - offset), offset)
            if not left_out:
                break
            skipped += left_out.count(b"\n")
            counted += len(left_out)
            offset += len(left_out)
        new = os.pread(descriptor, size - offset, offset)
        if not final and not new.endswith(b"\n"):
            new = new[: new.rfind(b"\n") + 1]
        self._offsets[log] = offset + len(new)
        text = new.decode("utf-8", "replace").replace("\0", "\ufffd").split("\n")
        lines += [line[:LINE_CHARS] for line in (text if text[-1] else text[:-1])]
        return lines, skipped, counted
