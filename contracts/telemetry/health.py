"""Telemetry of stalled ranks, processes and resource usage."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from contracts.fields import Count, LogRank, Number, Rank, Seconds, Text
from contracts.telemetry.timeline import GroupRanks
from contracts.telemetry.vocabulary import Op, Phase


class GroupProgress(TypedDict):
    """Progress of a rank in one process group.

    `issued` and `ended` count collectives without sends and receives, whose numbers differ between ranks. The fields
    from `op` on describe the oldest operation in flight.
    """

    group: GroupRanks
    issued: Count
    ended: Count
    op: NotRequired[Op]
    payload_bytes: NotRequired[Count]
    peer: NotRequired[Rank]  # rank at the other end of a send or receive
    since: NotRequired[Number]  # start, unix seconds of the clock of the host
    sequence: NotRequired[Count]  # as in `CollectiveCalls`
    blocking: NotRequired[bool]  # True if the training thread waits for an operation of this group


class StallItem(TypedDict):
    """A rank makes no progress. Repeated during the stall, then sent once more with `still` 0 when it ends."""

    kind: Literal["standing"]
    rank: Rank
    time: Number
    step: Count  # completed steps
    phase: Phase
    still: Seconds  # since a collective was issued or ended, or the phase or step changed
    groups: Annotated[list[GroupProgress], Field(max_length=256)]
    stack: Annotated[list[Text], Field(max_length=60)]  # training thread, outermost frame first: "file:line in f"


class ProcessItem(TypedDict):
    """Process of a rank that is stalled, silent, stopped, or delayed by a CPU quota or a busy CPU."""

    kind: Literal["process"]
    rank: Rank
    pid: NotRequired[Count]  # process ID on the host
    time: Number
    state: Literal["running", "sleeping", "disk", "stopped", "zombie", "gone"]  # also "stopped" if it recently was
    cpu: Seconds  # recent CPU seconds per second
    throttled: Seconds  # recent seconds per second that a CPU quota delayed it
    crowded: NotRequired[Seconds]  # recent seconds per second that its main thread waited for a CPU, quota included
    stack: Annotated[list[Text], Field(max_length=60)]  # read from outside if the rank itself is silent
    silent_s: Seconds  # since the last message of its meter


class GaugeItem(TypedDict):
    """Resource usage of a rank, or of its host if `rank` is -1. Bytes are current values, rates are recent."""

    kind: Literal["gauge"]
    rank: LogRank
    time: Number
    resident_bytes: NotRequired[Count]
    allocated_bytes: NotRequired[Count]  # torch's allocator on a GPU
    reserved_bytes: NotRequired[Count]
    cpu: NotRequired[Seconds]  # CPUs in use
    sent_bytes_s: NotRequired[Seconds]  # all network interfaces except loopback
    received_bytes_s: NotRequired[Seconds]
    gpu_percent: NotRequired[Seconds]
    gpu_clock_mhz: NotRequired[Seconds]
    gpu_power_w: NotRequired[Seconds]
    gpu_celsius: NotRequired[Number]
