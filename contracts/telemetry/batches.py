"""All telemetry items, and the frames and batches that carry them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, NotRequired

import msgpack
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from contracts.fields import AttemptNumber, Count, HostName, JobId, Number, Rank, Seconds
from contracts.telemetry.items import (
    CheckpointItem,
    EvalItem,
    GaugeItem,
    LogItem,
    PhaseItem,
    ProcessItem,
    StallItem,
    StartItem,
    StepItem,
    TrafficItem,
    ValidTimelineItem,
)
from contracts.telemetry.metrics import MetricItem
from contracts.telemetry.results import DryRunItem, LabItem, ProfileItem, ProofItem, VerdictItem


class GapItem(TypedDict):
    """The supervisor dropped `items` items before this item, because Redis was unreachable for too long."""

    kind: Literal["gap"]
    time: Number
    items: Count


Item = Annotated[
    TrafficItem
    | StepItem
    | EvalItem
    | PhaseItem
    | LogItem
    | VerdictItem
    | ProfileItem
    | LabItem
    | DryRunItem
    | CheckpointItem
    | ProofItem
    | ValidTimelineItem
    | StallItem
    | ProcessItem
    | GaugeItem
    | MetricItem
    | StartItem
    | GapItem,
    Field(discriminator="kind"),
]


class Frame(TypedDict):
    """Items from a rank to its supervisor."""

    v: Literal[1]
    job: JobId
    attempt: AttemptNumber
    rank: Rank
    items: list[Item]


class ClockOffset(TypedDict):
    """Offset to add to the clock of a host to get the clock of the board, accurate to `within_s`."""

    offset_s: Number
    within_s: Seconds


class Batch(TypedDict):
    """Items from a supervisor to a Redis Stream and browsers. With `clock`, times are those of the board."""

    v: Literal[1]
    job: JobId
    attempt: AttemptNumber
    time: Number
    items: list[Item]
    host: NotRequired[HostName]
    clock: NotRequired[ClockOffset]


_LIVE_ITEMS: dict[str, TypeAdapter[Any]] = {
    "log": TypeAdapter(LogItem),
    "metric": TypeAdapter(MetricItem),
    "phase": TypeAdapter(PhaseItem),
    "step": TypeAdapter(StepItem),
    "traffic": TypeAdapter(TrafficItem),
}


def select_items(batch: bytes, kinds: Iterable[str]) -> Iterator[Any]:
    """Yield the valid items of some kinds ("log", "metric", "phase", "step", "traffic") from a msgpack batch.

    Invalid items are skipped, because a host of another version, or a faulty one, can write anything to its stream.
    """
    try:
        content = msgpack.unpackb(batch)
        items = content["items"] if isinstance(content, dict) else []
    except (ValueError, KeyError, msgpack.UnpackException):
        return
    for item in items if isinstance(items, list) else []:
        kind: Any = item.get("kind") if isinstance(item, dict) else None
        if kind not in kinds:
            continue
        try:
            yield _LIVE_ITEMS[kind].validate_python(item)
        except ValidationError:
            continue


def select_stream_items(entries: Iterable[tuple[Any, Mapping[bytes, bytes]]], kinds: Iterable[str]) -> Iterator[Any]:
    """Yield the valid items of some kinds from the entries of a stream, in order."""
    for _, fields in entries:
        yield from select_items(fields.get(b"b", b""), kinds)
