"""A job as JSON: the REST detail, the page's data and the websocket's state message are all this."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from django.contrib.auth.models import User
from django.db.models import F, Prefetch, QuerySet, prefetch_related_objects
from django.utils import timezone
from pydantic import Field, WithJsonSchema
from typing_extensions import TypedDict

from contracts.control import ExitReport
from jobs.core.verdict_schema import VerdictPayload
from jobs.models import ELSEWHERE, HOST_SILENT_AFTER, TERMINAL, Attempt, Job, JobTag, Member, Status
from jobs.models import StateChange as History
from jobs.models.jobs import num_ranks
from planner.cost.estimate import Estimate
from planner.facts.parse_spec import LayoutDict, SpecDict
from planner.search.auto_layout import AutoLayout

Moment = Annotated[str, WithJsonSchema({"type": "string", "format": "date-time"})]  # ISO 8601 with its zone
State = Annotated[str, WithJsonSchema({"type": "string", "enum": Status.values})]
Older = dict[str, Any]  # as an earlier version stored it, which may lack fields
# Columns that a line shows.
AS_THEY_ARE = ("id", "name", "project", "kind", "status", "attempt", "priority", "wait_reason", "archived")


class StateChange(TypedDict):
    """When and why an attempt came into a state."""

    status: State
    attempt: int
    reason: str
    at: Moment


class JobBrief(TypedDict):
    """One job of a list."""

    id: str
    name: str
    project: str
    kind: Annotated[str, Field(description="Kind of the job, such as `train` or `script`.")]
    owner: str
    status: State
    attempt: int
    priority: int
    wait_reason: Annotated[str, Field(description="Reason why the queued job waits.")]
    tags: list[str]
    archived: Annotated[
        bool, Field(description="True if the job is archived. Lists show archived jobs only on request.")
    ]
    layout: LayoutDict
    world_size: int
    created: Moment
    changed: Moment


class MemberBrief(TypedDict):
    """An attempt's share of one host: `num_ranks` ranks from `first_rank` on. `reason`: why it ended so. `silent`: it
    runs for all that is known, and neither it nor its host was heard of for 30 s."""

    node: int
    host: str
    first_rank: int
    num_ranks: int
    silent: bool
    ended: Moment | None
    outcome: str
    reason: str


class ExternalRunInfo(TypedDict):
    """What was told of a run that somebody launched elsewhere as it was opened."""

    command: list[str]
    tags: list[str]


class NoEstimate(TypedDict):
    """Empty: nothing is predicted of a job that trains nothing, such as a script."""


class JobDetail(JobBrief):
    """A job in full. Bytes are payload bytes."""

    finished: bool
    engine: Annotated[
        str, Field(description="Launcher of the job: `hosts`, `slurm`, or `elsewhere` for an external run.")
    ]
    engine_id: Annotated[str, Field(description="Id of the current attempt in its launcher, such as the Slurm job id.")]
    engine_told: Annotated[
        dict[str, str],
        Field(
            description="Last `state`, `partition`, and `nodes` from the launcher. `held` if Meshboard holds the job."
        ),
    ]
    host: Annotated[
        str | None, Field(description="Host of the current attempt. Several hosts are listed in rank order.")
    ]
    members: Annotated[list[MemberBrief], Field(description="Hosts of the current attempt, in rank order.")]
    exit: Annotated[ExitReport | Older | None, Field(description="Exit report of the current attempt.")]
    diagnosis: Annotated[
        VerdictPayload | Older | None,
        Field(description="Verdict of the current attempt, and the recommended next action."),
    ]
    note: Annotated[str, Field(description="Warning from the host about the job, for example about a stopped rank.")]
    history: list[StateChange]
    spec: SpecDict
    estimate: Annotated[Estimate | NoEstimate | Older, Field(description="Estimate at the time of submit.")]
    chosen: Annotated[
        AutoLayout | Older | None,
        Field(description='Why Meshboard chose this layout. null if the requested layout was not "auto".'),
    ]
    reported: Annotated[
        ExternalRunInfo | None,
        Field(description="Command and tags that an external run reported. null for other jobs."),
    ]


class WaitResult(TypedDict):
    """`reached`: whether the current attempt came into the state; false where the time was up, or it no longer can."""

    reached: bool
    job: JobDetail


def job_briefs(jobs: QuerySet[Job]) -> list[JobBrief]:
    """The lines of a list, of no more than they show: rows as objects, with whole specs, take three times as long."""
    owner, layout = f"owner__{User.USERNAME_FIELD}", "spec__layout"
    rows = list(jobs.values(*AS_THEY_ARE, "created", "changed", owner, layout))
    tags: dict[str, list[str]] = {row["id"]: [] for row in rows}
    for job, tag in JobTag.objects.filter(job__in=tags).values_list("job", "name"):
        tags[job].append(tag)
    return [_brief(row, row[owner], row[layout], tags[row["id"]]) for row in rows]


def job_brief(job: Job) -> JobBrief:
    """One line of a list."""
    return _brief(vars(job), job.owner.get_username(), job.spec["layout"], [tag.name for tag in job.tags.all()])


def _brief(row: dict[str, Any], owner: str, layout: LayoutDict, tags: list[str]) -> JobBrief:
    return {
        "id": row["id"],
        "name": row["name"],
        "project": row["project"],
        "kind": row["kind"],
        "owner": owner,
        "status": row["status"],
        "attempt": row["attempt"],
        "priority": row["priority"],
        "wait_reason": row["wait_reason"],
        "tags": tags,
        "archived": row["archived"],
        "layout": layout,
        "world_size": num_ranks(layout),
        "created": row["created"].isoformat(),
        "changed": row["changed"].isoformat(),
    }


def job_detail(job: Job, queued: History | None = None) -> JobDetail:
    """Everything about a job but its telemetry. `queued`: of one that was just now all that happened to it: nothing of
    it began, and nobody tagged it."""
    members = Prefetch("members", Member.objects.annotate(host_seen=F("host__last_seen")))
    attempt = None if queued else job.attempts.filter(number=job.attempt).prefetch_related(members).first()
    if queued:
        prefetch_related_objects([job], Prefetch("tags", JobTag.objects.none()))
    history: list[StateChange] = [
        {"status": c.status, "attempt": c.attempt, "reason": c.reason, "at": c.at.isoformat()}
        for c in ([queued] if queued else job.history.all())
    ]
    return {
        **job_brief(job),
        "finished": job.status in TERMINAL,
        "engine": job.engine,
        "engine_id": attempt.engine_id if attempt else "",
        "engine_told": attempt.engine_told if attempt else {},
        "host": attempt.where() if attempt else None,
        "members": [_member(member, job.status) for member in attempt.members.all()] if attempt else [],
        "exit": attempt.exit if attempt else None,
        "diagnosis": attempt.diagnosis if attempt else None,
        "note": "; ".join(_notes(attempt)) if attempt else "",
        "history": history,
        "spec": job.spec,
        "estimate": job.estimate,
        "chosen": job.chosen,
        "reported": _reported(attempt) if attempt and job.engine == ELSEWHERE else None,
    }


def _reported(attempt: Attempt) -> ExternalRunInfo:
    return {"command": attempt.reported.command, "tags": attempt.reported.tags}


def _member(member: Any, status: str) -> MemberBrief:
    """`member`: with the `host_seen` of its host, None where it is no host of the board's. While its job is neither
    unreachable nor cancelling it may be that nobody listened."""
    heard = max(filter(None, (member.heard, member.host_seen)), default=None)
    unheard = heard is not None and timezone.now() - heard > HOST_SILENT_AFTER
    return {
        "node": member.node,
        "host": member.host_name,
        "first_rank": member.first_rank,
        "num_ranks": member.num_ranks,
        "silent": unheard and not member.ended and status in (Status.UNREACHABLE, Status.CANCELLING),
        "ended": member.ended.isoformat() if member.ended else None,
        "outcome": member.outcome,
        "reason": member.reason,
    }


def _notes(attempt: Attempt) -> Iterator[str]:
    """What hosts say of their part of it, each with its name where there are several."""
    members = attempt.members.all()
    for member in members:
        if member.note:
            yield member.note if len(members) == 1 else f"{member.host_name}: {member.note}"
