"""Record the telemetry of every attempt into its history."""

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

from jobs.core.redis_client import connect
from jobs.models import Attempt, Job, StateChange, Status
from jobs.people.notifications.outbox import release_messages
from jobs.queue.work_lease import StageErrors, WorkLease, is_database_error, is_outage
from jobs.runs.history.recording.attempt_recorder import (
    AttemptRecorder,
    DiagnosisSet,
    RecordedEntry,
    StreamKey,
    find_restarted_streams,
    get_outcome,
    read_new_entries,
)
from jobs.runs.history.store.folder import ConcurrentWriterError, NoHistoryError
from jobs.runs.history.store.retention import delete_old_histories

log = logging.getLogger(__name__)

NAME = "recorder"
SCAN_INTERVAL_S = 2.0  # for attempts to record
READ_INTERVAL_S = 0.5
MAX_READ_S = 2.0  # per pass, so that the lease is renewed
DIAGNOSIS_INTERVAL_S = 2.0
QUIET_S = 5.0  # without entries after the end of an attempt, until its history is complete
RESTART_CHECK_INTERVAL_S = 10.0
CLEANUP_INTERVAL_S = 600.0
MAX_PAUSE_S = 5.0  # between tries while the database or Redis is unreachable

Key = tuple[str, int]  # job, attempt


class UnrecordedAttempt(NamedTuple):
    """Describe an attempt whose history is incomplete. `silence`: why the attempt is unreachable, or ""."""

    key: int
    nodes: int
    ended: datetime | None
    silence: str


