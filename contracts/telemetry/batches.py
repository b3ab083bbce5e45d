"""All items there are, and how they travel."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from contracts.fields import AttemptNumber, Count, HostName, JobId, Number, Rank, Seconds
from contracts.telemetry.health import GaugeItem, ProcessItem, StandingItem
from contracts.telemetry.proof import ProofItem
from contracts.telemetry.results import DryRunItem, LabItem, ProfileItem, VerdictItem
from contracts.telemetry.steps import CheckpointItem, EvalItem, LogItem, PhaseItem, StartItem, StepItem, TrafficItem
from contracts.telemetry.timeline import Timeline


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
