"""Timelines of steps: the last ones are stored, samples are sent at once, and stored ones are sent on request.

A step is sent when all ranks of this host have reported it. Two exceptions: the last steps of an attempt, and a
requested step that stays incomplete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final

import msgpack

from contracts.telemetry.timeline import TimelineItem
from workers.step_sampling import StepSampler

SAMPLED_BYTES_PER_S: Final = 256 * 2**10  # of an attempt, without requested steps
MAX_STEPS: Final = 64
MAX_STEPS_BYTES: Final = 8 * 2**20
LAST_STEPS: Final = 5  # sent when the attempt ends
MAX_REQUESTED: Final = 100
MAX_RANK_WAIT_S: Final = 3.0  # from the first rank of a step to the others


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
