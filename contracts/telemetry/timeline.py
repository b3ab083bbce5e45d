"""A step event by event."""

from __future__ import annotations

from typing import Annotated, Literal, cast

from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from contracts.fields import LARGEST, Count, LogRank, Number, Rank, Seconds
from contracts.telemetry.words import LATEST, LONGEST_STEP_US, MOST_EVENTS, Column, Label, Op, Ranks, Times, Work


class GroupRanks(TypedDict):
    """A group as all its ranks know it: the same `axis`, `ranks` and `nth` on each. `nth` tells several with the same
    ranks under one axis apart, from 0 in the order they were made."""

    axis: Label
    ranks: Ranks
    nth: Count


class Calls(TypedDict):
    """Collectives that one rank issued, in columns of one length. Times are microseconds since the item's `began`."""

    group: Column  # places in the item's `groups`
    op: Annotated[list[Op], Field(max_length=MOST_EVENTS)]
    # The how manieth collective of its group on this rank, from 1: equal on all its ranks. Of a send or receive, the
    # how manieth that way between the two ranks of the group: equal on both.
    sequence: Column
    issued_us: Times
    blocked_us: Times  # of the time to its end, what the training thread stood still for it
    ended_us: Times
    payload_bytes: Column
    peer: Annotated[list[LogRank], Field(max_length=MOST_EVENTS)]  # of a send or receive, the other's rank; else -1


class Spans(TypedDict):
    """What the training thread did, in columns of one length. Microseconds since `began`; -1 where none applies."""

    work: Annotated[list[Work], Field(max_length=MOST_EVENTS)]
    chunk: Annotated[list[LogRank], Field(max_length=MOST_EVENTS)]
    micro_batch: Annotated[list[Annotated[int, Field(ge=-1, le=LARGEST)]], Field(max_length=MOST_EVENTS)]
    from_us: Times
    to_us: Times


class TimelineItem(TypedDict):
    """One step of one rank, event by event. Told of steps that are a multiple of a power of two, the smallest that
    keeps within the bytes there are for it: of any two ranks the one that tells fewer tells none the other does not."""

    kind: Literal["timeline"]
    rank: Rank
    time: Number
    step: Count
    began: Number  # unix seconds by the host's clock
    step_s: Seconds
    groups: Annotated[list[GroupRanks], Field(max_length=256)]
    calls: Calls
    spans: Spans
    left_out: Count  # events that did not fit


def sensible(item: TimelineItem) -> TimelineItem:
    """Columns of one length, groups that there are, and times that can be told. Raises ValueError."""
    for columns in cast(list[dict[str, list[object]]], [item["calls"], item["spans"]]):
        if len({len(column) for column in columns.values()}) != 1:
            raise ValueError("columns differ in length")
    calls, spans = item["calls"], item["spans"]
    if any(place >= len(item["groups"]) for place in calls["group"]):
        raise ValueError("calls.group: unknown group")
    if not 0 <= item["began"] < LATEST:
        raise ValueError("began: not a time")
    times = (calls["issued_us"], calls["blocked_us"], calls["ended_us"], spans["from_us"], spans["to_us"])
    if any(abs(time) > LONGEST_STEP_US for column in times for time in column):
        raise ValueError("a call or a span is outside its step")
    return item


Timeline = Annotated[TimelineItem, AfterValidator(sensible)]
