"""Diagnose recorded attempts with `jobs.runs.diagnosis`, and store the verdicts with their jobs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import redis

from contracts.codec import BadMessageError, salvage_batch
from contracts.telemetry.batches import Batch
from jobs.core.verdict_schema import MAX_VERDICT_BYTES
from jobs.models import EXTERNAL_ENGINE, TERMINAL, Attempt, StateChange, Status
from jobs.queue import lifecycle
from jobs.queue.work_lease import away
from jobs.runs.diagnosis import Diagnosis, HostRanks, PlannedRun
from jobs.runs.history.recording.attempt_recorder import StreamKey, read_known_entries
from jobs.runs.history.store.folder import StreamPosition


class AttemptOutcome(NamedTuple):
    """Hold the outcome of an attempt and its exit report. `outcome`: None if it is unknown."""

    outcome: str | None
    report: dict[str, Any]


def get_outcome(attempt: int) -> AttemptOutcome:
    """Return the outcome of an attempt as the queue set it.

    A host may report failed ranks of a cancelled attempt, or nothing. Then the report gets the reason of the queue.

    Args:
        attempt: The primary key of the attempt.
    """
    row = Attempt.objects.only("job_id", "number", "exit").get(pk=attempt)
    report: dict[str, Any] = row.exit or {}
    changes = StateChange.objects.filter(job=row.job_id, attempt=row.number, status__in=TERMINAL)
    last = changes.order_by("-id").values_list("status", "reason").first()
    if last is None or last[0] == report.get("outcome"):
        return AttemptOutcome(report.get("outcome"), report)
    return AttemptOutcome(last[0], {**report, "reason": last[1]})


Key = tuple[str, int]  # job, attempt


class AttemptDiagnosis:
    """Diagnose one attempt."""

    def __init__(self, key: int, nodes: int) -> None:
        """Load an attempt.

        Args:
            key: The primary key of the attempt.
            nodes: The number of its nodes. With more nodes, ranks are on other hosts.
        """
        attempt = Attempt.objects.select_related("job").prefetch_related("members").get(pk=key)
        job, members = attempt.job, list(attempt.members.all())
        is_launched_here = job.engine != EXTERNAL_ENGINE
        self.row, self._job, self.nodes = key, job.id, nodes
        run = PlannedRun(
            job.spec,
            job.estimate,
            job.world_size,
            hardware=job.hardware,
            members=[HostRanks(member.host_name, member.first_rank, member.num_ranks) for member in members],
            submitted=_get_queued_time(attempt) if is_launched_here else None,
            ordered=min((member.ordered.timestamp() for member in members), default=None) if is_launched_here else None,
        )
        self._diagnosis = Diagnosis(run)
        self._stored_verdict: dict[str, Any] | None = None
        self._is_over = False

    @property
    def has_verdict(self) -> bool:
        """Return True if jobs of this kind get a verdict."""
        return self._diagnosis.has_verdict

    def add(self, batch: Batch, node: int) -> None:
        """Add a batch of a node."""
        for item in batch["items"]:
            self._diagnosis.add(item, node, batch.get("clock"))

    def end(self) -> None:
        """End the attempt, so that the next verdict is final."""
        if self._is_over:
            return
        outcome, report = get_outcome(self.row)
        self._diagnosis.end(outcome or "lost", report)
        self._is_over = True

    def store_verdict(self, now: float, silence: str = "") -> bool:
        """Store the verdict if it changed, and return True if so. `now`: Unix seconds of the board's clock."""
        verdict: dict[str, Any] = dict(self._diagnosis.make_verdict(now, silence))
        content = {name: value for name, value in verdict.items() if name != "time"}
        if content == self._stored_verdict:
            return False
        num_bytes = len(json.dumps(verdict))
        if num_bytes > MAX_VERDICT_BYTES:
            raise ValueError(f"The diagnosis has {num_bytes:,} bytes. The maximum is {MAX_VERDICT_BYTES:,}.")
        Attempt.objects.filter(pk=self.row).update(diagnosis=verdict)
        self._stored_verdict = content
        lifecycle.announce(self._job)
        return True


class DiagnosisSet:
    """Diagnose all recorded attempts. An attempt whose diagnosis fails is still recorded."""

    def __init__(self, client: redis.Redis, report_error: Callable[[str, Exception], None]) -> None:
        """Create an empty set. `tell`: a function that receives errors."""
        self._client, self._report_error = client, report_error
        self._diagnoses: dict[Key, AttemptDiagnosis] = {}

    def begin(self, key: Key, row: int, nodes: int, positions: Mapping[StreamKey, StreamPosition]) -> bool:
        """Start the diagnosis of an attempt with the entries up to its positions. Return False to try again."""
        return self._try(key, lambda: self._begin(key, row, nodes, positions))

    def _begin(self, key: Key, row: int, nodes: int, positions: Mapping[StreamKey, StreamPosition]) -> None:
        diagnosis = AttemptDiagnosis(row, nodes)
        if not diagnosis.has_verdict:
            return
        for stream, position in positions.items():
            for body in read_known_entries(self._client, stream, position["after"]):
                with contextlib.suppress(BadMessageError):
                    diagnosis.add(salvage_batch(body)[0], stream.node)
        self._diagnoses[key] = diagnosis

    def add(self, key: Key, batch: Batch, node: int) -> None:
        if diagnosis := self._diagnoses.get(key):
            self._try(key, lambda: diagnosis.add(batch, node))

    def store_verdict(
        self, key: Key, nodes: int, positions: Mapping[StreamKey, StreamPosition], *, over: bool, silence: str = ""
    ) -> bool:
        """Store a changed verdict. Return False to try again.

        The diagnosis restarts if a node joined.

        Args:
            over: The attempt has ended.
            silence: A clause about a host without contact, or "".
        """
        diagnosis = self._diagnoses.get(key)
        if diagnosis is None:
            return True
        if positions and nodes != diagnosis.nodes:
            self.begin(key, diagnosis.row, nodes, positions)
            return False
        if over and not self._try(key, diagnosis.end):
            return False
        return self._try(key, lambda: diagnosis.store_verdict(self._get_board_time(), silence))

    def remove(self, key: Key) -> None:
        self._diagnoses.pop(key, None)

    def _get_board_time(self) -> float:
        """Return Unix seconds of the board's clock."""
        seconds_and_us: Any = self._client.time()
        return float(seconds_and_us[0] + seconds_and_us[1] / 1e6)

    def _try(self, key: Key, work: Callable[[], object]) -> bool:
        """Run `work` and report its error. Return False if another try may succeed."""
        try:
            work()
        except Exception as error:
            if away(error):
                self._report_error("diagnosis", error)
                return False
            self.remove(key)
            self._report_error("diagnosis of an attempt", error)
        return True


def _get_queued_time(attempt: Attempt) -> float:
    """Return the Unix time at which an attempt was queued."""
    changes = StateChange.objects.filter(job=attempt.job_id, attempt=attempt.number, status=Status.QUEUED)
    first = changes.order_by("id").values_list("at", flat=True).first()
    return (first or attempt.job.created).timestamp()
