"""Read traced steps from the telemetry that Redis still has, and request traces of further steps."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import repeat
from typing import Annotated, Any

import msgpack
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from redis.exceptions import RedisError
from typing_extensions import TypedDict

from contracts.names import requested_timelines_key, telemetry_stream
from contracts.telemetry.timeline import TimelineItem, validate_timeline
from contracts.telemetry.vocabulary import MAX_UNIX_S
from jobs.core.redis_client import connect
from jobs.models import Job
from jobs.runs.traces.events import CollectiveCall, EventTrace, WorkSpan
from planner.facts.parse_spec import convert_error
from planner.facts.validation import SpecError, StrictModel

log = logging.getLogger(__name__)

ENTRIES_PER_READ = 32  # of at most 256 KiB each
TIMELINE_MARK = b"timeline"  # in every batch with a traced step
_TIMELINE = TypeAdapter(TimelineItem)


class RedisUnreachableError(RuntimeError):
    """Redis cannot be reached."""


def read_traced_steps(job: Job, attempt: int) -> list[int]:
    """Return the traced steps of an attempt, in order.

    Raises:
        RedisUnreachableError: Redis cannot be reached.
    """
    return sorted({item["step"] for item, _ in _read_items(job, attempt)})


def read_step(job: Job, attempt: int, step: int | None) -> tuple[int, EventTrace] | None:
    """Return a step with the events of its ranks, or None if it was not traced.

    Args:
        step: None for the latest traced step.

    Raises:
        RedisUnreachableError: Redis cannot be reached.
    """
    number = step
    found: list[tuple[TimelineItem, float]] = []
    for item, offset_s in _read_items(job, attempt):
        if step is None and (number is None or item["step"] > number):
            number, found = item["step"], []
        if item["step"] == number:
            found.append((item, offset_s))
    return None if number is None or not found else (number, combine_items(found))


def combine_items(items: Iterable[tuple[TimelineItem, float]]) -> EventTrace:
    """Combine telemetry items, each with the offset in seconds from its host's clock to the board's."""
    calls: list[CollectiveCall] = []
    spans: list[WorkSpan] = []
    left_out = 0
    for item, offset_s in items:
        began = item["began"] + offset_s
        calls += _parse_calls(item, began)
        spans += _parse_spans(item, began)
        left_out += item["left_out"]
    return EventTrace(sorted(calls, key=lambda c: c.issued), sorted(spans, key=lambda s: s.began), left_out)


def _parse_calls(item: TimelineItem, began: float) -> Iterator[CollectiveCall]:
    groups = [(group["axis"], tuple(group["ranks"]), group["nth"]) for group in item["groups"]]
    columns = item["calls"]
    rows = zip(
        *(
            columns["group"],
            columns["op"],
            columns["sequence"],
            columns["issued_us"],
            columns["blocked_us"],
            columns["ended_us"],
        ),
        *(columns["payload_bytes"], columns["peer"]),
        strict=True,
    )
    for group, op, sequence, issued, blocked, ended, payload, peer in rows:
        axis, ranks, nth = groups[group]
        times = began + issued / 1e6, blocked / 1e6, began + ended / 1e6
        yield CollectiveCall(item["step"], item["rank"], axis, ranks, nth, sequence, op, *times, payload, peer)


def _parse_spans(item: TimelineItem, began: float) -> Iterator[WorkSpan]:
    columns = item["spans"]
    rows = zip(
        *(repeat(item["step"], len(columns["work"])), columns["work"], columns["chunk"], columns["micro_batch"]),
        *(columns["from_us"], columns["to_us"]),
        strict=True,
    )
    for step, work, chunk, micro_batch, first, last in rows:
        yield WorkSpan(step, item["rank"], work, chunk, micro_batch, began + first / 1e6, began + last / 1e6)


def _read_items(job: Job, attempt: int) -> Iterator[tuple[TimelineItem, float]]:
    """Yield the traced steps of each member's stream."""
    members = job.attempts.filter(number=attempt).values_list("members__node", flat=True)
    nodes = sorted({0, *(node for node in members if node is not None)})
    try:
        with closing(connect()) as client:
            for node in nodes:
                yield from _read_stream(client, telemetry_stream(job.id, attempt, node))
    except (RedisError, OSError) as error:
        raise RedisUnreachableError(str(error)) from error


def _read_stream(client: Any, stream: str) -> Iterator[tuple[TimelineItem, float]]:
    after = "-"
    while entries := client.xrange(stream, min=after, count=ENTRIES_PER_READ):
        for _, fields in entries:
            packed = fields.get(b"b", b"")
            if TIMELINE_MARK in packed:
                yield from _parse_batch(packed)
        after = f"({entries[-1][0].decode()}"


def _parse_batch(packed: bytes) -> Iterator[tuple[TimelineItem, float]]:
    try:
        batch = msgpack.unpackb(packed)
        offset_s = float(batch.get("clock", {}).get("offset_s", 0.0))
        items = [_TIMELINE.validate_python(item) for item in batch["items"] if item["kind"] == "timeline"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # including ValidationError
        log.warning("Skipped an invalid telemetry entry: %s", error)
        return
    for item in items:
        if _is_valid(item, offset_s):
            yield item, offset_s


def _is_valid(item: TimelineItem, offset_s: float) -> bool:
    try:
        validate_timeline(item)
    except ValueError as error:
        log.warning("Skipped an invalid traced step: %s", error)
        return False
    return 0 <= item["began"] + offset_s < MAX_UNIX_S


REQUEST_LIFETIME_S = 3600
MAX_REQUESTED_STEPS = 64


class TooManyRequestedStepsError(RuntimeError):
    """Too many steps are requested."""


def request_step(job: Job, step: int) -> list[int]:
    """Request a step from the supervisors of a running attempt. Return all requested steps, in order.

    Raises:
        RedisUnreachableError: Redis cannot be reached.
        TooManyRequestedStepsError: The maximum number of steps is requested.
    """
    key = requested_timelines_key(job.id, job.attempt)
    try:
        with closing(connect()) as client:
            requested = {int(member) for member in client.smembers(key)}
            if len(requested | {step}) > MAX_REQUESTED_STEPS:
                raise TooManyRequestedStepsError(
                    f"Traces of {MAX_REQUESTED_STEPS} steps are already requested, the maximum. "
                    "Requests expire after one hour."
                )
            pipe = client.pipeline()
            pipe.sadd(key, step)
            pipe.expire(key, REQUEST_LIFETIME_S)
            pipe.execute()
    except (RedisError, OSError) as error:
        raise RedisUnreachableError(str(error)) from error
    return sorted(requested | {step})


MAX_STEP = 2**53 - 1  # the largest integer of JavaScript


def _parse_whole_float(value: object) -> object:
    """Convert 5.0 to 5, because JSON has one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class TraceRequest(StrictModel):
    """Request the events of a step."""

    step: Annotated[int, BeforeValidator(_parse_whole_float)] = Field(ge=0, le=MAX_STEP)


class RequestedSteps(TypedDict):
    """List all requested steps."""

    steps: list[int]


def parse_step_request(data: object) -> int:
    """Return the step of a request body.

    Raises:
        SpecError: A field is invalid.
    """
    try:
        return TraceRequest.model_validate(data).step
    except ValidationError as error:
        raise SpecError([convert_error(detail, TraceRequest) for detail in error.errors()[:20]]) from error
