"""Steps that ranks told of event by event, out of the telemetry that Redis still has of an attempt."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import repeat
from typing import Any

import msgpack
from pydantic import TypeAdapter
from redis.exceptions import RedisError

from contracts.names import telemetry_stream
from contracts.telemetry.timeline import TimelineItem, validate_timeline
from contracts.telemetry.vocabulary import MAX_UNIX_S
from jobs.core.redis_connection import connect
from jobs.models import Job
from jobs.runs.traces.shapes import Call, Span, Trace

log = logging.getLogger(__name__)

ENTRIES = 32  # read at once; a host's entries are 256 KiB at most
MARK = b"timeline"  # stands in every batch that tells a step
TIMELINE = TypeAdapter(TimelineItem)


class AwayError(RuntimeError):
    """Redis could not be reached."""


def steps_told(job: Job, attempt: int) -> list[int]:
    """Steps of which a rank told events, in order.

    Raises:
        AwayError: Redis could not be reached.
    """
    return sorted({item["step"] for item, _ in _items(job, attempt)})


def trace_of(job: Job, attempt: int, step: int | None) -> tuple[int, Trace] | None:
    """A step of all ranks that told of it, the newest where none is named; None where there is none.

    Raises:
        AwayError: Redis could not be reached.
    """
    wanted = step
    found: list[tuple[TimelineItem, float]] = []
    for item, offset_s in _items(job, attempt):
        if step is None and (wanted is None or item["step"] > wanted):
            wanted, found = item["step"], []
        if item["step"] == wanted:
            found.append((item, offset_s))
    return None if wanted is None or not found else (wanted, trace(found))


def trace(items: Iterable[tuple[TimelineItem, float]]) -> Trace:
    """What items tell, each with the seconds that bring its host's clock to the board's."""
    calls: list[Call] = []
    spans: list[Span] = []
    left_out = 0
    for item, offset_s in items:
        began = item["began"] + offset_s
        calls += _calls(item, began)
        spans += _spans(item, began)
        left_out += item["left_out"]
    return Trace(sorted(calls, key=lambda c: c.issued), sorted(spans, key=lambda s: s.began), left_out)


def _calls(item: TimelineItem, began: float) -> Iterator[Call]:
    groups = [(group["axis"], tuple(group["ranks"]), group["nth"]) for group in item["groups"]]
    told = item["calls"]
    rows = zip(
        *(told["group"], told["op"], told["sequence"], told["issued_us"], told["blocked_us"], told["ended_us"]),
        *(told["payload_bytes"], told["peer"]),
        strict=True,
    )
    for group, op, sequence, issued, blocked, ended, payload, peer in rows:
        axis, ranks, nth = groups[group]
        times = began + issued / 1e6, blocked / 1e6, began + ended / 1e6
        yield Call(item["step"], item["rank"], axis, ranks, nth, sequence, op, *times, payload, peer)


def _spans(item: TimelineItem, began: float) -> Iterator[Span]:
    told = item["spans"]
    rows = zip(
        *(repeat(item["step"], len(told["work"])), told["work"], told["chunk"], told["micro_batch"]),
        *(told["from_us"], told["to_us"]),
        strict=True,
    )
    for step, work, chunk, micro_batch, first, last in rows:
        yield Span(step, item["rank"], work, chunk, micro_batch, began + first / 1e6, began + last / 1e6)


def _items(job: Job, attempt: int) -> Iterator[tuple[TimelineItem, float]]:
    """In the order of each member's stream."""
    told = job.attempts.filter(number=attempt).values_list("members__node", flat=True)
    nodes = sorted({0, *(node for node in told if node is not None)})
    try:
        with closing(connect()) as client:
            for node in nodes:
                yield from _items_of(client, telemetry_stream(job.id, attempt, node))
    except (RedisError, OSError) as error:
        raise AwayError(str(error)) from error


def _items_of(client: Any, stream: str) -> Iterator[tuple[TimelineItem, float]]:
    after = "-"
    while entries := client.xrange(stream, min=after, count=ENTRIES):
        for _, fields in entries:
            packed = fields.get(b"b", b"")
            if MARK in packed:
                yield from _items_in(packed)
        after = f"({entries[-1][0].decode()}"


def _items_in(packed: bytes) -> Iterator[tuple[TimelineItem, float]]:
    try:
        batch = msgpack.unpackb(packed)
        offset_s = float(batch.get("clock", {}).get("offset_s", 0.0))
        found = [TIMELINE.validate_python(item) for item in batch["items"] if item["kind"] == "timeline"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # a ValidationError is a ValueError
        log.warning("Skipped an invalid telemetry entry: %s", error)
        return
    for item in found:
        if _can_be_told(item, offset_s):
            yield item, offset_s


def _can_be_told(item: TimelineItem, offset_s: float) -> bool:
    try:
        validate_timeline(item)
    except ValueError as error:
        log.warning("Skipped an invalid traced step: %s", error)
        return False
    return 0 <= item["began"] + offset_s < MAX_UNIX_S
