"""Record one attempt: read its streams, and write rows to its history.

Diagnose recorded attempts with `jobs.runs.diagnosis`, and store the verdicts with their jobs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import redis

from contracts.codec import BadMessageError, salvage_batch
from contracts.names import telemetry_stream
from contracts.telemetry.batches import Batch
from jobs.core.verdict_schema import MAX_VERDICT_BYTES
from jobs.models import EXTERNAL_ENGINE, TERMINAL, Attempt, StateChange, Status
from jobs.queue import lifecycle
from jobs.queue.work_lease import is_outage
from jobs.runs.diagnosis import Diagnosis, HostRanks, PlannedRun
from jobs.runs.history.recording.row_builder import RowBuilder
from jobs.runs.history.store import retention
from jobs.runs.history.store.folder import HistoryFolder, RecordedPosition
from jobs.runs.live.telemetry_reader import STREAM_START, parse_entry_id

STREAMS_PER_READ = 32
ENTRIES_PER_STREAM = 4  # of each stream: with contracts.codec.MAX_BATCH_BYTES each, 32 MiB at once


class StreamKey(NamedTuple):
    """Identify the telemetry stream of a node."""

    job: str
    attempt: int
    node: int

    @property
    def key(self) -> bytes:
        return telemetry_stream(*self).encode()


class RecordedEntry(NamedTuple):
    """Hold an entry. `missing`: the number of entries before it that the stream no longer has."""

    id: str
    number: int | None
    missing: int
    batch: bytes


def read_new_entries(
    client: redis.Redis, positions: dict[StreamKey, RecordedPosition]
) -> Iterator[tuple[StreamKey, list[RecordedEntry]]]:
    """Yield new entries after positions, a few of each stream. Raise RedisError."""
    streams = list(positions)
    for start in range(0, len(streams), STREAMS_PER_READ):
        by_key = {stream.key: stream for stream in streams[start : start + STREAMS_PER_READ]}
        positions_by_key: Any = {key: positions[stream]["after"] for key, stream in by_key.items()}
        found: Any = client.xread(positions_by_key, count=ENTRIES_PER_STREAM)
        for key, entries in found or []:
            stream = by_key[key]
            yield stream, list(_number_entries(entries, positions[stream]["number"]))


def read_known_entries(client: redis.Redis, stream: StreamKey, until: str) -> Iterator[bytes]:
    """Yield the batches of a stream up to a position, as far as the stream still has them. Raise RedisError."""
    after = "-"
    while True:
        found: Any = client.xrange(stream.key, min=after, max=until, count=ENTRIES_PER_STREAM)
        yield from (fields[b"b"] for _, fields in found if b"b" in fields)
        if len(found) < ENTRIES_PER_STREAM:
            return
        after = f"({found[-1][0].decode()}"


def _number_entries(entries: Any, last_number: int | None) -> Iterator[RecordedEntry]:
    """Check the numbers of entries, which continue if the stream restarts. Known numbers come from an older dump."""
    for entry_id, fields in entries:
        text = fields.get(b"n", b"")
        number = int(text) if text.isdigit() and len(text) < 19 else None
        expected = 0 if last_number is None else last_number + 1
        if number is not None and number < expected:
            yield RecordedEntry(entry_id.decode(), last_number, 0, b"")
            continue
        missing = 0 if number is None else number - expected
        last_number = last_number if number is None else number
        yield RecordedEntry(entry_id.decode(), last_number, missing, fields.get(b"b", b""))


def find_restarted_streams(client: redis.Redis, positions: dict[StreamKey, RecordedPosition]) -> list[StreamKey]:
    """Return streams whose newest entry is older than the position, because Redis lost data or its clock was set back.

    Such streams are read from the start. The numbers of entries show which ones are known.
    """
    with client.pipeline(transaction=False) as pipe:
        for stream in positions:
            pipe.xrevrange(stream.key, count=1)
        newest = pipe.execute()
    return [
        stream
        for (stream, node), entries in zip(positions.items(), newest, strict=True)
        if entries and parse_entry_id(entries[0][0].decode()) < parse_entry_id(node["after"])
    ]


log = logging.getLogger(__name__)

COMMIT_INTERVAL_S = 5.0
MAX_UNCOMMITTED_BYTES = 8 * 2**20  # of batches


class AttemptRecorder:
    """Record one attempt. Positions move with the rows, so a restart reads uncommitted entries again."""

    def __init__(
        self, root: Path, job: str, attempt: int, on_batch: Callable[[Batch, int], None] | None = None
    ) -> None:
        """Open the history. `on_batch`: receives each batch and its node before it is written."""
        self._on_batch = on_batch
        self.job, self.attempt = job, attempt
        self.folder = HistoryFolder(root, job, attempt)
        self.manifest = self.folder.open_for_writing()
        self.rows = RowBuilder(self.folder.read_state(self.manifest))
        self._nodes = self.manifest["nodes"]
        self._uncommitted_bytes, self._is_dirty = 0, False
        self._committed_at = self._received_at = time.monotonic()

    @property
    def quiet_s(self) -> float:
        """Return the seconds after the last entry."""
        return time.monotonic() - self._received_at

    def get_positions(self, num_nodes: int) -> dict[StreamKey, RecordedPosition]:
        """Return the position in the stream of each node."""
        start = RecordedPosition(after=STREAM_START, number=None, time=None)
        for node in range(num_nodes):
            self._nodes.setdefault(str(node), {**start})
        return {StreamKey(self.job, self.attempt, int(node)): position for node, position in self._nodes.items()}

    def add_entries(self, node: int, entries: list[RecordedEntry]) -> None:
        self._received_at = time.monotonic()
        for entry in entries:
            self._add_entry(node, entry)

    def _add_entry(self, node: int, entry: RecordedEntry) -> None:
        position = self._nodes[str(node)]
        position["after"], position["number"] = entry.id, entry.number
        self._is_dirty = True
        batch = self._parse_batch(entry)
        if entry.missing:
            gap_end = batch["time"] if batch is not None else parse_entry_id(entry.id)[0] / 1000  # in the board's clock
            gap_start = position["time"] if position["time"] is not None else gap_end
            words = f"{entry.missing:,} telemetry entries were deleted before the recorder read them"
            self.rows.mark_gap(node, gap_start, gap_end, words)
        if batch is None:
            return
        self.rows.add(batch, node, position["time"])
        if self._on_batch is not None:
            self._on_batch(batch, node)
        position["time"] = batch["time"]
        if "host" in batch:
            position["host"] = batch["host"]

    def _parse_batch(self, entry: RecordedEntry) -> Batch | None:
        """Return the batch of an entry, None if it is invalid or known."""
        if not entry.batch:
            return None
        self._uncommitted_bytes += len(entry.batch)
        try:
            batch, problems = salvage_batch(entry.batch)
        except BadMessageError as error:
            self.rows.state["refused"] += 1
            log.warning("Skipped a telemetry entry of job %s, attempt %d: %s", self.job, self.attempt, error)
            return None
        self.rows.state["refused"] += len(problems)
        return batch

    def restart_stream(self, node: int) -> None:
        """Read a stream from its start."""
        self._nodes[str(node)]["after"] = STREAM_START

    @property
    def is_committed(self) -> bool:
        return not self._is_dirty

    def commit_if_due(self) -> None:
        is_late = time.monotonic() - self._committed_at >= COMMIT_INTERVAL_S
        if self._is_dirty and (is_late or self._uncommitted_bytes >= MAX_UNCOMMITTED_BYTES):
            self.commit()

    def commit(self) -> None:
        """Write all entries to disk. After ConcurrentWriterError or OSError, the recording must be opened again."""
        first, last = self.rows.first, self.rows.last
        manifest = self.manifest
        if first is not None and last is not None:
            manifest["first"] = first if manifest["first"] is None else min(first, manifest["first"])
            manifest["last"] = last if manifest["last"] is None else max(last, manifest["last"])
        self.folder.commit(manifest, self.rows.take(), self.rows.state)
        self._committed_at, self._uncommitted_bytes, self._is_dirty = time.monotonic(), 0, False
        self.folder.merge_levels(manifest)
        retention.enforce_limits(self.folder, manifest)

    def finish(self, outcome: str | None, reason: str, ended: float) -> None:
        """Complete the history: one file per table."""
        if not (self.manifest["generation"] or self._is_dirty):
            self.folder.delete()
            return
        if outcome is not None and self.manifest["ended"] is None:
            self.rows.mark("fault" if outcome == "failed" else "end", ended, text=f"{outcome}: {reason}"[:1000])
        self.manifest["ended"] = ended
        self.commit()
        self.folder.compact(self.manifest)


class AttemptOutcome(NamedTuple):
    """Hold the outcome of an attempt and its exit report. `outcome`: None if it is unknown."""

    outcome: str | None
    report: dict[str, Any]


def get_outcome(attempt: int) -> AttemptOutcome:
    """Return the outcome of the attempt with a primary key, as the queue set it.

    A host may report failed ranks of a cancelled attempt, or nothing. Then the report gets the reason of the queue.
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
        """Load the attempt with a primary key. With more than `nodes`, ranks are on other hosts."""
        attempt = Attempt.objects.select_related("job").prefetch_related("members").get(pk=key)
        job, members = attempt.job, list(attempt.members.all())
        is_launched_here = job.engine != EXTERNAL_ENGINE
        self.row, self._job, self.nodes = key, job.id, nodes
        queued = StateChange.objects.filter(job=job.id, attempt=attempt.number, status=Status.QUEUED)
        queued_at = queued.order_by("id").values_list("at", flat=True).first() or job.created
        run = PlannedRun(
            job.spec,
            job.estimate,
            job.world_size,
            hardware=job.hardware,
            members=[HostRanks(member.host_name, member.first_rank, member.num_ranks) for member in members],
            submitted=queued_at.timestamp() if is_launched_here else None,
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
        self._client, self._report_error = client, report_error
        self._diagnoses: dict[Key, AttemptDiagnosis] = {}

    def begin(self, key: Key, row: int, nodes: int, positions: Mapping[StreamKey, RecordedPosition]) -> bool:
        """Start the diagnosis of an attempt with the entries up to its positions. Return False to try again."""
        return self._try(key, lambda: self._begin(key, row, nodes, positions))

    def _begin(self, key: Key, row: int, nodes: int, positions: Mapping[StreamKey, RecordedPosition]) -> None:
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
        self, key: Key, nodes: int, positions: Mapping[StreamKey, RecordedPosition], *, over: bool, silence: str = ""
    ) -> bool:
        """Store a changed verdict. Return False to try again. The diagnosis restarts if a node joined.

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

    def _get_board_time(self) -> float:
        seconds_and_us: Any = self._client.time()
        return float(seconds_and_us[0] + seconds_and_us[1] / 1e6)

    def remove(self, key: Key) -> None:
        self._diagnoses.pop(key, None)

    def _try(self, key: Key, work: Callable[[], object]) -> bool:
        """Run `work` and report its error. Return False if another try may succeed."""
        try:
            work()
        except Exception as error:
            if is_outage(error):
                self._report_error("diagnosis", error)
                return False
            self.remove(key)
            self._report_error("diagnosis of an attempt", error)
        return True
