"""What a rank says while it runs, and how it travels.

A rank sends `Frame`s (4-byte big-endian length, then msgpack) over its supervisor's unix socket. The
supervisor merges the items of all ranks every 100 ms into one `Batch`, one Redis Stream entry.
Browsers get the same `Batch`. Counters are cumulative since the rank started, so a lost or thinned
item loses no byte: the next one carries the truth.

Units: bytes, seconds, unix seconds for `time`. Version 1; a reader refuses another version.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, NotRequired, cast

from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from contracts.fields import (
    LARGEST,
    AttemptNumber,
    Count,
    HostName,
    JobId,
    LogLine,
    LogRank,
    Number,
    Plain,
    Rank,
    Seconds,
    Sentence,
    Word,
)

VERSION: Final = 1
MOST_EVENTS: Final = 20_000  # of one step of one rank
LATEST: Final = float(2**40)  # unix seconds; beyond it nothing is a time
LONGEST_STEP_US: Final = 10**13  # 115 days
MOST_CHECKPOINTS: Final = 100  # of an attempt that are remembered, the newest
FIRST_STEPS: Final = 3  # of a run, no measure of the others: buckets regroup, caches fill, kernels are compiled
TIMED_STEPS: Final = 500  # the last, whose median a run's end tells
SPEED_STEPS: Final = 20  # the last, whose mean speed it tells

Phase = Literal["setup", "step", "eval", "checkpoint", "proof", "teardown"]
Op = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
    "barrier",
]
Axis = Literal["dp", "pp", "cp", "ep", "tp", "world"]
Work = Literal["data", "forward", "backward", "weights", "optimizer", "checkpoint", "eval"]
Label = Word  # an Axis; in a user's own script, which has none, the words for a group
Column = Annotated[list[Count], Field(max_length=MOST_EVENTS)]
Times = Annotated[list[Annotated[int, Field(ge=-LARGEST, le=LARGEST)]], Field(max_length=MOST_EVENTS)]
Ranks = Annotated[list[Rank], Field(min_length=1, max_length=65536)]


class Cell(TypedDict):
    """Cumulative counters of one (phase, op, axis, group size) on one rank.

    `payload_bytes` counts what the caller handed over: the FULL (gathered) buffer for all_gather,
    reduce_scatter, gather and scatter. `algorithmic_bytes` is what a bandwidth-optimal algorithm makes
    this rank send; of an all-to-all with splits, what they send elsewhere. Both are counted when the
    collective is issued; `busy_s` sums the durations of the
    `completed` ones.
    """

    phase: Phase
    op: Op
    axis: Label
    group_size: Count
    count: Count
    completed: Count
    payload_bytes: Count
    algorithmic_bytes: Count
    busy_s: Seconds


class TrafficItem(TypedDict):
    """Cells that changed since this rank's previous traffic item."""

    kind: Literal["traffic"]
    rank: Rank
    time: Number
    cells: list[Cell]
    dropped: Count  # records the bounded buffer had to let go so far; the counters above stay exact


class StepParts(TypedDict):
    """What one rank's training thread spent a step on, seconds. `exposed` is by axis what it stood still for a
    collective, a receive's wait for a late stage included; `hidden` what collectives ran while it computed, without
    receives, of which nobody knows when they began to travel. With `data`, `exposed` adds up to no more than the step;
    the rest of it is compute."""

    data: Seconds
    optimizer: Seconds
    exposed: dict[Label, Seconds]
    hidden: dict[Label, Seconds]


class StepItem(TypedDict):
    """An optimiser step just ended on this rank. `cells` holds every cell of phase "step", exact."""

    kind: Literal["step"]
    rank: Rank
    time: Number
    step: Count  # steps completed, from 1
    ran: Count  # of these, steps of this run: fewer when it resumed
    steps: Count  # steps asked for
    step_s: Seconds
    tokens: Count  # tokens of the global batch
    loss: Number | None  # global mean loss of this step; None on ranks that do not know it
    not_finite: NotRequired[Word]  # "loss is nan": what could not be told as a number, and is None above
    grad_norm: Number | None
    learning_rate: Number
    cells: list[Cell]
    parts: NotRequired[StepParts]


class EvalItem(TypedDict):
    """Validation loss on the held-out slice after `step` steps."""

    kind: Literal["eval"]
    rank: Rank
    time: Number
    step: Count
    loss: Number


class PhaseItem(TypedDict):
    """The rank entered a phase (page: what is it doing now)."""

    kind: Literal["phase"]
    rank: Rank
    time: Number
    phase: Phase
    steps: NotRequired[Count]  # of a script: optimiser steps that have ended
    cells: NotRequired[list[Cell]]  # of one that is compared: every cell of phase "step" as this step ended, exact


class LogItem(TypedDict):
    """Complete log lines of a rank; rank -1 is the launcher. `first` numbers lines from 0."""

    kind: Literal["log"]
    rank: LogRank
    time: Number
    first: Count
    lines: list[LogLine]
    skipped: NotRequired[Count]  # lines dropped just before `first` because the log outran its bound


class VerdictRow(TypedDict):
    """Predicted against measured for one (phase, op, axis); payload bytes."""

    phase: Phase
    op: Op
    axis: Label
    predicted_count: Count
    measured_count: Count
    predicted_bytes: Count
    measured_bytes: Count


