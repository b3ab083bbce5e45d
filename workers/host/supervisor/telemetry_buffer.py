"""Telemetry that waits to be sent, in limited bytes. Dropped items are counted.

Timelines of steps: the last ones are stored, samples are sent at once, and stored ones are sent on request.

A step is sent when all ranks of this host have reported it. Two exceptions: the last steps of an attempt, and a
requested step that stays incomplete.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

import msgpack

from contracts.codec import MAX_BATCH_BYTES
from contracts.telemetry.batches import GapItem, Item
from contracts.telemetry.items import Cell, LogItem, TimelineItem, TrafficItem
from workers.host.supervisor.exit_report import MAX_CELLS, CellKey, get_cell_key
from workers.step_sampling import StepSampler

MAX_ITEMS = 20_000  # other than log lines
MAX_ITEMS_BYTES = 16 * 2**20
MAX_LOG_BYTES = 4 * 2**20
MAX_LATE_LOG_BYTES = 256 * 2**10  # of log lines that arrive faster than they can be sent
MAX_TIMELINE_BYTES = 4 * 2**20
MAX_SEGMENT_BYTES = 32 * 2**10  # of log lines in one item
ENVELOPE_BYTES = 1024  # of a batch without its items, but with a gap
CELLS_ENVELOPE_BYTES = 64
MAX_ITEM_BYTES = MAX_BATCH_BYTES - ENVELOPE_BYTES
EXIT_REPORT_ONLY = ("profile", "lab")
SAMPLED_BYTES_PER_S: Final = 256 * 2**10  # of an attempt, without requested steps
MAX_STEPS: Final = 64
MAX_STEPS_BYTES: Final = 8 * 2**20
LAST_STEPS: Final = 5  # sent when the attempt ends
MAX_REQUESTED: Final = 100
MAX_RANK_WAIT_S: Final = 3.0  # from the first rank of a step to the others


class SizedItem(NamedTuple):
    """An item and its bytes as msgpack."""

    item: Item
    size: int


class LogLane:
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

    def pop_state(self) -> int:
        """Remove the newest item if it holds only open lines. Return its bytes, or 0."""
        if not self.waiting or self.waiting[-1][0]["lines"] or "skipped" in self.waiting[-1][0]:
            return 0
        _, size = self.waiting.pop()
        self.size -= size
        return size


class PendingBatch(NamedTuple):
    """Items to send, and their bytes."""

    items: list[Item]
    size: int
    log_size: int


class TelemetryBuffer:
    """Four lanes with separate limits.

    Traffic cells are cumulative, so a newer cell replaces an older one, and nothing is lost. Log lines wait per rank.
    The oldest lines are dropped and counted as `skipped`. Timelines are sent last. The oldest steps are dropped whole
    without a count, because they are samples. Other items wait in order. The oldest are dropped and counted as a gap.
    """

    def __init__(self) -> None:
        self._others: deque[SizedItem] = deque()
        self._others_bytes = 0
        self._num_lost = 0
        self._logs: dict[int, LogLane] = {}
        self._log_bytes = 0
        self._skipped: dict[int, LogItem] = {}  # dropped lines of ranks without waiting lines
        self._traffic: dict[int, dict[CellKey, Cell]] = {}
        self._dropped_calls: dict[int, int] = {}
        self._timelines = TimelineQueue(MAX_TIMELINE_BYTES)

    def add_step(self, items: list[TimelineItem]) -> None:
        """Add the checked timelines of one step."""
        self._timelines.add(item for item in items if _measure(item) <= MAX_ITEM_BYTES)

    def add(self, item: Item) -> None:
        """Add a checked item other than a timeline."""
        if item["kind"] == "traffic":
            self._dropped_calls[item["rank"]] = item["dropped"]
            self._add_cells(item["rank"], item["cells"])
        elif item["kind"] == "log":
            for segment in _split(item):
                self._append_log(segment)
            self._drop_logs(MAX_LOG_BYTES)
        elif item["kind"] not in EXIT_REPORT_ONLY:
            size = _measure(item)
            if size > MAX_ITEM_BYTES:
                self._num_lost += 1
                return
            self._others.append(SizedItem(item, size))
            self._others_bytes += size
            while len(self._others) > MAX_ITEMS or self._others_bytes > MAX_ITEMS_BYTES:
                self._others_bytes -= self._others.popleft().size
                self._num_lost += 1

    def count_lost(self, count: int) -> None:
        """Count items that were rejected before they reached the buffer."""
        self._num_lost += count

    def take(self, max_bytes: int, max_log_bytes: int) -> PendingBatch | None:
        """Remove and return the items that fit, or None if there are none."""
        if max_bytes < ENVELOPE_BYTES:
            return None
        now = time.time()
        items: list[Item] = []
        left = max_bytes - ENVELOPE_BYTES
        if self._num_lost:
            items.append(GapItem(kind="gap", time=now, items=self._num_lost))
            self._num_lost = 0
        while self._others and self._others[0].size <= left:
            item, size = self._others.popleft()
            self._others_bytes -= size
            left -= size
            items.append(item)
        for rank in sorted(self._traffic):
            cells, size = self._take_cells(rank, left)
            left -= size
            if cells:
                dropped = self._dropped_calls.get(rank, 0)
                items.append(TrafficItem(kind="traffic", rank=rank, time=now, cells=cells, dropped=dropped))
        logs, log_size = self._take_logs(min(left, max_log_bytes))
        items += logs
        left -= log_size
        timelines, timeline_size = self._timelines.take(left)
        items += timelines
        return PendingBatch(items, max_bytes - left + timeline_size, log_size) if items else None

    def thin_logs(self) -> None:
        """Keep only the newest lines when lines arrive faster than they can be sent, so that logs stay current."""
        self._drop_logs(MAX_LATE_LOG_BYTES)

    def flush_skipped(self, *, late: bool) -> None:
        """Add an item with the number of dropped lines, after the last line.

        Args:
            late: drop all waiting lines too.
        """
        if late:
            self._drop_logs(0)
        skipped, self._skipped = self._skipped, {}
        for item in skipped.values():
            self._append_log(item)

    def is_empty(self) -> bool:
        has_logs = self._logs or self._skipped
        return not (self._num_lost or self._others or self._traffic or has_logs or self._timelines.num_bytes)

    def _add_cells(self, rank: int, cells: Iterable[Cell]) -> None:
        waiting = self._traffic.setdefault(rank, {})
        for cell in cells:
            if len(waiting) < MAX_CELLS or get_cell_key(cell) in waiting:
                waiting[get_cell_key(cell)] = cell
            else:
                self._num_lost += 1

    def _take_cells(self, rank: int, max_bytes: int) -> tuple[list[Cell], int]:
        waiting = self._traffic[rank]
        taken: list[Cell] = []
        size = CELLS_ENVELOPE_BYTES
        for key in list(waiting):
            cell_size = _measure(waiting[key])
            if size + cell_size > max_bytes:
                return taken, size if taken else 0
            size += cell_size
            taken.append(waiting.pop(key))
        del self._traffic[rank]
        return taken, size

    def _append_log(self, segment: LogItem) -> None:
        if earlier := self._skipped.pop(segment["rank"], None):
            segment["skipped"] = segment.get("skipped", 0) + earlier["skipped"]
        size, lane = _measure(segment), self._logs.setdefault(segment["rank"], LogLane())
        self._log_bytes += size - lane.pop_state()
        lane.append(segment, size)

    def _drop_logs(self, max_bytes: int) -> None:
        """Drop the oldest lines of the rank with the most waiting bytes."""
        while self._log_bytes > max_bytes:
            rank, lane = max(self._logs.items(), key=lambda entry: entry[1].size)
            segment, size = lane.pop()
            self._log_bytes -= size
            skipped = len(segment["lines"]) + segment.get("skipped", 0)
            if lane.waiting:
                oldest = lane.waiting[0][0]
                oldest["skipped"] = oldest.get("skipped", 0) + skipped
            else:
                next_line = segment["first"] + len(segment["lines"])
                self._skipped[rank] = _make_segment(segment, next_line, [], skipped)
                del self._logs[rank]

    def _take_logs(self, max_bytes: int) -> tuple[list[LogItem], int]:
        """Take one item per rank in turn, so that a rank with many lines does not delay the others."""
        taken: list[LogItem] = []
        used, has_taken = 0, True
        while has_taken:
            has_taken = False
            for rank in sorted(self._logs):
                lane = self._logs[rank]
                if used + lane.waiting[0][1] > max_bytes:
                    continue
                segment, size = lane.pop()
                if not lane.waiting:
                    del self._logs[rank]
                used += size
                taken.append(segment)
                has_taken = True
        self._log_bytes -= used
        return taken, used


def _split(item: LogItem) -> Iterator[LogItem]:
    """Split an item into segments of MAX_SEGMENT_BYTES. The first one has the skipped lines."""
    first, lines, size = item["first"], list[str](), 0
    skipped = item.get("skipped", 0)
    for line in item["lines"]:
        line_size = len(line.encode()) + 5
        if lines and size + line_size > MAX_SEGMENT_BYTES:
            yield _make_segment(item, first, lines, skipped)
            first, lines, size, skipped = first + len(lines), [], 0, 0
        lines.append(line)
        size += line_size
    if lines or skipped or "open" in item:
        segment = _make_segment(item, first, lines, skipped)
        if "open" in item:
            segment["open"] = item["open"]
        yield segment


def _make_segment(item: LogItem, first: int, lines: list[str], skipped: int) -> LogItem:
    segment = LogItem(kind="log", rank=item["rank"], time=item["time"], first=first, lines=lines)
    if skipped:
        segment["skipped"] = skipped
    return segment


def _measure(value: object) -> int:
    return len(msgpack.packb(value))


class StepTimeline:
    """Timelines of the ranks for one step."""

    def __init__(self) -> None:
        self.items: dict[int, TimelineItem] = {}
        self.num_bytes = 0
        self.created = time.monotonic()
        self.is_sent = False

    def add(self, item: TimelineItem) -> int:
        """Add the timeline of a rank, and return its bytes."""
        num_bytes = len(msgpack.packb(item))
        self.items[item["rank"]] = item
        self.num_bytes += num_bytes
        return num_bytes


class TimelineSampler:
    """Select the steps of one attempt on this host. `send` gets the items of a step."""

    def __init__(self, ranks: Iterable[int], send: Callable[[list[TimelineItem]], None]) -> None:
        self._ranks, self._send = frozenset(ranks), send
        self._steps: dict[int, StepTimeline] = {}
        self._num_bytes = 0
        self._requested: frozenset[int] = frozenset()
        self._sampler = StepSampler(SAMPLED_BYTES_PER_S)
        self._finished = False
        self._last_sample: tuple[int, float] | None = None  # step, and when it began

    def add(self, item: TimelineItem) -> None:
        """Add one checked item."""
        number = item["step"]
        step = self._steps.setdefault(number, StepTimeline())
        if item["rank"] in step.items:
            return
        self._num_bytes += step.add(item)
        while self._steps and (len(self._steps) > MAX_STEPS or self._num_bytes > MAX_STEPS_BYTES):
            self._num_bytes -= self._steps.pop(min(self._steps)).num_bytes
        if step.is_sent:  # it was requested, and sent incomplete
            self._send([item])
        elif step.items.keys() >= self._ranks and self._is_selected(number, step):
            self._send_step(step)

    def request(self, steps: Iterable[int]) -> None:
        """Send these steps if they are stored, or else when they arrive."""
        self._requested = frozenset(sorted(steps)[-MAX_REQUESTED:])
        deadline = time.monotonic() - MAX_RANK_WAIT_S
        for number in sorted(self._requested & self._steps.keys()):
            step = self._steps[number]
            if not step.is_sent and (step.items.keys() >= self._ranks or step.created < deadline):
                self._send_step(step)

    def finish(self) -> None:
        """Send the last steps, because the attempt has ended."""
        self._finished = True
        for number in sorted(self._steps)[-LAST_STEPS:]:
            if not self._steps[number].is_sent:
                self._send_step(self._steps[number])

    def _is_selected(self, number: int, step: StepTimeline) -> bool:
        if not self._sampler.should_trace(number):
            return self._finished or number in self._requested
        began = max(item["began"] for item in step.items.values())
        if self._last_sample is not None and number > self._last_sample[0]:
            last_number, last_began = self._last_sample
            self._sampler.record_traced_step(step.num_bytes, (began - last_began) / (number - last_number))
        self._last_sample = (number, began)
        return True

    def _send_step(self, step: StepTimeline) -> None:
        step.is_sent = True
        self._send([step.items[rank] for rank in sorted(step.items)])


class TimelineQueue:
    """Steps that wait to be sent, in limited bytes. The oldest steps are dropped whole, unless a part was sent."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._steps: list[list[tuple[TimelineItem, int]]] = []
        self._is_first_partial = False
        self.num_bytes = 0

    def add(self, items: Iterable[TimelineItem]) -> None:
        step = [(item, len(msgpack.packb(item))) for item in items]
        self._steps.append(step)
        self.num_bytes += sum(size for _, size in step)
        while self.num_bytes > self._max_bytes and len(self._steps) > self._is_first_partial:
            dropped = self._steps.pop(1 if self._is_first_partial else 0)
            self.num_bytes -= sum(size for _, size in dropped)

    def take(self, max_bytes: int) -> tuple[list[TimelineItem], int]:
        """Remove and return the items that fit, and their bytes."""
        taken: list[TimelineItem] = []
        used = 0
        while self._steps and used + self._steps[0][0][1] <= max_bytes:
            item, size = self._steps[0].pop(0)
            used += size
            taken.append(item)
            self._is_first_partial = bool(self._steps[0])
            if not self._is_first_partial:
                self._steps.pop(0)
        self.num_bytes -= used
        return taken, used
