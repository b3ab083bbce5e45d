"""Telemetry items of steps, traced steps, stalls, and resource usage, with their shared terms and limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal, NotRequired, cast

from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from contracts.fields import MAX_INT64, Count, LogLine, LogRank, Number, Rank, Seconds, ShortText, Text

VERSION: Final = 1
MAX_EVENTS_PER_STEP: Final = 20_000  # per rank
MAX_UNIX_S: Final = float(2**33)  # in 2242; trace readers have 63 bits for nanoseconds
MAX_STEP_US: Final = 10**13  # 115 days
MAX_CHECKPOINTS: Final = 100  # the newest checkpoints of an attempt
# The first steps are no measure of the others: buckets regroup, caches fill, kernels are compiled.
WARMUP_STEPS: Final = 3
SCRIPT_SETUP_STEPS: Final = 2  # first steps of a script; DDP regroups its buckets once as the second step begins
TIMED_STEPS: Final = 500  # last steps whose median is the step time of a finished run
LIVE_STEPS: Final = 50  # last steps whose median is the step time of a running run
MAX_RECENT_CALLS: Final = 16  # last collectives of a group in a report of a stall
MAX_LISTED_STEPS: Final = 64  # short steps in one item with a time for each
SPEED_STEPS: Final = 20  # last steps whose tokens per second are the speed of a running run

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

MAX_OPEN_LINES: Final = 32  # of a rank
MAX_OPEN_LINE_CHARS: Final = 1000
MAX_OPEN_CHARS: Final = 8000  # of all open lines of a rank
Label = ShortText  # an Axis, or the name of a process group of a user's script
Column = Annotated[list[Count], Field(max_length=MAX_EVENTS_PER_STEP)]
Times = Annotated[list[Annotated[int, Field(ge=-MAX_INT64, le=MAX_INT64)]], Field(max_length=MAX_EVENTS_PER_STEP)]
Ranks = Annotated[list[Rank], Field(min_length=1, max_length=65536)]


class Cell(TypedDict):
    """Cumulative counters of one (phase, op, axis, group size) on one rank.

    `payload_bytes` counts the buffers of the caller: the full (gathered) buffer for all_gather, reduce_scatter, gather
    and scatter. `algorithmic_bytes` counts what a bandwidth-optimal algorithm makes this rank send. For an all-to-all
    with splits, it counts the bytes to other ranks. Both are counted when the collective is issued. `busy_s` sums the
    durations of the `completed` collectives.
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
    """Cells that changed since the previous traffic item of this rank."""

    kind: Literal["traffic"]
    rank: Rank
    time: Number
    cells: list[Cell]
    dropped: Count  # records that the bounded buffer dropped so far; the cells remain exact


class StepBreakdown(TypedDict):
    """Seconds of one step on the training thread of one rank.

    `exposed` is the time that the thread waited for collectives, by axis. It includes receives that wait for a late
    pipeline stage. `hidden` is the time of collectives that overlapped compute. It excludes receives, because their
    start is unknown. The step minus `data` and `exposed` is compute. A script without a DataLoader has no `data`, and
    a step without a timed optimizer has no `optimizer`. Both are then part of compute.
    """

    data: NotRequired[Seconds]
    optimizer: NotRequired[Seconds]
    exposed: dict[Label, Seconds]
    hidden: dict[Label, Seconds]


class StepItem(TypedDict):
    """A step ended on this rank. `cells` holds every cell of phase "step", exact.

    A script reports None for values that the meter cannot read. Items of fast steps are means over several steps.
    """

    kind: Literal["step"]
    rank: Rank
    time: Number
    step: Count  # completed steps, from 1
    ran: Count  # steps of this run, fewer than `step` after a resume
    steps: Count | None  # requested steps
    step_s: Seconds
    over: NotRequired[
        Annotated[int, Field(ge=1, le=MAX_INT64)]
    ]  # steps of which `step_s`, `tokens`, `samples` and `parts` are means, if not 1
    times: NotRequired[Annotated[list[Seconds], Field(max_length=MAX_LISTED_STEPS)]]  # of each step, if known
    counted: NotRequired[Count]  # steps that `cells` cover, if fewer than `ran`
    tokens: Count | None  # tokens per global batch
    samples: NotRequired[Count]  # samples per global batch
    loss: Number | None  # global mean loss of this step, or None on ranks that do not know it
    not_finite: NotRequired[ShortText]  # "loss is nan": a value that is None above because it is not finite
    grad_norm: Number | None
    learning_rate: Number | None
    cells: list[Cell]
    parts: NotRequired[StepBreakdown]


