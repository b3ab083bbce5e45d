"""Read the traced events of steps from the telemetry in Redis, and request traces of further steps."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Annotated, Any

import msgpack
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from redis.exceptions import RedisError
from typing_extensions import TypedDict

from contracts.names import requested_timelines_key, telemetry_stream
from contracts.telemetry.items import MAX_UNIX_S, TimelineItem, validate_timeline
from jobs.core.redis_client import connect
from jobs.models import Job
from jobs.runs.traces.trace_events import Columns, EventTrace, parse_trace
from planner.facts.parse_spec import convert_error
from planner.facts.validation import SpecError, StrictModel


class TracedSteps(TypedDict):
    """List the steps that have events."""

    steps: list[int]


def convert_timeline(item: TimelineItem, offset_s: float) -> tuple[Columns, Columns]:
    """Return the columns of `calls` and `spans`. `offset_s`: from the host's clock to the board's."""
    began, calls, spans = item["began"] + offset_s, item["calls"], item["spans"]
    groups = [item["groups"][index] for index in calls["group"]]
    num_spans = len(spans["work"])
    return (
        {
            "step": [item["step"]] * len(groups),
            "rank": [item["rank"]] * len(groups),
            "axis": [group["axis"] for group in groups],
            "ranks": [group["ranks"] for group in groups],
            "nth": [group["nth"] for group in groups],
            "sequence": calls["sequence"],
            "op": list(calls["op"]),
            "issued": [began + us / 1e6 for us in calls["issued_us"]],
            "blocked_s": [us / 1e6 for us in calls["blocked_us"]],
            "ended": [began + us / 1e6 for us in calls["ended_us"]],
            "payload_bytes": calls["payload_bytes"],
            "peer": calls["peer"],
        },
        {
            "step": [item["step"]] * num_spans,
            "rank": [item["rank"]] * num_spans,
            "work": list(spans["work"]),
            "chunk": spans["chunk"],
            "micro_batch": spans["micro_batch"],
            "began": [began + us / 1e6 for us in spans["from_us"]],
            "ended": [began + us / 1e6 for us in spans["to_us"]],
        },
    )


log = logging.getLogger(__name__)

ENTRIES_PER_READ = 32  # of at most 256 KiB each
TIMELINE_MARK = b"timeline"  # in every batch with a traced step
_TIMELINE = TypeAdapter(TimelineItem)


class RedisUnreachableError(RuntimeError):
    """Redis cannot be reached."""


def read_traced_steps(job: Job, attempt: int) -> list[int]:
    """Return the traced steps of an attempt, in order. Raise RedisUnreachableError."""
    return sorted({item["step"] for item, _ in _read_items(job, attempt)})


def read_step(job: Job, attempt: int, step: int | None) -> tuple[int, EventTrace] | None:
    """Return a step with the events of its ranks, or None if it was not traced. Raise RedisUnreachableError.

    Args:
        step: None for the latest traced step.
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
    traces = [parse_trace(*convert_timeline(item, offset_s), item["left_out"]) for item, offset_s in items]
    calls = sorted((call for trace in traces for call in trace.calls), key=lambda call: call.issued)
    spans = sorted((span for trace in traces for span in trace.spans), key=lambda span: span.began)
    return EventTrace(calls, spans, sum(trace.left_out for trace in traces))


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
        try:
            validate_timeline(item)
        except ValueError as error:
            log.warning("Skipped an invalid traced step: %s", error)
            continue
        if 0 <= item["began"] + offset_s < MAX_UNIX_S:
            yield item, offset_s


REQUEST_LIFETIME_S = 3600
MAX_REQUESTED_STEPS = 64


class TooManyRequestedStepsError(RuntimeError):
    """Too many steps are requested."""


def request_step(job: Job, step: int) -> list[int]:
    """Request a step from the supervisors of a running attempt. Return all requested steps, in order.

    Raises:
        RedisUnreachableError, TooManyRequestedStepsError: The step is not requested.
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
    """Return the step of a request body. Raise SpecError if a field is invalid."""
    try:
        return TraceRequest.model_validate(data).step
    except ValidationError as error:
        raise SpecError([convert_error(detail, TraceRequest) for detail in error.errors()[:20]]) from error
