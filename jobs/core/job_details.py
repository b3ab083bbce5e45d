"""Serialize jobs to JSON for REST, pages, and the state message of the websocket."""

from __future__ import annotations

from typing import Annotated, Any, cast

from django.contrib.auth.models import User
from django.db.models import F, Prefetch, QuerySet, prefetch_related_objects
from django.utils import timezone
from pydantic import Field, WithJsonSchema
from typing_extensions import TypedDict

from contracts.control import ExitReport
from jobs.core.verdict_schema import VerdictPayload
from jobs.models import EXTERNAL_ENGINE, HOST_SILENT_AFTER, TERMINAL, Attempt, Job, JobTag, Member, Status
from jobs.models import StateChange as History
from jobs.models.jobs import compute_num_ranks
from planner.cost.estimate import Estimate
from planner.facts.parse_spec import LayoutDict, SpecDict
from planner.search.auto_layout import AutoLayout

Timestamp = Annotated[str, WithJsonSchema({"type": "string", "format": "date-time"})]  # ISO 8601 with its zone
StatusName = Annotated[str, WithJsonSchema({"type": "string", "enum": Status.values})]
StoredByOlderVersion = dict[str, Any]  # may lack fields
BRIEF_COLUMNS = ("id", "name", "project", "kind", "status", "attempt", "priority", "wait_reason", "archived")


class StateChange(TypedDict):
    """A change of the status of an attempt, with its time and reason."""

    status: StatusName
    attempt: int
    reason: str
    at: Timestamp


class JobBrief(TypedDict):
    """A job in a list."""

    id: str
    name: str
    project: str
    kind: Annotated[str, Field(description="Kind of the job, such as `train` or `script`.")]
    owner: str
    status: StatusName
    attempt: int
    priority: int
    wait_reason: Annotated[str, Field(description="Reason why the queued job waits.")]
    tags: list[str]
    archived: Annotated[
        bool, Field(description="True if the job is archived. Lists show archived jobs only on request.")
    ]
    layout: LayoutDict
    world_size: int
    created: Timestamp
    changed: Timestamp


class MemberBrief(TypedDict):
    """One host of an attempt, with `num_ranks` ranks from `first_rank` on. `reason`: reason of the `outcome`.

    `silent`: true if the ranks have not ended, and no report or heartbeat arrived for 30 s.
    """

    node: int
    host: str
    first_rank: int
    num_ranks: int
    silent: bool
    ended: Timestamp | None
    outcome: str
    reason: str


class ExternalRunInfo(TypedDict):
    """Command and tags that an external run reported at its start."""

    command: list[str]
    tags: list[str]


class NoEstimate(TypedDict):
    """Empty estimate of a job that trains no model, such as a script."""


class JobDetail(JobBrief):
    """A job with all fields. Bytes are payload bytes."""

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
    backfilled: Annotated[
        bool,
        Field(description="True if the current attempt uses hosts that are reserved for an earlier job."),
    ]
    members: Annotated[list[MemberBrief], Field(description="Hosts of the current attempt, in rank order.")]
    exit: Annotated[ExitReport | StoredByOlderVersion | None, Field(description="Exit report of the current attempt.")]
    diagnosis: Annotated[
        VerdictPayload | StoredByOlderVersion | None,
        Field(description="Verdict of the current attempt, and the recommended next action."),
    ]
    note: Annotated[str, Field(description="Warning from the host about the job, for example about a stopped rank.")]
    history: list[StateChange]
    spec: SpecDict
    estimate: Annotated[
        Estimate | NoEstimate | StoredByOlderVersion, Field(description="Estimate at the time of submit.")
    ]
    chosen: Annotated[
        AutoLayout | StoredByOlderVersion | None,
        Field(description='Why Meshboard chose this layout. null if the requested layout was not "auto".'),
    ]
    reported: Annotated[
        ExternalRunInfo | None,
        Field(description="Command and tags that an external run reported. null for other jobs."),
    ]