def list_step_times(item: StepItem) -> list[float]:
    """Return the time of each step of an item. A step without its own time counts with the mean of the item."""
    return item.get("times") or [item["step_s"]] * min(item.get("over", 1), TIMED_STEPS)


class EvalItem(TypedDict):
    """Validation loss on the held-out slice after `step` steps."""

    kind: Literal["eval"]
    rank: Rank
    time: Number
    step: Count
    loss: Number


class PhaseItem(TypedDict):
    """A rank entered a phase."""

    kind: Literal["phase"]
    rank: Rank
    time: Number
    phase: Phase
    steps: NotRequired[Count]  # completed steps of a script whose last step has no measured time
    cells: NotRequired[list[Cell]]  # of a script with a prediction: exact cells of phase "step" at this step


class LogItem(TypedDict):
    """Complete log lines of a rank, or of the launcher if `rank` is -1. `first` numbers lines from 0.

    `open` holds the lines after `lines` that can still change, for example a progress bar. The next item of the rank
    replaces them.
    """

    kind: Literal["log"]
    rank: LogRank
    time: Number
    first: Count
    lines: list[LogLine]
    open: NotRequired[Annotated[list[LogLine], Field(max_length=MAX_OPEN_LINES)]]
    skipped: NotRequired[Count]  # lines dropped just before `first` because the log exceeded its bound


class CheckpointItem(TypedDict):
    """A checkpoint is complete or failed, sent by rank 0. `name` is job/attempt/step, or None if it failed."""

    kind: Literal["checkpoint"]
    rank: Rank
    time: Number
    step: Count
    name: ShortText | None
    num_bytes: Count
    stall_s: Seconds  # time that training waited
    save_s: Seconds
    problem: Text


class StartItem(TypedDict):
    """Time at which a rank or a host completed a stage of its start, unix seconds of the clock of the host."""

    kind: Literal["start"]
    rank: LogRank
    time: Number
    stage: Literal["claimed", "spawned", "imported", "met", "built", "first step"]
    world_size: NotRequired[Count]  # of a rank whose launcher Meshboard does not know
    local_ranks: NotRequired[Count]  # on this machine, if the launcher sets it


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
    call: NotRequired[ShortText]  # operation with its size, as in `recent`
    # Last collectives, oldest first: "broadcast of 8 float32 from rank 0". The last has the number `issued`. Texts are
    # equal on all ranks of the group, and contain no sizes that ranks may choose.
    recent: NotRequired[Annotated[list[ShortText], Field(max_length=MAX_RECENT_CALLS)]]
    blocking: NotRequired[bool]  # True if the training thread waits for an operation of this group


LIBRARY_PATHS: Final = ("/lib/python3", "/lib64/python3", "<frozen ", "workers/meter/", "workers/torch_private/")


def find_user_frame(stack: Sequence[str]) -> str:
    """Return the innermost line of a stack outside of libraries and the meter, or ""."""
    return next((line for line in reversed(stack) if not any(path in line for path in LIBRARY_PATHS)), "")


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
    source: NotRequired[Text]  # source of the innermost line outside of libraries
    ended: NotRequired[Text]  # last report of a program that ends by itself: its uncaught exception, or ""


class ProcessItem(TypedDict):
    """Process of a rank that is stalled, silent, stopped, or delayed by a CPU quota or a busy CPU."""

    kind: Literal["process"]
    rank: Rank
    pid: NotRequired[Count]  # process ID on the host
    time: Number
    state: Literal["running", "sleeping", "disk", "stopped", "zombie", "gone"]  # also "stopped" if it recently was
    cpu: Seconds  # recent CPU seconds per second
    throttled: Seconds  # recent seconds per second that a CPU quota delayed it
    crowded: NotRequired[Seconds]  # recent seconds per second that its training waited for a CPU, quota included
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
    peak_bytes: NotRequired[Count]  # largest memory of a script so far
    cpu: NotRequired[Seconds]  # CPUs in use
    sent_bytes_s: NotRequired[Seconds]  # all network interfaces except loopback
    received_bytes_s: NotRequired[Seconds]
    gpu_percent: NotRequired[Seconds]
    gpu_clock_mhz: NotRequired[Seconds]
    gpu_power_w: NotRequired[Seconds]
    gpu_celsius: NotRequired[Number]
