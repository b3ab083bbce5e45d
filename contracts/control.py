"""What the controller asks of a host, and what a host answers.

Orders travel as JSON Celery arguments on the host's own queue; answers as msgpack `Event`s on
`names.EVENTS_STREAM`. The pair (job, attempt) is the identity everywhere and the attempt number is the
fencing token: a message about a lower attempt than the current one is refused.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from contracts.telemetry import Cell, CheckpointItem, DryRunItem, VerdictRow

VERSION = 1

Outcome = Literal["succeeded", "failed", "cancelled", "lost"]


class LaunchOrder(TypedDict):
    """Start this attempt. Delivering it twice starts it once."""

    v: int
    job: str
    attempt: int
    spec: dict[str, Any]  # planner.spec.JobSpec as JSON
    slots: list[int]  # slot (GPU or CPU rank slot) indices of this host


class LossPoint(TypedDict):
    """One point of the loss curve."""

    step: int
    loss: float
    time: float


class Summary(TypedDict):
    """What stays of an attempt's telemetry when its stream is gone. Cells are each rank's last."""

    steps: int
    tokens_per_s: float | None
    losses: list[LossPoint]  # thinned to 500 points at most
    eval_losses: list[LossPoint]
    cells: dict[str, list[Cell]]  # by rank, as text: JSON keys
    verdict: dict[str, list[VerdictRow]]  # by rank
    ran_steps: NotRequired[int]  # steps of this run, where it resumed
    checkpoints: NotRequired[list[CheckpointItem]]  # the newest last, at most 100
    dry_runs: NotRequired[list[DryRunItem]]  # by rank, of a dry run
    profile: NotRequired[dict[str, Any]]  # of a calibration: `planner.profile.HostProfile` as JSON
    lab: NotRequired[dict[str, Any]]  # of a lab: `planner.lab.LabResult` as JSON


class ExitReport(TypedDict):
    """How an attempt ended: the supervisor's exit.json."""

    v: int
    job: str
    attempt: int
    outcome: Outcome
    reason: str  # one sentence for people
    exit_code: int | None
    rank: int | None  # the first rank that failed
    signal: str | None  # SIGKILL, SIGSEGV, ...
    log_tail: list[str]  # the last lines that rank (or the launcher) wrote
    started: float
    finished: float
    summary: Summary | None


class AttemptReport(TypedDict):
    """What a host knows of one attempt."""

    job: str
    attempt: int
    state: Literal["starting", "running", "exited"]
    exit: NotRequired[ExitReport]


class HostEvent(TypedDict):
    """Heartbeat of a host worker, every 5 s and at start. `attempts`: all not yet acknowledged."""

    kind: Literal["host"]
    v: int
    host: str
    boot_id: str
    time: float
    slots: int
    device: Literal["cpu", "cuda"]
    device_name: str
    memory_bytes: int  # per slot: GPU memory, or the machine's memory divided by its slots
    attempts: list[AttemptReport]


class AttemptEvent(TypedDict):
    """Sent by the supervisor: a change of state, and a heartbeat every 5 s."""

    kind: Literal["attempt"]
    v: int
    host: str
    time: float
    report: AttemptReport


Event = HostEvent | AttemptEvent
