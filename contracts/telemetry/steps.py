"""Telemetry of steps: traffic, phases, losses, logs and checkpoints."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from contracts.fields import Count, LogLine, LogRank, Number, Rank, Seconds, ShortText, Text
from contracts.telemetry.vocabulary import Label, Op, Phase


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
    start is unknown. The step minus `data` and `exposed` is compute.
    """

    data: Seconds
    optimizer: Seconds
    exposed: dict[Label, Seconds]
    hidden: dict[Label, Seconds]


class StepItem(TypedDict):
    """An optimizer step ended on this rank. `cells` holds every cell of phase "step", exact."""

    kind: Literal["step"]
    rank: Rank
    time: Number
    step: Count  # completed steps, from 1
    ran: Count  # steps of this run, fewer than `step` after a resume
    steps: Count  # requested steps
    step_s: Seconds
    tokens: Count  # tokens per global batch
    loss: Number | None  # global mean loss of this step, or None on ranks that do not know it
    not_finite: NotRequired[ShortText]  # "loss is nan": a value that is None above because it is not finite
    grad_norm: Number | None
    learning_rate: Number
    cells: list[Cell]
    parts: NotRequired[StepBreakdown]


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
    steps: NotRequired[Count]  # completed optimizer steps of a script
    cells: NotRequired[list[Cell]]  # of a script with a prediction: exact cells of phase "step" at this step


class LogItem(TypedDict):
    """Complete log lines of a rank, or of the launcher if `rank` is -1. `first` numbers lines from 0."""

    kind: Literal["log"]
    rank: LogRank
    time: Number
    first: Count
    lines: list[LogLine]
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
