"""Steps event by event: the last ones are kept, some are told as they come, any that is kept when it is asked for.

A step is told with all its ranks here or not at all, but for the last of an attempt, and one that was asked for and
does not become whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final

import msgpack

from contracts.telemetry.timeline import TimelineItem
from workers.step_sampling import StepSampler

TOLD_BYTES_PER_S: Final = 256 * 2**10  # of an attempt's steps, beside those asked for
KEPT_STEPS: Final = 64
KEPT_BYTES: Final = 8 * 2**20
LAST_STEPS: Final = 5  # told when the attempt ends
MOST_WANTED: Final = 100
WHOLE_S: Final = 3.0  # after its first rank, for the others


class Step:
    """What ranks told of one step."""

    def __init__(self) -> None:
        self.items: dict[int, TimelineItem] = {}
        self.num_bytes = 0
        self.since = time.monotonic()
        self.told = False

    def add(self, item: TimelineItem) -> int:
        """Its bytes."""
        num_bytes = len(msgpack.packb(item))
        self.items[item["rank"]] = item
        self.num_bytes += num_bytes
        return num_bytes


class Timelines:
    """Of one attempt on this host. `tell` is given the items of a step."""

    def __init__(self, ranks: Iterable[int], tell: Callable[[list[TimelineItem]], None]) -> None:
        self._ranks, self._tell = frozenset(ranks), tell
        self._steps: dict[int, Step] = {}
        self._num_bytes = 0
        self._wanted: frozenset[int] = frozenset()
        self._thinning = StepSampler(TOLD_BYTES_PER_S)
        self._over = False
        self._sampled: tuple[int, float] | None = None  # the last step that was, and when it began

    def add(self, item: TimelineItem) -> None:
        """Take one checked item."""
        number = item["step"]
        step = self._steps.get(number)
        if step is None:
            step = self._steps[number] = Step()
        if item["rank"] in step.items:
            return
        self._num_bytes += step.add(item)
        self._let_go()
        if step.told:  # it was asked for and did not become whole in time
            self._tell([item])
        elif step.items.keys() >= self._ranks and self._tells(number, step):
            self._tell_step(step)

    def want(self, steps: Iterable[int]) -> None:
        """These were asked for: told if they are kept, else when they come."""
        self._wanted = frozenset(sorted(steps)[-MOST_WANTED:])
        late = time.monotonic() - WHOLE_S
        for number in sorted(self._wanted & self._steps.keys()):
            step = self._steps[number]
            if not step.told and (step.items.keys() >= self._ranks or step.since < late):
                self._tell_step(step)

    def finish(self) -> None:
        """The attempt is over: what its ranks still say is of its last steps."""
        self._over = True
        for number in sorted(self._steps)[-LAST_STEPS:]:
            if not self._steps[number].told:
                self._tell_step(self._steps[number])

    def _tells(self, number: int, step: Step) -> bool:
        if not self._thinning.should_trace(number):
            return self._over or number in self._wanted
        began = max(item["began"] for item in step.items.values())
        if self._sampled is not None and number > self._sampled[0]:
            last, last_began = self._sampled
            self._thinning.record_traced_step(step.num_bytes, (began - last_began) / (number - last))
        self._sampled = (number, began)
        return True

    def _tell_step(self, step: Step) -> None:
        step.told = True
        self._tell([step.items[rank] for rank in sorted(step.items)])

    def _let_go(self) -> None:
        while self._steps and (len(self._steps) > KEPT_STEPS or self._num_bytes > KEPT_BYTES):
            self._num_bytes -= self._steps.pop(min(self._steps)).num_bytes


class StepLane:
    """Steps on their way to the board in bounded bytes. The oldest go, whole, but for one of which a part was sent."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._steps: list[list[tuple[TimelineItem, int]]] = []
        self._begun = False
        self.num_bytes = 0

    def add(self, items: Iterable[TimelineItem]) -> None:
        step = [(item, len(msgpack.packb(item))) for item in items]
        self._steps.append(step)
        self.num_bytes += sum(size for _, size in step)
        while self.num_bytes > self._most_bytes and len(self._steps) > self._begun:
            gone = self._steps.pop(1 if self._begun else 0)
            self.num_bytes -= sum(size for _, size in gone)

    def take(self, room: int) -> tuple[list[TimelineItem], int]:
        """What fits, and its bytes."""
        taken: list[TimelineItem] = []
        used = 0
        while self._steps and used + self._steps[0][0][1] <= room:
            item, size = self._steps[0].pop(0)
            used += size
            taken.append(item)
            self._begun = bool(self._steps[0])
            if not self._begun:
                self._steps.pop(0)
        self.num_bytes -= used
        return taken, used
