"""What hosts see of the ranks' processes: whether they run, what they get of a processor, what holds them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import NamedTuple

from contracts.telemetry.health import GaugeItem, ProcessItem
from jobs.runs.diagnosis.findings import seconds

KEPT = 16  # words of each
FRESH_S = 20.0  # what was told longer ago says nothing of now
AGAIN = 2  # words of it: once may be anything
THROTTLED = 0.2  # seconds in each second that a quota keeps a process waiting, from which on it explains something
EXPLAINS = 2 / 3  # of what a rank takes longer: what it waited more for a processor than its peers did
SLOW_CLOCK = 0.9  # of the other GPUs' clocks


class Hint(NamedTuple):
    """What a process' state explains of its rank's being late."""

    cause: str
    text: str


class Processes:
    """The last word of each."""

    def __init__(self) -> None:
        self._process: dict[int, ProcessItem] = {}
        self._held: dict[int, deque[ProcessItem]] = {}  # the last that told of one that was stopped or throttled
        self._crowds: dict[int, deque[tuple[float, float]]] = {}  # when it was told, seconds of each second
        self._gauge: dict[int, GaugeItem] = {}
        self.heard: dict[int, float] = {}  # by member, the last time that anything but a collective was told of it

    def process(self, item: ProcessItem) -> None:
        self._process[item["rank"]] = item
        self._crowds.setdefault(item["rank"], deque(maxlen=KEPT)).append((item["time"], item.get("crowded", 0.0)))
        if item["state"] == "stopped" or item["throttled"] >= THROTTLED:
            self._held.setdefault(item["rank"], deque(maxlen=AGAIN)).append(item)

    def gauge(self, item: GaugeItem) -> None:
        if item["rank"] >= 0:
            self._gauge[item["rank"]] = item

    def of(self, rank: int, now: float) -> ProcessItem | None:
        """What was told of it of late."""
        item = self._process.get(rank)
        return item if item is not None and now - item["time"] <= FRESH_S else None

    def held_again(self, now: float) -> list[int]:
        """Ranks that were stopped, or kept waiting by a quota, more than once of late."""
        return [rank for rank, items in self._held.items() if len(items) == AGAIN and now - items[0]["time"] <= FRESH_S]

    def hint(self, rank: int, others: Iterable[int], now: float) -> Hint | None:
        """What explains that a rank computes for longer than the others."""
        held = self._held[rank][-1] if rank in self._held else None
        if held is not None and now - held["time"] <= FRESH_S:
            if held["state"] == "stopped":
                return Hint("stopped", f"The process of rank {rank} was stopped recently.")
            throttled = seconds(held["throttled"])
            return Hint("quota", f"A CPU quota throttles rank {rank} for {throttled} of each second.")
        own = self._clock_mhz(rank)
        clocks = [clock for other in others if (clock := self._clock_mhz(other))]
        if own and clocks and own < SLOW_CLOCK * median(clocks):
            return Hint(
                "compute",
                f"The GPU of rank {rank} runs at {own:.0f} MHz, but other GPUs run at {median(clocks):.0f} MHz.",
            )
        return None

    def crowded(self, rank: int, others: Sequence[int], now: float, more: float) -> Hint | None:
        """What explains that a rank takes `more` seconds of each second longer than the others: it was ready, and
        others had its processor. Of one that was told nothing of late that is nothing."""
        own = self._crowded(rank, now)
        longer = own - median([self._crowded(other, now) for other in others] or [0.0])
        if longer < EXPLAINS * more:
            return None
        return Hint(
            "contention",
            f"Rank {rank} waits {seconds(own)} of each second for a CPU core that other processes use.",
        )

    def _crowded(self, rank: int, now: float) -> float:
        """The mean of what was told of late."""
        told = [crowded for at, crowded in self._crowds.get(rank, ()) if now - at <= FRESH_S]
        return fmean(told) if told else 0.0

    def _clock_mhz(self, rank: int) -> float:
        """Of its GPU; 0 where it has none or nobody told."""
        gauge = self._gauge.get(rank)
        return gauge.get("gpu_clock_mhz", 0.0) if gauge is not None else 0.0
