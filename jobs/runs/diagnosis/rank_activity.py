"""Track the latest activity of each rank: progress, processes, and devices."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import NamedTuple

from contracts.telemetry.batches import Item
from contracts.telemetry.health import GaugeItem, ProcessItem, StallItem
from contracts.telemetry.vocabulary import Phase
from jobs.runs.diagnosis.findings import format_seconds


class RankProgress:
    """Record when anything last ended on a rank, by the board's clock.

    Progress is the end of a collective, a step, or a stage of the start, a new phase, a checkpoint, or a validation.
    """

    def __init__(self) -> None:
        self._completed: dict[int, dict[tuple[str, str, str, int], int]] = {}
        self._last: dict[int, float] = {}
        self.phases: dict[int, Phase] = {}
        self.blocked: dict[int, StallItem] = {}
        self.last_contact: dict[int, float] = {}  # by node

    def add(self, item: Item, node: int) -> None:
        time = item["time"]
        self.last_contact[node] = max(time, self.last_contact.get(node, time))
        match item["kind"]:
            case "traffic":
                known = self._completed.setdefault(item["rank"], {})
                before = sum(known.values())
                for cell in item["cells"]:
                    known[cell["phase"], cell["op"], cell["axis"], cell["group_size"]] = cell["completed"]
                if sum(known.values()) != before:
                    self._record_progress(item["rank"], time)
            case "standing":
                self._update_blocked(item)
            case "phase":
                self.phases[item["rank"]] = item["phase"]
                self._record_progress(item["rank"], time)
            case "step" | "eval" | "checkpoint" | "start" | "proof" | "verdict":
                self._record_progress(item["rank"], time)
            case _:
                pass

    def _update_blocked(self, item: StallItem) -> None:
        rank = item["rank"]
        self._record_progress(rank, item["time"] - item["still"])
        if item["still"] > 0:
            self.blocked[rank] = item
        else:
            self.blocked.pop(rank, None)

    def _record_progress(self, rank: int, time: float) -> None:
        if rank < 0:
            return
        self._last[rank] = max(time, self._last.get(rank, time))
        blocked = self.blocked.get(rank)
        if blocked is not None and time > blocked["time"]:
            del self.blocked[rank]

    @property
    def last_progress(self) -> float | None:
        """Return when anything last ended on any rank."""
        return max(self._last.values(), default=None)

    @property
    def last_message(self) -> float | None:
        """Return when any node last sent anything."""
        return max(self.last_contact.values(), default=None)


MAX_SAMPLES = 16  # per rank
MAX_AGE_S = 20.0  # older samples are ignored
MIN_THROTTLED_SAMPLES = 2
THROTTLED = 0.2  # seconds per second that a quota delays a process
MIN_EXPLAINED = 2 / 3  # of a delay, by additional waits for a CPU core
SLOW_CLOCK = 0.9  # relative to other GPUs


class Hint(NamedTuple):
    """Explain why a rank is late by the state of its process."""

    cause: str
    text: str


class ProcessStates:
    """Store the latest samples of each process."""

    def __init__(self) -> None:
        self._process: dict[int, ProcessItem] = {}
        self._throttled: dict[int, deque[ProcessItem]] = {}  # last samples that were stopped or throttled
        self._crowds: dict[int, deque[tuple[float, float]]] = {}  # time, seconds per second
        self._gauge: dict[int, GaugeItem] = {}

    def add_process(self, item: ProcessItem) -> None:
        self._process[item["rank"]] = item
        self._crowds.setdefault(item["rank"], deque(maxlen=MAX_SAMPLES)).append(
            (item["time"], item.get("crowded", 0.0))
        )
        if item["state"] == "stopped" or item["throttled"] >= THROTTLED:
            self._throttled.setdefault(item["rank"], deque(maxlen=MIN_THROTTLED_SAMPLES)).append(item)

    def add_gauge(self, item: GaugeItem) -> None:
        if item["rank"] >= 0:
            self._gauge[item["rank"]] = item

    def get_process(self, rank: int, now: float) -> ProcessItem | None:
        """Return the latest sample of a rank, None if it is old."""
        item = self._process.get(rank)
        return item if item is not None and now - item["time"] <= MAX_AGE_S else None

    def get_throttled_ranks(self, now: float) -> list[int]:
        """Return ranks that were recently stopped or throttled more than once."""
        return [
            rank
            for rank, items in self._throttled.items()
            if len(items) == MIN_THROTTLED_SAMPLES and now - items[0]["time"] <= MAX_AGE_S
        ]

    def explain_slow_compute(self, rank: int, others: Iterable[int], now: float) -> Hint | None:
        """Explain why a rank computes longer than other ranks."""
        sample = self._throttled[rank][-1] if rank in self._throttled else None
        if sample is not None and now - sample["time"] <= MAX_AGE_S:
            if sample["state"] == "stopped":
                return Hint("stopped", f"The process of rank {rank} was stopped recently.")
            throttled = format_seconds(sample["throttled"])
            return Hint("quota", f"A CPU quota throttles rank {rank} for {throttled} of each second.")
        own = self._get_clock_mhz(rank)
        clocks = [clock for other in others if (clock := self._get_clock_mhz(other))]
        if own and clocks and own < SLOW_CLOCK * median(clocks):
            return Hint(
                "compute",
                f"The GPU of rank {rank} runs at {own:.0f} MHz, but other GPUs run at {median(clocks):.0f} MHz.",
            )
        return None

    def explain_by_cpu_waits(self, rank: int, others: Sequence[int], now: float, delay_s: float) -> Hint | None:
        """Explain that a rank is `more` seconds per second slower by its waits for a CPU core."""
        own_s = self._get_cpu_wait(rank, now)
        longer_s = own_s - median([self._get_cpu_wait(other, now) for other in others] or [0.0])
        if longer_s < MIN_EXPLAINED * delay_s:
            return None
        return Hint(
            "contention",
            f"Rank {rank} waits {format_seconds(own_s)} of each second for a CPU core that other processes use.",
        )

    def _get_cpu_wait(self, rank: int, now: float) -> float:
        """Return the mean of recent waits in seconds per second, 0 if none is known."""
        recent = [crowded for time, crowded in self._crowds.get(rank, ()) if now - time <= MAX_AGE_S]
        return fmean(recent) if recent else 0.0

    def _get_clock_mhz(self, rank: int) -> float:
        """Return the clock of the rank's GPU, 0 if it is unknown."""
        gauge = self._gauge.get(rank)
        return gauge.get("gpu_clock_mhz", 0.0) if gauge is not None else 0.0
