"""Made by `make openapi` of docs/openapi.json: change that."""

from __future__ import annotations

from typing import Literal, TypedDict


class Evidence(TypedDict):
    """A fact that the sentence rests on. `steps`: first and last that it is of, empty where it is of none."""

    text: str
    ranks: list[int]
    steps: list[int]


class GroupSpeed(TypedDict):
    """How fast a group's collectives of one op moved data once all its ranks were there.

    `bus_bytes_s`: median, by nccl-tests' convention; `link_bytes_s`: what its slowest link does by `basis`, where
    "runs" are earlier ones on the host: a link does at least what a run shows, so that `bus_bytes_s` may be above
    them.
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
    """A group of ranks, of which `ranks` are at most MOST_RANKS."""

    axis: str
    ranks: list[int]
    size: int
    nth: int


class Hang(TypedDict):
    """Nothing ends any more. `ranks` are who is to blame, `waiting` who waits for them.

    `sequence`: of the collective of `group` that does not end, from 1. `stack`: where the first of `ranks` stands,
    outermost first.
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


class StepPart(TypedDict):
    """A part of a step. `waiting_s`: of it, what ranks stood still for one that came late (the rest is transfer).

    All but `hidden` add up to the step; `hidden` are collectives that ran while their rank computed.
    """

    name: str
    """compute, bubble, data, optimizer, checkpoint, or an axis"""
    kind: Literal["compute", "exposed", "hidden", "bubble", "data", "checkpoint", "optimizer"]
    seconds: float
    waiting_s: float


class StepParts(TypedDict):
    """A step and its parts. Measured: means over `steps` steps and all ranks, the bubble told apart where steps were
    told event by event. `sure`: by which share the predicted one may be off, 0 of a measured one.
    """

    step_s: float
    sure: float
    steps: int
    parts: list[StepPart]


class StartPart(TypedDict):
    """A stage of the way to the first step. `rank` came last to its end; -1 where it is nobody's or all alike."""

    name: Literal["queue", "claim", "spawn", "import", "rendezvous", "build", "first step"]
    seconds: float
    rank: int


class Straggler(TypedDict):
    """A rank that others wait for in step after step, beyond what noise explains."""

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
    """What is wrong with the training itself."""

    kind: Literal["not finite", "diverged", "spike", "replicas apart", "checkpoint failed"]
    step: int
    text: str


class Wait(TypedDict):
    """What ranks waited for `rank` in collectives of `axis`, in a step: the mean of the others, seconds.

    `share` is of the step. `last_in`: the share of its calls there in which it came last, beyond what clocks allow
    to tell. `since_step`: the first of the sampled steps from which on it holds.
    """

    axis: str
    rank: int
    host: str
    seconds: float
    share: float
    last_in: float
    calls: int
    since_step: int


class Told(TypedDict):
    """The verdict: a sentence, its reason, its evidence, the next step; and what all of it was computed from."""

    v: Literal[1]
    time: float
    over: bool
    """the attempt has ended; this is the last word"""
    state: Literal["starting", "well", "notice", "slow", "hung", "failed"]
    sentence: str
    reason: str
    next: str
    evidence: list[Evidence]
    step: int
    """steps completed"""
    sampled: int
    """steps told event by event that this rests on"""
    planned: StepParts | None
    measured: StepParts | None
    waits: list[Wait]
    groups: list[GroupSpeed]
    start: list[StartPart]
    hang: Hang | None
    stragglers: list[Straggler]
    training: list[Trouble]
