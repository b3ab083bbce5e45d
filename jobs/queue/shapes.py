"""What REST tells of the queue, typed once."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from jobs.core.job_details import Moment


class PointParts(TypedDict):
    """What a job's points are the sum of."""

    priority: float
    waited: float
    share: float
    moved: float


class QueuedRow(TypedDict):
    """A job that waits."""

    id: str
    place: Annotated[int, Field(description="Position of the job in the whole queue, starting at 1.")]
    name: str
    owner: str
    project: str
    layout: str
    num_slots: int
    priority: int
    points: Annotated[float, Field(description="Scheduling points. Jobs with more points start first.")]
    parts: PointParts
    held: bool
    reason: Annotated[str, Field(description="Reason why the job waits.")]
    starts: Annotated[Moment | None, Field(description="Estimated start time. null if it is unknown.")]
    starts_when: Annotated[str, Field(description="Event that needs to happen before the job starts.")]
    created: Moment


class QueueTold(TypedDict):
    """The queue, as far as its reader may see it."""

    paused: bool
    queued: Annotated[int, Field(description="everybody's")]
    jobs: list[QueuedRow]


class Unchanged(TypedDict):
    """A job that an action was asked for and did not change."""

    job: str
    reason: str


class Changed(TypedDict):
    """Jobs that an action changed, and why it did not change the others."""

    changed: list[str]
    unchanged: list[Unchanged]


class Moved(TypedDict):
    """Whether the job has another place now; `reason`: why not, where it has not."""

    moved: bool
    reason: str


class WouldStart(TypedDict):
    """A job that waits, and would not if it were so."""

    id: str
    name: str


class WhatIf(TypedDict):
    """Which jobs would start with the next pass; those that start anyway are left out."""

    jobs: list[WouldStart]


class Paused(TypedDict):
    """How it stands now, and whether this request changed it."""

    paused: bool
    changed: bool


class AuditRow(TypedDict):
    """What a person did."""

    id: int
    at: Moment
    who: str
    address: str
    what: str
    kind: str
    name: str
    before: Any
    after: Any
