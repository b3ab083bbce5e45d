"""What a step's collectives cost its rank: what it stood still for, and what was on its way meanwhile."""

from __future__ import annotations

import time

from contracts.telemetry.steps import StepBreakdown
from contracts.telemetry.vocabulary import Label, Work


class Share:
    """Of one axis, in one step. Seconds."""

    __slots__ = ("exposed_s", "flying", "flying_s", "since_s", "stood_s")

    def __init__(self) -> None:
        self.exposed_s = 0.0
        self.stood_s = 0.0  # of it, for what counts as flying
        self.flying_s = 0.0  # while one was on its way at least
        self.flying = 0
        self.since_s = 0.0

    def takes_off(self, now_s: float) -> None:
        if self.flying == 0:
            self.since_s = now_s
        self.flying += 1

    def lands(self, now_s: float) -> None:
        self.flying -= 1
        if self.flying == 0:
            self.flying_s += now_s - self.since_s

    def begin(self, now_s: float) -> None:
        self.exposed_s = self.stood_s = self.flying_s = 0.0
        self.since_s = now_s

    def end(self, now_s: float) -> None:
        if self.flying:
            self.flying_s += now_s - self.since_s
            self.since_s = now_s


class Shares:
    """What a step's collectives cost it, by axis."""

    def __init__(self) -> None:
        self._by_axis: dict[Label, Share] = {}
        self.work_s: dict[Work, float] = {}  # of what is no collective

    def of(self, axis: Label) -> Share:
        share = self._by_axis.get(axis)
        if share is None:
            share = self._by_axis[axis] = Share()
        return share

    def begin(self) -> None:
        now_s = time.perf_counter()
        self.work_s = {}
        for share in self._by_axis.values():
            share.begin(now_s)

    def end(self) -> StepBreakdown:
        now_s = time.perf_counter()
        for share in self._by_axis.values():
            share.end(now_s)
        told = sorted(self._by_axis.items())
        return StepBreakdown(
            data=self.work_s.get("data", 0.0),
            optimizer=self.work_s.get("optimizer", 0.0),
            exposed={axis: share.exposed_s for axis, share in told if share.exposed_s},
            hidden={axis: hidden for axis, share in told if (hidden := share.flying_s - share.stood_s) > 0},
        )
