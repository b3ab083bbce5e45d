"""Hold requests until a job changes, with one query per second for all that wait, and format server-sent events.

A view that cannot answer yet leaves a wait in the scope of its request and answers 204, which no client receives.
`jobs.api.held_request_middleware` then waits without a thread. It calls the view again when the job changed,
regularly to check access, and a last time when the view must answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from channels.db import database_sync_to_async
from django.db.models import F
from django.db.models.fields.json import KT

from contracts.telemetry.items import LogItem, StepItem
from contracts.telemetry.metrics import MetricItem
from jobs.models import Attempt, Job
from jobs.runs.live.telemetry_reader import PerLoop

log = logging.getLogger(__name__)

SCOPE_KEY = "meshboard.held"
POLL_S = 1.0
VERDICT_FIELDS = ("state", "sentence", "reason", "next")


class JobState(NamedTuple):
    """Hold the status, the attempt, and the verdict of a job."""

    status: str
    attempt: int
    verdict: dict[str, str] | None = None


class WaitForChange(NamedTuple):
    """Call the view again when the state is no longer `seen`, and after `timeout_s`."""

    job: str
    seen: JobState
    timeout_s: float


class FollowEvents(NamedTuple):
    """Send the events of a job after a position."""

    job: str
    seen: JobState
    after: Position
    log: LogSelector | None = None  # send the lines of this log only
    live_s: int | None = None  # send steps and traffic without logs, beginning this many seconds ago


@dataclass
class HeldRequest:
    """Connect a view to the layer that holds its request."""

    is_repeated: bool = False  # the view was called before
    is_last: bool = False  # the view must answer now
    user: int = 0  # the id of the user who sent the request
    wait: WaitForChange | FollowEvents | None = None


def get_held_request(request: Any) -> HeldRequest | None:
    """Return None if the request cannot be held: on another server, or for another method than GET."""
    held: HeldRequest | None = getattr(request, "scope", {}).get(SCOPE_KEY)
    return held if request.method == "GET" else None


class ChangeWaiter:
    """Wait until a job leaves a state. None as a state: the job does not exist."""

    def __init__(self, seen: JobState | None) -> None:
        self.state = seen
        self._news = asyncio.Event()

    def update(self, state: JobState | None) -> None:
        if state != self.state:
            self.state = state
            self._news.set()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Return True if the state changed within the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return True


class JobWatcher:
    """Poll the database for all waiters of an event loop. Redis is not needed."""

    def __init__(self) -> None:
        self._waiters: dict[str, set[ChangeWaiter]] = {}
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def watch(self, job: str, seen: JobState | None) -> Iterator[ChangeWaiter]:
        waiter = ChangeWaiter(seen)
        self._waiters.setdefault(job, set()).add(waiter)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll())
        try:
            yield waiter
        finally:
            self._waiters[job].discard(waiter)
            if not self._waiters[job]:
                del self._waiters[job]

    async def _poll(self) -> None:
        while self._waiters:
            try:
                states = await database_sync_to_async(read_job_states)(list(self._waiters))
            except Exception as error:
                # All waiters depend on this task, so it survives every error.
                log.warning("Cannot read job states: %s", error)
            else:
                for job, waiters in self._waiters.items():
                    for waiter in waiters:
                        waiter.update(states.get(job))
            await asyncio.sleep(POLL_S)


def read_job_states(jobs: Iterable[str]) -> dict[str, JobState]:
    """Return the states of the jobs that exist."""
    verdicts = {
        job: dict(zip(VERDICT_FIELDS, values, strict=True)) if values[0] is not None else None
        for job, *values in Attempt.objects.filter(job_id__in=jobs, number=F("job__attempt")).values_list(
            "job_id", *(KT(f"diagnosis__{name}") for name in VERDICT_FIELDS)
        )
    }
    rows = Job.objects.filter(id__in=jobs).values_list("id", "status", "attempt")
    return {job: JobState(status, attempt, verdicts.get(job)) for job, status, attempt in rows}


get_job_watcher = PerLoop(JobWatcher)

RETRY = b"retry: 3000\n\n"  # milliseconds until a disconnected client connects again
HEARTBEAT = b": still here\n\n"
OUTAGE = b": telemetry cannot be read just now\n\n"
ID_PATTERN = r"^([0-9]{1,18})\.([0-9]{1,9})\.([0-9]{1,15})\.([0-9:,-]*)$"
EVENT_KINDS, LIVE_KINDS = ("log", "step", "metric"), ("step", "metric", "traffic")
_STEP_FIELDS = ("rank", "time", "step", "steps", "step_s", "tokens", "loss", "grad_norm", "learning_rate", "not_finite")
_LOG_FIELDS = ("rank", "time", "first", "lines")
_ID = re.compile(ID_PATTERN)
_ENTRY_ID = re.compile(r"([0-9]{1,20})-([0-9]{1,20})")
_MAX_ENTRY_NUMBER = 2**64 - 1  # in each half of an entry id: Redis refuses more


class Position(NamedTuple):
    """Hold what a client has received."""

    change: int = 0  # the last change of status, 0 for none
    attempt: int = 0  # to which `step` and `streams` belong
    step: int = 0
    streams: tuple[tuple[int, str], ...] = ()  # the last entry of each node's stream


class LogSelector(NamedTuple):
    """Select one log of an attempt by its node and its rank there, -1 for the launcher."""

    attempt: int
    node: int
    rank: int


def format_event(name: str, data: Any, position: Position | None = None) -> bytes:
    """Format one event. A client that received it resumes from `position`."""
    head = ""
    if position is not None:
        streams = ",".join(f"{node}:{entry}" for node, entry in position.streams)
        head = f"id: {position.change}.{position.attempt}.{position.step}.{streams}\n"
    return f"{head}event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def parse_position(text: str) -> Position | None:
    """Parse an event id. Return None if it is invalid."""
    match = _ID.fullmatch(text)
    if match is None:
        return None
    change, attempt, step = (int(number) for number in match.groups()[:3])
    streams = parse_stream_positions(match[4]) if match[4] else {}
    return None if streams is None else Position(change, attempt, step, tuple(sorted(streams.items())))


def parse_stream_positions(text: str) -> dict[int, str] | None:
    """Parse the last entry id by node: "7-0" for node 0, or "0:7-0,2:9-1". Return None if it is invalid."""
    if _is_entry_id(text):
        return {0: text}
    positions: dict[int, str] = {}
    for part in text.split(","):
        node, _, entry = part.partition(":")
        if not (node.isascii() and node.isdigit() and len(node) < 6 and _is_entry_id(entry)):
            return None
        positions[int(node)] = entry
    return positions


def _is_entry_id(text: str) -> bool:
    match = _ENTRY_ID.fullmatch(text)
    return match is not None and all(int(half) <= _MAX_ENTRY_NUMBER for half in match.groups())


def serialize_steps(items: list[StepItem], after: int) -> list[dict[str, Any]]:
    """Return one item for each step after `after`, in order. Prefer an item that knows the loss."""
    best: dict[int, StepItem] = {}
    for item in items:
        other = best.get(item["step"])
        if item["step"] > after and (other is None or (_knows_loss(item) and not _knows_loss(other))):
            best[item["step"]] = item
    rows: list[dict[str, Any]] = [{**best[step]} for step in sorted(best)]
    return [{name: row[name] for name in _STEP_FIELDS if name in row} for row in rows]


def serialize_loss(item: MetricItem, name: str) -> dict[str, Any]:
    """Return one metric of an item as the loss of the script. `loss` is null if it is not finite."""
    row = {"rank": item["rank"], "time": item["time"], "step": item["step"], "source": item["source"]}
    faults = item.get("not_finite", {})
    return {**row, "loss": item["values"].get(name), **({"not_finite": faults[name]} if name in faults else {})}


def _knows_loss(item: StepItem) -> bool:
    return item["loss"] is not None or "not_finite" in item


def serialize_log(item: LogItem, node: int) -> dict[str, Any]:
    fields = {name: item[name] for name in _LOG_FIELDS}  # type: ignore[literal-required]
    return {"node": node, **fields, "skipped": item.get("skipped", 0), "open": item.get("open", [])}
