"""Made by `make openapi` of docs/openapi.json: change that."""

from __future__ import annotations

from typing import Literal, TypedDict


class Evidence(TypedDict):
    """A fact that supports the verdict. `steps`: its first and last step, or empty."""

    text: str
    ranks: list[int]
    steps: list[int]


class GroupSpeed(TypedDict):
    """Transfer rate of the collectives of one group and op, from the arrival of the last rank.

    `bus_bytes_s`: median bus bandwidth as in nccl-tests. `link_bytes_s`: rate of the slowest link, from `basis`.
    The basis "runs" (earlier runs on the host) is a lower bound, so `bus_bytes_s` may exceed it.
    """

    axis: str
    op: str
    ranks: list[int]
    group_size: int
    calls: int
    payload_bytes: float
    transfer_s: float
    bus_bytes_s: float | None
    link_bytes_s: float | None
    basis: Literal["calibrated", "data sheet", "runs", ""]
    between_hosts: bool


class Group(TypedDict):
    """A process group. `ranks` lists at most 64 of its `size` ranks."""

    axis: str
    ranks: list[int]
    size: int
    nth: int


class Hang(TypedDict):
    """A stall: no rank makes progress. `ranks` cause it, and `waiting` ranks wait for them.

    `sequence`: number of the unfinished collective of `group`, from 1. `stack`: Python stack of the first of
    `ranks`, outermost frame first.
    """

    cause: Literal[
        "compute",
        "link",
        "data",
        "experts",
        "checkpoint",
        "quota",
        "stopped",
        "contention",
        "skipped call",
        "mismatch",
        "dead",
        "unknown",
    ]
    since: float
    still_s: float
    threshold_s: float
    step: int
    ranks: list[int]
    host: str
    waiting: list[int]
    num_waiting: int
    group: Group | None
    op: str
    sequence: int | None
    stack: list[str]
    text: str


class ReportedLoss(TypedDict):
    """The newest loss that a script reported. `loss` is null if the loss was `not_finite`."""

    step: int
    loss: float | None
    not_finite: str
    """`nan`, `inf`, `-inf`, or empty."""
    source: str
    """Source of the loss, such as `log line` or `event file`."""


class StepPart(TypedDict):
    """A part of a step. `waiting_s`: its time spent waiting for a late rank. The rest is transfer.

    All parts except `hidden` add up to the step. `hidden` is communication that overlaps with compute.
    """

    name: str
    """Name of the part: compute, bubble, data, optimizer, checkpoint, or an axis."""
    kind: Literal["compute", "exposed", "hidden", "bubble", "data", "checkpoint", "optimizer"]
    seconds: float
    waiting_s: float


class StepParts(TypedDict):
    """A step and its parts.

    Measured: `step_s` is the median over the last `steps` steps of rank 0. Parts are means, scaled to it.

    The bubble is separate if steps were traced. `sure`: relative margin of error of a predicted step, 0 if
    measured.
    """

    step_s: float
    sure: float
    steps: int
    parts: list[StepPart]


class StartPart(TypedDict):
    """A stage of the start. `rank` finished the stage last. -1 if the stage has no last rank."""

    name: Literal["queue", "claim", "spawn", "import", "rendezvous", "build", "first step"]
    seconds: float
    rank: int


class Straggler(TypedDict):
    """A rank that other ranks wait for in most steps, more than noise explains."""

    rank: int
    host: str
    axis: str
    cause: Literal[
        "compute",
        "link",
        "data",
        "experts",
        "checkpoint",
        "quota",
        "stopped",
        "contention",
        "skipped call",
        "mismatch",
        "dead",
        "unknown",
    ]
    since_step: int
    seconds: float
    share: float
    last_in: float
    text: str


class Trouble(TypedDict):
    """A problem of the training itself, such as a NaN loss."""

    kind: Literal["not finite", "diverged", "spike", "replicas apart", "checkpoint failed"]
    step: int
    text: str


class Wait(TypedDict):
    """Time per step that the other ranks wait for `rank` in collectives of `axis`, on average, in seconds.

    `share`: fraction of the step. `last_in`: fraction of its calls in which it arrived last, beyond the clock
    error. `since_step`: first traced step of the delay.
    """

    axis: str
    rank: int
    host: str
    seconds: float
    share: float
    last_in: float
    calls: int
    since_step: int


class VerdictPayload(TypedDict):
    """The verdict of a job, its evidence, the next step, and the measurements behind it.

    `sentence` starts with its state, such as "Straggler: ". `reason` is one sentence, `next` one imperative
    sentence.
    """

    v: Literal[1]
    time: float
    over: bool
    """True if the attempt has ended, so the verdict is final."""
    state: Literal["starting", "well", "notice", "slow", "hung", "failed"]
    sentence: str
    reason: str
    next: str
    action: Literal["", "calibrate", "retry", "resume_smaller", "open_log", "find_faster", "copy_job", "open_breakdown"]
    """Suggested action that the job page offers as a button. Empty if no action is suggested."""
    action_rank: int
    """Rank whose log the action `open_log` opens, or -1."""
    evidence: list[Evidence]
    step: int
    """Steps completed."""
    sampled: int
    """Number of traced steps that the verdict uses."""
    planned: StepParts | None
    measured: StepParts | None
    waits: list[Wait]
    groups: list[GroupSpeed]
    start: list[StartPart]
    hang: Hang | None
    stragglers: list[Straggler]
    training: list[Trouble]
    loss: ReportedLoss | None
    """null if no script reported a loss."""
