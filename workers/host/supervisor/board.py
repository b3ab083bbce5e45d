"""What waits to be sent to Redis, in bounded bytes; what had to go is counted."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgpack

from contracts.codec import MAX_BATCH_BYTES
from contracts.telemetry.batches import GapItem, Item
from contracts.telemetry.steps import Cell, LogItem, TrafficItem
from contracts.telemetry.timeline import TimelineItem
from workers.host.supervisor.tally import MAX_CELLS, CellKey, cell_key
from workers.host.supervisor.timelines import StepLane

MAX_WAITING = 20_000  # items that are no logs
WAITING_BYTES = 16 * 2**20  # of these
LOG_BYTES = 4 * 2**20  # of log lines that wait
LATE_LOG_BYTES = 256 * 2**10  # of these, once they come faster than they may be sent
STEPS_BYTES = 4 * 2**20  # of steps told event by event
SEGMENT_BYTES = 32 * 2**10  # of log lines in one item
ENVELOPE_BYTES = 1024  # of a batch around its items, with a gap
MOST_BYTES = MAX_BATCH_BYTES - ENVELOPE_BYTES  # of one item

NOT_SHOWN = ("profile", "lab")  # for the exit report, not for the page


class Sized(NamedTuple):
    """An item and its bytes as msgpack."""

    item: Item
    size: int


class Lane:
    """Log items of one rank, oldest first, and their bytes."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[LogItem, int]] = deque()
        self.size = 0

    def append(self, item: LogItem, size: int) -> None:
        self.waiting.append((item, size))
        self.size += size

    def pop(self) -> tuple[LogItem, int]:
        item, size = self.waiting.popleft()
        self.size -= size
        return item, size


class Load(NamedTuple):
    """Items on their way, and their bytes."""

    items: list[Item]
    size: int
    log_size: int


