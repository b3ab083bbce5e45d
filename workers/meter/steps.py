"""A step as its rank lived it: what it issued, what its training thread did, and what it stood still for."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from contracts.telemetry import Label, StepParts, Work

if TYPE_CHECKING:
    from workers.meter.recorder import Pending

MOST_CALLS = 4_000  # of one step, and as many spans: an item of them fits into one entry of a stream


class Span(NamedTuple):
    """Something the training thread did. Seconds of `time.perf_counter`."""

    work: Work
    chunk: int
    micro_batch: int
    from_s: float
    to_s: float


class StepLog:
    """From the beginning of one step to that of the next: what lies between two, as a validation, is the first's."""

    __slots__ = ("began_s", "calls", "ended_s", "left_out", "spans", "step")

    def __init__(self, step: int) -> None:
        self.step = step
        self.began_s, self.ended_s = time.perf_counter(), 0.0
        self.calls: list[Pending] = []
        self.spans: list[Span] = []
        self.left_out = 0


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

    def end(self) -> StepParts:
        now_s = time.perf_counter()
        for share in self._by_axis.values():
            share.end(now_s)
        told = sorted(self._by_axis.items())
        return StepParts(
            data=self.work_s.get("data", 0.0),
            optimizer=self.work_s.get("optimizer", 0.0),
            exposed={axis: share.exposed_s for axis, share in told if share.exposed_s},
            hidden={axis: hidden for axis, share in told if (hidden := share.flying_s - share.stood_s) > 0},
        )


class Doing(AbstractContextManager[None]):
    """Measures a span of the training thread."""

    __slots__ = ("_chunk", "_from_s", "_log", "_micro_batch", "_shares", "_work")

    def __init__(self, log: StepLog | None, shares: Shares, work: Work, chunk: int, micro_batch: int) -> None:
        self._log, self._shares, self._work, self._chunk, self._micro_batch = log, shares, work, chunk, micro_batch

    def __enter__(self) -> None:
        self._from_s = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        now_s, log = time.perf_counter(), self._log
        self._shares.work_s[self._work] = self._shares.work_s.get(self._work, 0.0) + now_s - self._from_s
        if log is None:
            return
        if len(log.spans) < MOST_CALLS:
            log.spans.append(Span(self._work, self._chunk, self._micro_batch, self._from_s, now_s))
        else:
            log.left_out += 1