class VerdictItem(TypedDict):
    """A rank's own comparison at the end of its run, every phase."""

    kind: Literal["verdict"]
    rank: Rank
    time: Number
    rows: list[VerdictRow]
    peak_bytes: NotRequired[Count]  # most held at once over what was before the model: allocated, or resident on a CPU


class ProfileItem(TypedDict):
    """What a calibration measured, as `planner.hardware.profile.HostProfile` in JSON; rank 0 sends it once."""

    kind: Literal["profile"]
    rank: Rank
    time: Number
    profile: Plain


class LabItem(TypedDict):
    """What a lab found, as `planner.facts.lab.LabResult` in JSON; the first rank of its group sends it once."""

    kind: Literal["lab"]
    rank: Rank
    time: Number
    result: Plain


class DryRunItem(TypedDict):
    """What one step of `rank` would be, found without its peers; its collectives come as a verdict.

    `parameters` are what the rank keeps. `peak_bytes` is of tensors alive at once; `optimizer_bytes`, the moments that
    a first step does not have yet, come on top. `flops` are those of products.
    """

    kind: Literal["dry_run"]
    rank: Rank
    time: Number
    parameters: Count
    peak_bytes: Count
    optimizer_bytes: Count
    predicted_bytes: Count  # the planner's estimate of both
    flops: Count
    seconds: Seconds  # what it took to find out


class CheckpointItem(TypedDict):
    """Rank 0: a checkpoint is complete, or could not be written. `name` is job/attempt/step, None where it failed."""

    kind: Literal["checkpoint"]
    rank: Rank
    time: Number
    step: Count
    name: Word | None
    num_bytes: Count
    stall_s: Seconds  # what training waited
    save_s: Seconds
    problem: Sentence


class Apart(TypedDict):
    """Something that is not what it must be.

    `apart` is the rms of the difference over the rms of what it must be, None where that is no number; beyond `limit`
    it is more than rounding. `share` is a part of the model that nobody holds, or several do.
    """

    what: Literal["gradient", "weight", "share", "update", "loss", "gradient norm"]
    name: Word  # a tensor of the whole model, or "step 2"
    axis: Word  # copies on ranks along it differ, as "dp" or "dp x tp"; "" beside one process
    ranks: Annotated[list[Rank], Field(max_length=2)]  # that differs, and from which
    apart: Seconds | None
    limit: Seconds


class ReplicaProof(TypedDict):
    """Checksums of gradients and weights, compared over all ranks that hold the same part of a tensor."""

    steps: Annotated[list[Count], Field(max_length=100)]  # after which they were compared
    parts: Count  # different parts of tensors there are
    copied: Count  # of these, held by two ranks or more
    apart: Seconds  # the largest difference of two copies; 0 is bit for bit


class ProcessProof(TypedDict):
    """The first steps, computed again by one process. Largest relative differences; `limit` is that of gradients."""

    state: Literal["due", "equal", "apart", "not checked"]
    why: Sentence  # of "not checked"; else the limits, and why no more steps were compared
    steps: Count
    tensors: Count  # whose gradients and updates of the first step were compared
    gradient: Seconds
    update: Seconds
    loss: Seconds
    norm: Seconds
    limit: Seconds
    seconds: Seconds  # what it took, training waiting


class ProofItem(TypedDict):
    """Rank 0: what is proven of this run so far; a later item replaces an earlier one."""

    kind: Literal["proof"]
    rank: Rank
    time: Number
    replicas: ReplicaProof
    one_process: ProcessProof
    wrong: Annotated[list[Apart], Field(max_length=20)]  # the worst first; empty where all is well


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
        raise ValueError("calls.group: there is no such group")
    if not 0 <= item["began"] < LATEST:
        raise ValueError("began: is no time")
    times = (calls["issued_us"], calls["blocked_us"], calls["ended_us"], spans["from_us"], spans["to_us"])
    if any(abs(time) > LONGEST_STEP_US for column in times for time in column):
        raise ValueError("a time is further from its step than any step takes")
    return item


Timeline = Annotated[TimelineItem, AfterValidator(sensible)]


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


class StartItem(TypedDict):
    """How a member came to its first step: when each stage of its start was over, unix seconds by the host's clock."""

    kind: Literal["start"]
    rank: LogRank
    time: Number
    stage: Literal["claimed", "spawned", "imported", "met", "built", "first step"]


class GapItem(TypedDict):
    """The supervisor had to drop `items` items (Redis away for long) before this one."""

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
    | Timeline
    | StandingItem
    | ProcessItem
    | GaugeItem
    | StartItem
    | GapItem,
    Field(discriminator="kind"),
]


class Frame(TypedDict):
    """Rank -> supervisor."""

    v: Literal[1]
    job: JobId
    attempt: AttemptNumber
    rank: Rank
    items: list[Item]


class Clock(TypedDict):
    """How far a host's clock was off the board's (to be added to the host's), measured to `within_s` either way."""

    offset_s: Number
    within_s: Seconds


class Batch(TypedDict):
    """Supervisor -> Redis Stream -> browser. Times are the board's where `clock` is told."""

    v: Literal[1]
    job: JobId
    attempt: AttemptNumber
    time: Number
    items: list[Item]
    host: NotRequired[HostName]
    clock: NotRequired[Clock]