class WaitResult(TypedDict):
    """Result of a wait for a status.

    `reached`: true if the current attempt reached the status. False after a timeout, or if it can no longer reach it.
    """

    reached: bool
    job: JobDetail


def get_job_briefs(jobs: QuerySet[Job]) -> list[JobBrief]:
    """Return the rows of a list. Reading only the listed columns takes a third of the time of whole jobs."""
    owner, layout = f"owner__{User.USERNAME_FIELD}", "spec__layout"
    rows = list(jobs.values(*BRIEF_COLUMNS, "created", "changed", owner, layout))
    tags: dict[str, list[str]] = {row["id"]: [] for row in rows}
    for job, tag in JobTag.objects.filter(job__in=tags).values_list("job", "name"):
        tags[job].append(tag)
    return [_serialize_brief(row, row[owner], row[layout], tags[row["id"]]) for row in rows]


def _serialize_brief(row: dict[str, Any], owner: str, layout: LayoutDict, tags: list[str]) -> JobBrief:
    brief = {
        **{name: row[name] for name in BRIEF_COLUMNS},
        "owner": owner,
        "tags": tags,
        "layout": layout,
        "world_size": compute_num_ranks(layout),
        "created": row["created"].isoformat(),
        "changed": row["changed"].isoformat(),
    }
    return cast(JobBrief, brief)


def serialize_job(job: Job, only_change: History | None = None) -> JobDetail:
    """Return all fields of a job.

    Args:
        only_change: The only state change of a job that was just submitted. The job has no attempts and no tags.
    """
    members = Prefetch("members", Member.objects.annotate(host_seen=F("host__last_seen")))
    attempt = None if only_change else job.attempts.filter(number=job.attempt).prefetch_related(members).first()
    if only_change:
        prefetch_related_objects([job], Prefetch("tags", JobTag.objects.none()))
    history: list[StateChange] = [
        {"status": change.status, "attempt": change.attempt, "reason": change.reason, "at": change.at.isoformat()}
        for change in ([only_change] if only_change else job.history.all())
    ]
    reported: ExternalRunInfo | None = None
    if attempt and job.engine == EXTERNAL_ENGINE:
        reported = {"command": attempt.reported.command, "tags": attempt.reported.tags}
    tags = [tag.name for tag in job.tags.all()]
    return {
        **_serialize_brief(vars(job), job.owner.get_username(), job.spec["layout"], tags),
        "finished": job.status in TERMINAL,
        "engine": job.engine,
        "engine_id": attempt.engine_id if attempt else "",
        "engine_told": attempt.engine_told if attempt else {},
        "host": attempt.format_hosts() if attempt else None,
        "backfilled": attempt.backfilled if attempt else False,
        "members": [_serialize_member(member, job.status) for member in attempt.members.all()] if attempt else [],
        "exit": attempt.exit if attempt else None,
        "diagnosis": attempt.diagnosis if attempt else None,
        "note": _format_notes(attempt) if attempt else "",
        "history": history,
        "spec": job.spec,
        "estimate": job.estimate,
        "chosen": job.chosen,
        "reported": reported,
    }


def _serialize_member(member: Any, status: str) -> MemberBrief:
    # `host_seen` is None if Meshboard does not manage the host. A silent member counts only in these two states:
    # otherwise the controller may have been down.
    last_report = max(filter(None, (member.heard, member.host_seen)), default=None)
    is_overdue = last_report is not None and timezone.now() - last_report > HOST_SILENT_AFTER
    return {
        "node": member.node,
        "host": member.host_name,
        "first_rank": member.first_rank,
        "num_ranks": member.num_ranks,
        "silent": is_overdue and not member.ended and status in (Status.UNREACHABLE, Status.CANCELLING),
        "ended": member.ended.isoformat() if member.ended else None,
        "outcome": member.outcome,
        "reason": member.reason,
    }


def _format_notes(attempt: Attempt) -> str:
    members = attempt.members.all()
    notes = [(member.host_name, member.note) for member in members if member.note]
    return "; ".join(note if len(members) == 1 else f"{host}: {note}" for host, note in notes)