class HistoryRecorder:
    """Record attempts while this process holds the lease. After a crash, the next recorder continues."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = root or settings.HISTORY_DIR
        self._lease = WorkLease(NAME)
        self._troubles = StageErrors()
        self._client = connect()
        self._due: dict[Key, UnrecordedAttempt] = {}
        self._open: dict[Key, AttemptRecorder] = {}
        self._uncommitted: set[Key] = set()  # with entries that are not on disk
        self._diagnoses = DiagnosisSet(self._client, self._report_error)
        self._is_standby = self._is_redis_or_db_away = self._is_behind = False
        self._reading_since = float("inf")  # since the last failed read: without reads, streams are not quiet
        self._diagnosed_at = self._scanned_at = self._checked_at = self._cleaned_at = float("-inf")

    def run(self, stop: threading.Event) -> None:
        """Record until `stop` is set."""
        failures = 0
        try:
            while not stop.is_set():
                began, self._is_redis_or_db_away = time.monotonic(), False
                self.run_once()
                failures = failures + 1 if self._is_redis_or_db_away else 0
                pause = 0.0 if self._is_behind else READ_INTERVAL_S if self._due else SCAN_INTERVAL_S
                if self._is_redis_or_db_away:
                    pause = min(MAX_PAUSE_S, READ_INTERVAL_S * 2 ** min(failures, 10))
                stop.wait(max(0.05, pause - (time.monotonic() - began)))
        finally:
            self.close()
            connection.close()

    def close(self) -> None:
        """Commit all entries, and release the lease."""
        if not self._is_standby:
            for key in list(self._open):
                self._run_for_attempt(key, "stop", lambda key: self._open[key].commit())
        self._run_stage("stop", self._lease.release)
        self._client.close()

    def run_once(self) -> None:
        """Run one pass, unless another recorder holds the lease."""
        if not self._run_stage("lease", self._take_lease) or self._is_standby:
            return
        results = [self._run_stage("attempts", self._scan), self._run_stage("streams", self._read)]
        self._reading_since = min(self._reading_since, time.monotonic()) if results[-1] else float("inf")
        for key in list(self._open):
            self._run_for_attempt(key, "commit", self._commit)
        ended_keys = [key for key, due in self._due.items() if due.ended is not None]
        results.append(self._run_stage("diagnoses", self._diagnose))
        for key in ended_keys:
            self._run_for_attempt(key, "finish", self._complete_if_quiet)
        results.append(self._run_stage("forget", self._delete_old))
        committed = {key for key, recording in self._open.items() if recording.is_committed}
        self._uncommitted = {key for key in self._uncommitted if key in self._due} - committed
        if all(results) and not self._uncommitted:
            self._run_stage("lease", self._lease.record_tick)

    def _take_lease(self) -> None:
        waiting = not self._lease.hold()
        if waiting and not self._is_standby:
            log.info("Another recorder runs (%s). Waiting until the other recorder ends", self._lease.get_last_holder())
            self._open.clear()  # both continue from the folders
        if self._is_standby and not waiting:
            log.info("The other recorder has ended. Starting")
            self._scanned_at = float("-inf")
        self._is_standby = waiting

    def _scan(self) -> None:
        """Find the attempts to record."""
        now = time.monotonic()
        if now - self._scanned_at < SCAN_INTERVAL_S - READ_INTERVAL_S / 2:
            return
        unrecorded = Attempt.objects.filter(recorded__isnull=True).annotate(nodes=Count("members"))
        rows = list(unrecorded.values_list("id", "job_id", "number", "ended", "nodes"))
        silences = _get_silences() if rows else {}
        self._due = {
            (job, number): UnrecordedAttempt(key, max(1, nodes), ended, silences.get((job, number), ""))
            for key, job, number, ended, nodes in rows
        }
        self._scanned_at = now
        for removed in set(self._open) - set(self._due):
            recording = self._open.pop(removed)
            self._diagnoses.remove(removed)
            if not Job.objects.filter(id=removed[0]).exists():
                recording.folder.delete()

    def _read(self) -> None:
        """Read new entries, a few of each stream at a time."""
        for key in set(self._due) - set(self._open):
            self._run_for_attempt(key, "open", self._begin)
        positions = {
            stream: node
            for key, recording in self._open.items()
            for stream, node in recording.get_positions(self._due[key].nodes).items()
        }
        has_entries, deadline = bool(positions), time.monotonic() + MAX_READ_S
        while has_entries and time.monotonic() < deadline:
            has_entries = False
            for stream, entries in read_new_entries(self._client, positions):
                has_entries = True
                add_entries = partial(self._add_entries, stream, entries)
                self._run_for_attempt((stream.job, stream.attempt), "take", add_entries)
            if has_entries:
                for key in list(self._open):
                    self._run_for_attempt(key, "commit", self._commit)
                positions = {s: node for s, node in positions.items() if (s.job, s.attempt) in self._open}
        self._is_behind = has_entries
        now = time.monotonic()
        if positions and now - self._checked_at >= RESTART_CHECK_INTERVAL_S:
            self._checked_at = now
            for stream in find_restarted_streams(self._client, positions):
                log.warning(
                    "The telemetry stream of job %s, attempt %d, node %d restarted. Reading the stream from its start",
                    *stream,
                )
                if recording := self._open.get((stream.job, stream.attempt)):
                    recording.restart_stream(stream.node)

    def _begin(self, key: Key) -> None:
        recording = AttemptRecorder(self._root, *key, on_batch=partial(self._diagnoses.add, key))
        due = self._due[key]
        if not self._diagnoses.begin(key, due.key, due.nodes, recording.get_positions(due.nodes)):
            self._uncommitted.add(key)  # open it again in the next pass
            return
        self._open[key] = recording

    def _diagnose(self) -> None:
        """Store the verdicts of all open attempts."""
        now = time.monotonic()
        if now - self._diagnosed_at < DIAGNOSIS_INTERVAL_S:
            return
        self._diagnosed_at = now
        for key, recording in self._open.items():
            due = self._due[key]
            positions, is_over = recording.get_positions(due.nodes), due.ended is not None
            self._diagnoses.store_verdict(key, due.nodes, positions, over=is_over, silence=due.silence)

    def _add_entries(self, stream: StreamKey, entries: list[RecordedEntry], key: Key) -> None:
        if key in self._open:  # otherwise it is opened again, and reads the entries again
            self._open[key].add_entries(stream.node, entries)

    def _commit(self, key: Key) -> None:
        self._open[key].commit_if_due()

    def _complete_if_quiet(self, key: Key) -> None:
        recording, due = self._open.get(key), self._due[key]
        if recording is None or due.ended is None:
            return
        if min(recording.quiet_s, time.monotonic() - self._reading_since) < QUIET_S:
            return
        outcome, report = get_outcome(due.key)
        if not self._diagnoses.store_verdict(key, due.nodes, {}, over=True):
            return
        self._diagnoses.remove(key)
        recording.finish(outcome, report.get("reason", ""), due.ended.timestamp())
        Attempt.objects.filter(pk=due.key).update(recorded=timezone.now())
        release_messages(*key)
        del self._open[key], self._due[key]

    def _delete_old(self) -> None:
        now = time.monotonic()
        if now - self._cleaned_at < CLEANUP_INTERVAL_S:
            return
        self._cleaned_at = now
        for what, count in delete_old_histories(self._root).items():
            if count:
                log.info("Deleted %s %s", f"{count:,}", what)

    def _run_for_attempt(self, key: Key, what: str, work: Callable[[Key], object]) -> None:
        """Run a stage of one attempt. If it fails, only this attempt is read again from its folder."""
        try:
            work(key)
        except Exception as error:
            self._open.pop(key, None)
            if isinstance(error, ConcurrentWriterError | NoHistoryError):
                log.info("Restarting the step %r for job %s, attempt %d: %s", what, *key, error)
                return
            self._uncommitted.add(key)
            self._report_error(f"{what} of an attempt", error)

    def _run_stage(self, name: str, work: Callable[[], object]) -> bool:
        try:
            work()
        except Exception as error:
            self._report_error(name, error)
            return False
        return True

    def _report_error(self, name: str, error: Exception) -> None:
        self._troubles.report(name, error)
        self._is_redis_or_db_away |= is_outage(error)
        if is_database_error(error):
            connection.close()  # the next use opens another


def _get_silences() -> dict[Key, str]:
    """Return the reason of each unreachable attempt, as the queue stored it."""
    changes = StateChange.objects.filter(
        job__status=Status.UNREACHABLE, attempt=F("job__attempt"), status=Status.UNREACHABLE
    )
    rows = changes.order_by("id").values_list("job_id", "attempt", "reason")
    return {(job, number): reason for job, number, reason in rows}
