"""Telemetry of traced steps: each collective and compute span of one step."""

from __future__ import annotations

from typing import Annotated, Literal, cast

from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from contracts.fields import MAX_INT64, Count, LogRank, Number, Rank, Seconds
from contracts.telemetry.vocabulary import (
    MAX_EVENTS_PER_STEP,
    MAX_STEP_US,
    MAX_UNIX_S,
    Column,
    Label,
    Op,
    Ranks,
    Times,
    Work,
)


class GroupRanks(TypedDict):
    """Identity of a process group, equal on all its ranks.

    `nth` numbers the groups with the same ranks and axis from 0, in the order of their creation.
    """

    axis: Label
    ranks: Ranks
    nth: Count


class CollectiveCalls(TypedDict):
    """Collectives of one rank, in columns of equal length. Times are microseconds since `began` of the item."""

    group: Column  # indices into `groups` of the item
    op: Annotated[list[Op], Field(max_length=MAX_EVENTS_PER_STEP)]
    # Sequence number of the collective in its group from 1, equal on all ranks. For a send or receive, the sequence
    # number between the two ranks in this direction, equal on both.
    sequence: Column
    issued_us: Times
    blocked_us: Times  # time until the end that the training thread waited
    ended_us: Times
    payload_bytes: Column
    peer: Annotated[list[LogRank], Field(max_length=MAX_EVENTS_PER_STEP)]  # rank at the other end of p2p, else -1


class ComputeSpans(TypedDict):
    """Work of the training thread, in columns of equal length. Microseconds since `began`; -1 if not applicable."""

    work: Annotated[list[Work], Field(max_length=MAX_EVENTS_PER_STEP)]
    chunk: Annotated[list[LogRank], Field(max_length=MAX_EVENTS_PER_STEP)]
    micro_batch: Annotated[list[Annotated[int, Field(ge=-1, le=MAX_INT64)]], Field(max_length=MAX_EVENTS_PER_STEP)]
    from_us: Times
    to_us: Times


class TimelineItem(TypedDict):
    """Trace of one step of one rank.

    Ranks trace the multiples of a power of two, the smallest that stays within their byte rate. The traced steps of a
    slower-tracing rank are therefore a subset of those of each other rank.
    """

    kind: Literal["timeline"]
    rank: Rank
    time: Number
    step: Count
    began: Number  # unix seconds of the clock of the host
    step_s: Seconds
    groups: Annotated[list[GroupRanks], Field(max_length=256)]
    calls: CollectiveCalls
    spans: ComputeSpans
    left_out: Count  # events beyond the bounds


def validate_timeline(item: TimelineItem) -> TimelineItem:
    """Check column lengths, group indices and times. Raises ValueError."""
    for columns in cast(list[dict[str, list[object]]], [item["calls"], item["spans"]]):
        if len({len(column) for column in columns.values()}) != 1:
            raise ValueError("columns differ in length")
    calls, spans = item["calls"], item["spans"]
    if any(index >= len(item["groups"]) for index in calls["group"]):
        raise ValueError("calls.group: unknown group")
    if not 0 <= item["began"] < MAX_UNIX_S:
        raise ValueError("began: not a time")
    times = (calls["issued_us"], calls["blocked_us"], calls["ended_us"], spans["from_us"], spans["to_us"])
    if any(abs(time) > MAX_STEP_US for column in times for time in column):
        raise ValueError("a call or a span is outside its step")
    return item


ValidTimelineItem = Annotated[TimelineItem, AfterValidator(validate_timeline)]
