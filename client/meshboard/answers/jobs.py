"""Made by `make openapi` of docs/openapi.json: change that."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from meshboard.answers.layouts import Layout
from meshboard.answers.plans import Chosen, Estimate
from meshboard.answers.runs import DryRunItem, MemoryParts, ProofItem, VerdictRow
from meshboard.answers.specs import StoredSpec
from meshboard.answers.verdicts import Told


class JobBrief(TypedDict):
    """One job of a list."""

    id: str
    name: str
    project: str
    kind: str
    """train, script and so on: of its spec"""
    owner: str
    status: Literal[
        "queued", "starting", "running", "unreachable", "cancelling", "succeeded", "failed", "lost", "cancelled"
    ]
    attempt: int
    priority: int
    wait_reason: str
    """why a queued job waits"""
    tags: list[str]
    archived: bool
    """lists leave it out unless asked"""
    layout: Layout
    world_size: int
    created: str
    changed: str


class Cell(TypedDict):
    """Cumulative counters of one (phase, op, axis, group size) on one rank.

    `payload_bytes` counts what the caller handed over: the FULL (gathered) buffer for all_gather, reduce_scatter,
    gather and scatter. `algorithmic_bytes` is what a bandwidth-optimal algorithm makes this rank send; of an
    all-to-all with splits, what they send elsewhere. Both are counted when the collective is issued; `busy_s` sums
    the durations of the `completed` ones.
    """

    phase: Literal["setup", "step", "eval", "checkpoint", "proof", "teardown"]
    op: Literal[
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
    axis: str
    group_size: int
    count: int
    completed: int
    payload_bytes: int
    algorithmic_bytes: int
    busy_s: float


class CheckpointItem(TypedDict):
    """Rank 0: a checkpoint is complete, or could not be written. `name` is job/attempt/step, None where it failed."""

    kind: Literal["checkpoint"]
    rank: int
    time: float
    step: int
    name: str | None
    num_bytes: int
    stall_s: float
    save_s: float
    problem: str


class LossPoint(TypedDict):
    """One point of the loss curve."""

    step: int
    loss: float
    time: float


class Measured(TypedDict):
    """Steps of a run as rank 0 timed them, without its first ones."""

    steps: int
    step_s: float


class Summary(TypedDict):
    """What stays of an attempt's telemetry when its stream is gone. Cells are each rank's last."""

    steps: int
    tokens_per_s: float | None
    losses: list[LossPoint]
    eval_losses: list[LossPoint]
    cells: dict[str, list[Cell]]
    verdict: dict[str, list[VerdictRow]]
    cells_left_out: NotRequired[int]
    checkpoints: NotRequired[list[CheckpointItem]]
    dry_runs: NotRequired[list[DryRunItem]]
    lab: NotRequired[dict[str, Any]]
    measured: NotRequired[Measured]
    memory: NotRequired[dict[str, MemoryParts]]
    peak_bytes: NotRequired[dict[str, int]]
    profile: NotRequired[dict[str, Any]]
    proof: NotRequired[ProofItem]
    ran_steps: NotRequired[int]


class ExitReport(TypedDict):
    """How an attempt ended: the supervisor's exit.json."""

    v: Literal[1]
    job: str
    attempt: int
    outcome: Literal["succeeded", "failed", "cancelled", "lost"]
    reason: str
    exit_code: int | None
    rank: int | None
    signal: str | None
    log_tail: list[str]
    started: float
    finished: float
    summary: Summary | None
    failed_at: NotRequired[float]
    lost_peer: NotRequired[bool]
    preempted: NotRequired[bool]


class StateChange(TypedDict):
    """When and why an attempt came into a state."""

    status: Literal[
        "queued", "starting", "running", "unreachable", "cancelling", "succeeded", "failed", "lost", "cancelled"
    ]
    attempt: int
    reason: str
    at: str


class MemberBrief(TypedDict):
    """An attempt's share of one host: `num_ranks` ranks from `first_rank` on. `reason`: why it ended so. `silent`: it
    runs for all that is known, and neither it nor its host was heard of for 30 s.
    """

    node: int
    host: str
    first_rank: int
    num_ranks: int
    silent: bool
    ended: str | None
    outcome: str
    reason: str


class Reported(TypedDict):
    """What was told of a run that somebody launched elsewhere as it was opened."""

    command: list[str]
    tags: list[str]


class JobDetail(TypedDict):
    """A job in full. Bytes are payload bytes."""

    id: str
    name: str
    project: str
    kind: str
    """train, script and so on: of its spec"""
    owner: str
    status: Literal[
        "queued", "starting", "running", "unreachable", "cancelling", "succeeded", "failed", "lost", "cancelled"
    ]
    attempt: int
    priority: int
    wait_reason: str
    """why a queued job waits"""
    tags: list[str]
    archived: bool
    """lists leave it out unless asked"""
    layout: Layout
    world_size: int
    created: str
    changed: str
    finished: bool
    engine: str
    """who launched it: hosts, slurm, or elsewhere where it reports itself"""
    engine_id: str
    """what the engine calls the current attempt: Slurm's job id"""
    engine_told: dict[str, str]
    """what it said of it last: state, partition, nodes; `held` by the board"""
    host: str | None
    """hosts of the current attempt in the order of their ranks"""
    members: list[MemberBrief]
    """of the current attempt, in rank order"""
    exit: ExitReport | dict[str, Any] | None
    """how the current attempt ended"""
    diagnosis: Told | dict[str, Any] | None
    """what is wrong with the current attempt, what to do"""
    note: str
    """what its host wants known of it, such as a stopped rank"""
    history: list[StateChange]
    spec: StoredSpec
    estimate: Estimate | dict[str, Any]
    """as told at submit"""
    chosen: Chosen | dict[str, Any] | None
    """where the layout was "auto"; null elsewhere"""
    reported: Reported | None
    """of a run from elsewhere; null of others"""


class Waited(TypedDict):
    """`reached`: whether the current attempt came into the state; false where the time was up, or it no longer can."""

    reached: bool
    job: JobDetail
