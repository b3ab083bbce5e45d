"""A step as its rank lived it: what it issued, and what its training thread did."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import NamedTuple

from contracts.telemetry.vocabulary import Work
from workers.meter.groups import Pending
from workers.meter.shares import Shares

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
