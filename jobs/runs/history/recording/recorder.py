"""The recorder: drains the telemetry of every attempt into its history, again and again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

from django.conf import settings
from django.db import connection
from django.db.models import Count, F
from django.utils import timezone

from jobs.core.redis_connection import connect
from jobs.models import Attempt, Job, StateChange, Status
from jobs.people.notifications.verdicts import release
from jobs.queue.work_lease import Troubles, WorkLease, away, of_database
from jobs.runs.history.recording.attempt import Recording
from jobs.runs.history.recording.diagnosing import Diagnoses
from jobs.runs.history.recording.ended import ended
from jobs.runs.history.recording.streams import Heard, Stream, new_entries, set_back
from jobs.runs.history.store.folder import GoneError, OvertakenError
from jobs.runs.history.store.forgetting import forget_old

log = logging.getLogger(__name__)

NAME = "recorder"
LOOKED_EVERY_S = 2.0  # for attempts to record; while there are none, nothing else is done
READ_EVERY_S = 0.5
READ_FOR_S = 2.0  # at a time, however much there is: the lease has to be kept
DIAGNOSED_EVERY_S = 2.0
QUIET_S = 5.0  # of a stream after the end of its attempt, until its history is whole
SET_BACK_EVERY_S = 10.0
FORGET_EVERY_S = 600.0
LONGEST_PAUSE_S = 5.0  # between tries while the database or Redis is away

Key = tuple[str, int]  # job, attempt


class Due(NamedTuple):
    """An attempt whose history is not whole."""

    key: int
    nodes: int
    ended: datetime | None
    silence: str  # why it is unreachable; empty where it is not


class Recorder:
    """Works while it holds the lease. Killed anywhere, the next one goes on from what is in the folders."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = root or settings.HISTORY_DIR
        self._lease = WorkLease(NAME)
        self._troubles = Troubles()
        self._client = connect()
        self._due: dict[Key, Due] = {}
        self._open: dict[Key, Recording] = {}
        self._failing: set[Key] = set()  # what was heard of them since is not on the disk
        self._diagnoses = Diagnoses(self._client, self._tell)
        self._waiting = self._away = self._behind = False
        self._heard_since = float("inf")  # since when every reading went well: else silence is no quiet
        self._diagnosed = self._looked = self._checked = self._forgot = float("-inf")

    def run(self, stop: threading.Event) -> None:
        """Until told to stop."""
        failures = 0
        try:
            while not stop.is_set():
                began, self._away = time.monotonic(), False
                self.turn()
                failures = failures + 1 if self._away else 0
                pause = 0.0 if self._behind else READ_EVERY_S if self._due else LOOKED_EVERY_S
                if self._away:
                    pause = min(LONGEST_PAUSE_S, READ_EVERY_S * 2 ** min(failures, 10))
                stop.wait(max(0.05, pause - (time.monotonic() - began)))
        finally:
            self.close()
            connection.close()

    def close(self) -> None:
        """What was heard is committed, and another may begin at once."""
        if not self._waiting:
            for key in list(self._open):
                self._of_one(key, "stop", self._commit_now)
        self._stage("stop", self._lease.release)
        self._client.close()

    def turn(self) -> None:
        """One pass over everything, or none while another recorder works."""
        if not self._stage("lease", self._take_lease) or self._waiting:
            return
        went_well = [self._stage("attempts", self._look), self._stage("streams", self._read)]
        self._heard_since = min(self._heard_since, time.monotonic()) if went_well[-1] else float("inf")
        for key in list(self._open):
            self._of_one(key, "commit", self._commit)
        ended = [key for key, due in self._due.items() if due.ended is not None]
        went_well.append(self._stage("diagnoses", self._diagnose))
        for key in ended:
            self._of_one(key, "finish", self._finish_if_quiet)
        went_well.append(self._stage("forget", self._forget))
        self._failing = {key for key in self._failing if key in self._due and not self._is_kept(key)}
        if all(went_well) and not self._failing:
            self._stage("lease", self._lease.ticked)

    def _take_lease(self) -> None:
        waiting = not self._lease.hold()
        if waiting and not self._waiting:
            log.info("Another recorder runs (%s). Waiting until the other recorder ends", self._lease.holder_now())
            self._open.clear()  # it goes on from the folders, and so shall we
        if self._waiting and not waiting:
            log.info("The other recorder has ended. Starting")
            self._looked = float("-inf")
        self._waiting = waiting

    def _look(self) -> None:
        """Which attempts there are to record."""
        now = time.monotonic()
        if now - self._looked < LOOKED_EVERY_S - READ_EVERY_S / 2:
            return
        unrecorded = Attempt.objects.filter(recorded__isnull=True).annotate(nodes=Count("members"))
        rows = list(unrecorded.values_list("id", "job_id", "number", "ended", "nodes"))
        silences = _silences() if rows else {}
        self._due = {
            (job, number): Due(key, max(1, nodes), ended, silences.get((job, number), ""))
            for key, job, number, ended, nodes in rows
        }
        self._looked = now
        for gone in set(self._open) - set(self._due):
            recording = self._open.pop(gone)
            self._diagnoses.forget(gone)
            if not Job.objects.filter(id=gone[0]).exists():
                recording.folder.forget()

    def _read(self) -> None:
        """Everything that is new, a few entries of each stream at a time."""
        for key in set(self._due) - set(self._open):
            self._of_one(key, "open", self._begin)
        positions = {
            stream: node
            for key, recording in self._open.items()
            for stream, node in recording.positions(self._due[key].nodes).items()
        }
        some, until = bool(positions), time.monotonic() + READ_FOR_S
        while some and time.monotonic() < until:
            some = False
            for stream, entries in new_entries(self._client, positions):
                some = True
                take = partial(self._take, stream, entries)
                self._of_one((stream.job, stream.attempt), "take", take)
            if some:
                for key in list(self._open):
                    self._of_one(key, "commit", self._commit)
                positions = {s: node for s, node in positions.items() if (s.job, s.attempt) in self._open}
        self._behind = some
        now = time.monotonic()
        if positions and now - self._checked >= SET_BACK_EVERY_S:
            self._checked = now
            for stream in set_back(self._client, positions):
                self._read_again(stream)

    def _read_again(self, stream: Stream) -> None:
        log.warning(
            "The telemetry stream of job %s, attempt %d, node %d restarted. Reading from the start of the stream",
            *stream,
        )
        if recording := self._open.get((stream.job, stream.attempt)):
            recording.read_again(stream.node)

    def _begin(self, key: Key) -> None:
        recording = Recording(self._root, *key, also=partial(self._diagnoses.add, key))
        due = self._due[key]
        if not self._diagnoses.begin(key, due.key, due.nodes, recording.positions(due.nodes)):
            self._failing.add(key)  # opened anew the next time
            return
        self._open[key] = recording

    def _diagnose(self) -> None:
        """Look at every attempt that runs, or has just ended."""
        now = time.monotonic()
        if now - self._diagnosed < DIAGNOSED_EVERY_S:
            return
        self._diagnosed = now
        for key, recording in self._open.items():
            due = self._due[key]
            positions, over = recording.positions(due.nodes), due.ended is not None
            self._diagnoses.look(key, due.nodes, positions, over=over, silence=due.silence)

    def _take(self, stream: Stream, entries: list[Heard], key: Key) -> None:
        if key in self._open:  # else it is opened anew, and reads them again
            self._open[key].take(stream.node, entries)

    def _commit(self, key: Key) -> None:
        self._open[key].commit_if_due()

    def _commit_now(self, key: Key) -> None:
        self._open[key].commit()

    def _finish_if_quiet(self, key: Key) -> None:
        recording, due = self._open.get(key), self._due[key]
        if recording is None or due.ended is None:
            return
        if min(recording.quiet_s, time.monotonic() - self._heard_since) < QUIET_S:
            return
        outcome, report = ended(due.key)
        if not self._diagnoses.look(key, due.nodes, {}, over=True):
            return
        self._diagnoses.forget(key)
        recording.finish(outcome, report.get("reason", ""), due.ended.timestamp())
        Attempt.objects.filter(pk=due.key).update(recorded=timezone.now())
        release(*key)
        del self._open[key], self._due[key]

    def _forget(self) -> None:
        now = time.monotonic()
        if now - self._forgot < FORGET_EVERY_S:
            return
        self._forgot = now
        for what, count in forget_old(self._root).items():
            if count:
                log.info("Deleted %s %s", f"{count:,}", what)

    def _is_kept(self, key: Key) -> bool:
        return key in self._open and self._open[key].is_kept

    def _of_one(self, key: Key, what: str, work: Callable[[Key], object]) -> None:
        """A stage of one attempt: where it fails the others go on, and it is read from its folder again."""
        try:
            work(key)
        except Exception as error:
            self._open.pop(key, None)
            if isinstance(error, OvertakenError | GoneError):
                log.info("Restarting the step %r for job %s, attempt %d: %s", what, *key, error)
                return
            self._failing.add(key)
            self._tell(f"{what} of an attempt", error)

    def _stage(self, name: str, work: Callable[[], object]) -> bool:
        try:
            work()
        except Exception as error:
            self._tell(name, error)
            return False
        return True

    def _tell(self, name: str, error: Exception) -> None:
        self._troubles.tell(name, error)
        self._away |= away(error)
        if of_database(error):
            connection.close()  # the next use opens another


def _silences() -> dict[Key, str]:
    """Why unreachable attempts are that, as the queue said it last."""
    said = StateChange.objects.filter(
        job__status=Status.UNREACHABLE, attempt=F("job__attempt"), status=Status.UNREACHABLE
    )
    rows = said.order_by("id").values_list("job_id", "attempt", "reason")
    return {(job, number): reason for job, number, reason in rows}