class Board:
    """Four lanes. Traffic cells are cumulative: a newer one replaces an older one, so they are thinned and nothing
    is lost. Log lines wait by rank; the oldest go first and are counted as `skipped`. Steps event by event come last;
    the oldest go whole, uncounted: they are samples. Everything else waits in order; the oldest go first and are
    counted as a gap."""

    def __init__(self) -> None:
        self._others: deque[Sized] = deque()
        self._others_bytes = 0
        self._lost = 0
        self._logs: dict[int, Lane] = {}
        self._log_bytes = 0
        self._skipped: dict[int, LogItem] = {}  # lines dropped with none of their rank waiting behind them
        self._traffic: dict[int, dict[CellKey, Cell]] = {}
        self._dropped: dict[int, int] = {}
        self._steps = StepLane(STEPS_BYTES)

    def add_step(self, items: list[TimelineItem]) -> None:
        """Take the checked items of one step, of which none is alone."""
        self._steps.add(item for item in items if _size(item) <= MOST_BYTES)

    def add(self, item: Item) -> None:
        """Take one checked item, no timeline."""
        if item["kind"] == "traffic":
            self._dropped[item["rank"]] = item["dropped"]
            self._add_cells(item["rank"], item["cells"])
        elif item["kind"] == "log":
            for segment in _segments(item):
                self._append_log(segment)
            self._drop_logs(LOG_BYTES)
        elif item["kind"] not in NOT_SHOWN:
            size = _size(item)
            if size > MOST_BYTES:
                self._lost += 1
                return
            self._others.append(Sized(item, size))
            self._others_bytes += size
            self._drop_others()

    def lose(self, count: int) -> None:
        """Something was refused before it got here."""
        self._lost += count

    def take(self, room: int, log_room: int) -> Load | None:
        """What fits into `room` bytes, of which logs have `log_room`; None when nothing does or nothing waits."""
        if room < ENVELOPE_BYTES:
            return None
        now = time.time()
        items: list[Item] = []
        left = room - ENVELOPE_BYTES
        if self._lost:
            items.append(GapItem(kind="gap", time=now, items=self._lost))
            self._lost = 0
        while self._others and self._others[0].size <= left:
            item, size = self._others.popleft()
            self._others_bytes -= size
            left -= size
            items.append(item)
        for rank in sorted(self._traffic):
            cells, size = self._take_cells(rank, left)
            left -= size
            if cells:
                dropped = self._dropped.get(rank, 0)
                items.append(TrafficItem(kind="traffic", rank=rank, time=now, cells=cells, dropped=dropped))
        logs, log_size = self._take_logs(min(left, log_room))
        items += logs
        left -= log_size
        steps, step_size = self._steps.take(left)
        items += steps
        if not items:
            return None
        return Load(items, room - left + step_size, log_size)

    def thin_logs(self) -> None:
        """Lines come faster than they may be sent: keep the newest, so that what is shown is not long past."""
        self._drop_logs(LATE_LOG_BYTES)

    def tell_skipped(self, *, late: bool) -> None:
        """No line comes any more: those dropped with none behind them are counted in an item of their own. `late`: so
        are those that wait."""
        if late:
            self._drop_logs(0)
        told, self._skipped = self._skipped, {}
        for item in told.values():
            self._append_log(item)

    def is_empty(self) -> bool:
        logs, steps = self._logs or self._skipped, self._steps.num_bytes
        return not (self._lost or self._others or self._traffic or logs or steps)

    def _drop_others(self) -> None:
        while len(self._others) > MAX_WAITING or self._others_bytes > WAITING_BYTES:
            self._others_bytes -= self._others.popleft().size
            self._lost += 1

    def _add_cells(self, rank: int, cells: Iterable[Cell]) -> None:
        held = self._traffic.setdefault(rank, {})
        for cell in cells:
            if len(held) < MAX_CELLS or cell_key(cell) in held:
                held[cell_key(cell)] = cell
            else:
                self._lost += 1

    def _take_cells(self, rank: int, room: int) -> tuple[list[Cell], int]:
        held = self._traffic[rank]
        taken: list[Cell] = []
        size = 64  # of the item around them
        for key in list(held):
            cell_size = _size(held[key])
            if size + cell_size > room:
                return taken, size if taken else 0
            size += cell_size
            taken.append(held.pop(key))
        del self._traffic[rank]
        return taken, size

    def _append_log(self, segment: LogItem) -> None:
        if before := self._skipped.pop(segment["rank"], None):
            segment["skipped"] = segment.get("skipped", 0) + before["skipped"]
        size = _size(segment)
        self._logs.setdefault(segment["rank"], Lane()).append(segment, size)
        self._log_bytes += size

    def _drop_logs(self, most: int) -> None:
        """The rank with most lines waiting loses its oldest."""
        while self._log_bytes > most:
            rank, lane = max(self._logs.items(), key=lambda entry: entry[1].size)
            segment, size = lane.pop()
            self._log_bytes -= size
            skipped = len(segment["lines"]) + segment.get("skipped", 0)
            if lane.waiting:
                oldest = lane.waiting[0][0]
                oldest["skipped"] = oldest.get("skipped", 0) + skipped
            else:
                behind = segment["first"] + len(segment["lines"])
                self._skipped[rank] = _segment(segment, behind, [], skipped)
                del self._logs[rank]

    def _take_logs(self, room: int) -> tuple[list[LogItem], int]:
        """Of each rank in turn, so that a loud one does not silence the others."""
        taken: list[LogItem] = []
        used, some = 0, True
        while some:
            some = False
            for rank in sorted(self._logs):
                lane = self._logs[rank]
                if used + lane.waiting[0][1] > room:
                    continue
                segment, size = lane.pop()
                if not lane.waiting:
                    del self._logs[rank]
                used += size
                taken.append(segment)
                some = True
        self._log_bytes -= used
        return taken, used


def _segments(item: LogItem) -> Iterator[LogItem]:
    """The item in pieces of SEGMENT_BYTES; what was skipped stands before the first."""
    first, lines, size = item["first"], list[str](), 0
    skipped = item.get("skipped", 0)
    for line in item["lines"]:
        line_size = len(line.encode()) + 5
        if lines and size + line_size > SEGMENT_BYTES:
            yield _segment(item, first, lines, skipped)
            first, lines, size, skipped = first + len(lines), [], 0, 0
        lines.append(line)
        size += line_size
    if lines or skipped:
        yield _segment(item, first, lines, skipped)


def _segment(item: LogItem, first: int, lines: list[str], skipped: int) -> LogItem:
    segment = LogItem(kind="log", rank=item["rank"], time=item["time"], first=first, lines=lines)
    if skipped:
        segment["skipped"] = skipped
    return segment


def _size(value: object) -> int:
    return len(msgpack.packb(value))
