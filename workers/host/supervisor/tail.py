"""Follows the log files of all ranks, in bounded bites."""

from __future__ import annotations

import re
import time
from collections import deque
from pathlib import Path

from contracts.telemetry import LogItem

LAUNCHER = -1
LINE_CHARS = 4096
BITE_BYTES = 256 * 1024
TAIL_LINES = 40
RANK_FOLDER = re.compile(r"attempt_\d+/(\d+)/(?:stdout|stderr)\.log$")


class LogTail:
    """New complete lines since the last look, by rank. A log that grows by more than BITE_BYTES between two looks
    is cut: the rest of the growth is counted in lines, not kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._next_line: dict[int, int] = {}
        self._last: dict[int, deque[str]] = {}

    def read(self, *, final: bool = False) -> list[LogItem]:
        """Lines that are new; with `final` an unfinished last line too."""
        items = []
        for path in sorted(self._folder.rglob("*.log")):
            rank = self._rank(path)
            if rank is None:
                continue
            lines, skipped = self._new_lines(path, final)
            if not lines and not skipped:
                continue
            first = self._next_line.get(rank, 0) + skipped
            self._next_line[rank] = first + len(lines)
            self._last.setdefault(rank, deque(maxlen=TAIL_LINES)).extend(lines)
            item = LogItem(kind="log", rank=rank, time=time.time(), first=first, lines=lines)
            if skipped:
                item["skipped"] = skipped
            items.append(item)
        return items

    def last_lines(self, rank: int) -> list[str]:
        return list(self._last.get(rank, ()))

    def _rank(self, path: Path) -> int | None:
        if path.name == "launcher.log":
            return LAUNCHER
        match = RANK_FOLDER.search(str(path))
        return int(match.group(1)) if match else None

    def _new_lines(self, path: Path, final: bool) -> tuple[list[str], int]:
        offset = self._offsets.get(path, 0)
        size = path.stat().st_size
        skipped = 0
        with path.open("rb") as log:
            log.seek(offset)
            while size - offset > BITE_BYTES:
                skipped_bytes = log.read(BITE_BYTES)
                skipped += skipped_bytes.count(b"\n")
                offset += len(skipped_bytes)
            new = log.read(size - offset)
        if not final and not new.endswith(b"\n"):
            new = new[: new.rfind(b"\n") + 1]
        self._offsets[path] = offset + len(new)
        lines = [line[:LINE_CHARS] for line in new.decode("utf-8", "replace").split("\n")]
        if lines and not lines[-1]:
            lines.pop()
        return [line.replace("\0", "\ufffd") for line in lines], skipped
