"""How attempts ended in the host worker's own words: on disk, and in memory what the disk did not take."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import NamedTuple

from contracts.control import AttemptReport, Outcome
from workers.host.attempts import AttemptDir, report_of_host
from workers.host.files import write_json

log = logging.getLogger(__name__)

REMEMBERED_S = 600.0  # after the controller has it: no order is valid nearly so long


class _Unwritten(NamedTuple):
    told: AttemptReport
    acknowledged: float | None = None  # monotonic


class Ends:
    """Ends that this worker decides on. For use by several threads.

    One that is in memory alone is forgotten with the worker: the controller, which has not heard it, orders anew.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unwritten: dict[AttemptDir, _Unwritten] = {}

    def conclude(self, attempt: AttemptDir, outcome: Outcome, reason: str) -> bool:
        """Write how it ended, or keep it here; what was kept first stays. True when it is news."""
        with self._lock:
            kept = self._unwritten.get(attempt)
            report = kept.told["exit"] if kept is not None else report_of_host(attempt, outcome, reason)
            try:
                write_json(attempt.exit, report)
            except OSError as error:
                if kept is not None:
                    return False
                problem = "%s/%s: cannot store the exit report on disk, so it stays in memory: %s"
                log.warning(problem, attempt.job, attempt.attempt, error)
                told = AttemptReport(job=attempt.job, attempt=attempt.attempt, state="exited", slots=[], exit=report)
                self._unwritten[attempt] = _Unwritten(told)
                return True
            self._unwritten.pop(attempt, None)
            return True

    def keeps(self, attempt: AttemptDir) -> bool:
        """Whether its end was told and is not on disk."""
        return attempt in self._unwritten

    def acknowledge(self, attempt: AttemptDir) -> None:
        """The controller has it. It is remembered for a while: its order may come once more."""
        with self._lock:
            if (kept := self._unwritten.get(attempt)) is not None:
                self._unwritten[attempt] = kept._replace(acknowledged=time.monotonic())

    def told(self) -> dict[AttemptDir, AttemptReport]:
        """What is to be said of those that are not on disk; of what was acknowledged, no more than that it ended."""
        with self._lock:
            oldest = time.monotonic() - REMEMBERED_S
            for attempt, kept in list(self._unwritten.items()):
                if kept.acknowledged is not None and kept.acknowledged < oldest and not os.path.lexists(attempt.own):
                    del self._unwritten[attempt]
            found = {}
            for attempt, kept in self._unwritten.items():
                if kept.acknowledged is None:
                    found[attempt] = kept.told.copy()
                elif os.path.lexists(attempt.own):
                    found[attempt] = AttemptReport(job=attempt.job, attempt=attempt.attempt, state="exited", slots=[])
            return found
