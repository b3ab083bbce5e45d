"""Where ranks stand, and what they and their hosts use."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from contracts.fields import Count, LogRank, Number, Rank, Seconds, Sentence
from contracts.telemetry.timeline import GroupRanks
from contracts.telemetry.words import Op, Phase


class Standing(TypedDict):
    """Where a rank is in one group. `issued` and `ended` count its collectives there, without sends and receives, which
    are not the same on all; they differ while one is on its way. The oldest of all began `since` (unix seconds by the
    host's clock)."""

    group: GroupRanks
    issued: Count
    ended: Count
    op: NotRequired[Op]  # of the oldest on its way, with its bytes and the time
    payload_bytes: NotRequired[Count]
    peer: NotRequired[Rank]  # of a send or receive, the other's rank
    since: NotRequired[Number]
    sequence: NotRequired[Count]  # as in `Calls`
    blocking: NotRequired[bool]  # whether the training thread waits, for it or for one behind it


class StandingItem(TypedDict):
    """Nothing ended on this rank for a while: where it stands. Told again and again until something does, then once
    more with `still` 0."""

    kind: Literal["standing"]
    rank: Rank
    time: Number
    step: Count  # steps completed
    phase: Phase
    still: Seconds  # since its last collective was issued or ended, or its phase or step changed
    groups: Annotated[list[Standing], Field(max_length=256)]
    stack: Annotated[list[Sentence], Field(max_length=60)]  # of the training thread, outermost first: "file:line in f"


class ProcessItem(TypedDict):
    """A rank's process as its host sees it, while it stands still, says nothing, is stopped, or is
    kept waiting by a quota or for a processor."""

    kind: Literal["process"]
    rank: Rank
    pid: NotRequired[Count]  # process ID on the host
    time: Number
    state: Literal["running", "sleeping", "disk", "stopped", "zombie", "gone"]  # stopped: at a glance of late too
    cpu: Seconds  # seconds of processor time it took in each second of late
    throttled: Seconds  # seconds in each second that a CPU quota kept it waiting
    crowded: NotRequired[Seconds]  # that its main thread was ready and got no processor, a quota's included
    stack: Annotated[list[Sentence], Field(max_length=60)]  # read from outside, where the rank itself does not speak
    silent_s: Seconds  # since its meter last said anything


class GaugeItem(TypedDict):
    """What a rank holds and its host uses, every few seconds. `rank` -1: the host. Bytes are now, rates of late."""

    kind: Literal["gauge"]
    rank: LogRank
    time: Number
    resident_bytes: NotRequired[Count]
    allocated_bytes: NotRequired[Count]  # by torch's allocator on a GPU
    reserved_bytes: NotRequired[Count]
    cpu: NotRequired[Seconds]  # processors in use
    sent_bytes_s: NotRequired[Seconds]  # on all its network interfaces but loopback
    received_bytes_s: NotRequired[Seconds]
    gpu_percent: NotRequired[Seconds]
    gpu_clock_mhz: NotRequired[Seconds]
    gpu_power_w: NotRequired[Seconds]
    gpu_celsius: NotRequired[Number]
