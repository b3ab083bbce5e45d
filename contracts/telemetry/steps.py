"""What a rank says of its steps: traffic, phases, logs, checkpoints."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from contracts.fields import Count, LogLine, LogRank, Number, Rank, Seconds, Sentence, Word
from contracts.telemetry.words import Label, Op, Phase


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


class StartItem(TypedDict):
    """How a member came to its first step: when each stage of its start was over, unix seconds by the host's clock."""

    kind: Literal["start"]
    rank: LogRank
    time: Number
    stage: Literal["claimed", "spawned", "imported", "met", "built", "first step"]
