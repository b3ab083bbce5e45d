"""Made by `make openapi` of docs/openapi.json: change that."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from meshboard.answers.layouts import Layout
from meshboard.answers.plans import AutoLayout, Estimate
from meshboard.answers.runs import DryRunItem, MemoryParts, ProofItem, VerdictRow
from meshboard.answers.specs import StoredSpec
from meshboard.answers.verdicts import VerdictPayload


class JobBrief(TypedDict):
    """A job in a list."""

    id: str
    name: str
    project: str
    kind: str
    """Kind of the job, such as `train` or `script`."""
    owner: str
    status: Literal[
        "queued", "starting", "running", "unreachable", "cancelling", "succeeded", "failed", "lost", "cancelled"
    ]
    attempt: int
    priority: int
    wait_reason: str
    """Reason why the queued job waits."""
    tags: list[str]
    archived: bool
    """True if the job is archived. Lists show archived jobs only on request."""
    layout: Layout
    world_size: int
    created: str
    changed: str


class KillEvidence(TypedDict):
    """Out-of-memory kills by the kernel during an attempt that SIGKILL ended."""

    oom_kills: int | None
    text: str


class Cell(TypedDict):
    """Cumulative counters of one (phase, op, axis, group size) on one rank.

    `payload_bytes` counts the buffers of the caller: the full (gathered) buffer for all_gather, reduce_scatter,
    gather and scatter. `algorithmic_bytes` counts what a bandwidth-optimal algorithm makes this rank send. For an
    all-to-all with splits, it counts the bytes to other ranks. Both are counted when the collective is issued.
    `busy_s` sums the durations of the `completed` collectives.
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
    """A checkpoint is complete or failed, sent by rank 0. `name` is job/attempt/step, or None if it failed."""

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


class StepTiming(TypedDict):
    """Step time that rank 0 measured after the warm-up steps."""

    steps: int
    step_s: float


class Summary(TypedDict):
    """Summary of the telemetry of an attempt, which remains after its stream is deleted."""

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
    measured: NotRequired[StepTiming]
    memory: NotRequired[dict[str, MemoryParts]]
    peak_bytes: NotRequired[dict[str, int]]
    profile: NotRequired[dict[str, Any]]
    proof: NotRequired[ProofItem]
    ran_steps: NotRequired[int]
    samples: NotRequired[int]
    samples_per_s: NotRequired[float]


class ExitReport(TypedDict):
    """End of an attempt, which the supervisor writes to exit.json."""

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
    error: NotRequired[str]
    evidence: NotRequired[list[str]]
    failed_at: NotRequired[float]
    first_error: NotRequired[str]
    host_fault: NotRequired[Literal["launch", "ranks", "restart", "gang"]]
    kill: NotRequired[KillEvidence]
    lost_peer: NotRequired[bool]
    preempted: NotRequired[bool]


class StateChange(TypedDict):
    """A change of the status of an attempt, with its time and reason."""

    status: Literal[
        "queued", "starting", "running", "unreachable", "cancelling", "succeeded", "failed", "lost", "cancelled"
    ]
    attempt: int
    reason: str
    at: str


class MemberBrief(TypedDict):
    """One host of an attempt, with `num_ranks` ranks from `first_rank` on. `reason`: reason of the `outcome`.

    `silent`: true if the ranks have not ended, and no report or heartbeat arrived for 30 s.
    """

    node: int
    host: str
    first_rank: int
    num_ranks: int
    silent: bool
    ended: str | None
    outcome: str
    reason: str


class ExternalRunInfo(TypedDict):
    """Command and tags that an external run reported at its start."""

    command: list[str]
    tags: list[str]


class JobDetail(TypedDict):
    """A job with all fields. Bytes are payload bytes."""

    id: str
    name: str
    project: str
    kind: str
    """Kind of the job, such as `train` or `script`."""
    owner: str
    status: Literal[
        "queued", "starting", "running", "unreachable", "cancelling", "succeeded", "failed", "lost", "cancelled"
    ]
    attempt: int
    priority: int
    wait_reason: str
    """Reason why the queued job waits."""
    tags: list[str]
    archived: bool
    """True if the job is archived. Lists show archived jobs only on request."""
    layout: Layout
    world_size: int
    created: str
    changed: str
    finished: bool
    engine: str
    """Launcher of the job: `hosts`, `slurm`, or `elsewhere` for an external run."""
    engine_id: str
    """Id of the current attempt in its launcher, such as the Slurm job id."""
    engine_told: dict[str, str]
    """Last `state`, `partition`, and `nodes` from the launcher. `held` if Meshboard holds the job."""
    host: str | None
    """Host of the current attempt. Several hosts are listed in rank order."""
    backfilled: bool
    """True if the current attempt uses hosts that are reserved for an earlier job."""
    members: list[MemberBrief]
    """Hosts of the current attempt, in rank order."""
    exit: ExitReport | dict[str, Any] | None
    """Exit report of the current attempt."""
    diagnosis: VerdictPayload | dict[str, Any] | None
    """Verdict of the current attempt, and the recommended next action."""
    note: str
    """Warning from the host about the job, for example about a stopped rank."""
    history: list[StateChange]
    spec: StoredSpec
    estimate: Estimate | dict[str, Any]
    """Estimate at the time of submit."""
    chosen: AutoLayout | dict[str, Any] | None
    """Why Meshboard chose this layout. null if the requested layout was not "auto"."""
    reported: ExternalRunInfo | None
    """Command and tags that an external run reported. null for other jobs."""


class WaitResult(TypedDict):
    """Result of a wait for a status.

    `reached`: true if the current attempt reached the status. False after a timeout, or if it can no longer reach
    it.
    """

    reached: bool
    job: JobDetail
