"""Apply one action to several jobs, on pages and over REST."""

from __future__ import annotations

from typing import Annotated, Any, Literal, assert_never

from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.db.models import QuerySet
from pydantic import Field

from jobs.core.access import get_changeable_jobs, get_operable_jobs, may_change_all_jobs
from jobs.models import TERMINAL, Job, Status, describe_status
from jobs.models.validators import check_name
from jobs.planning.schemas import validate_request
from jobs.queue import actions, staff_actions, tags_and_archive
from jobs.queue.view import UnchangedJob
from planner.facts.validation import JobId, Problem, SpecError, StrictModel

JobsAction = Literal["cancel", "archive", "restore", "tag", "untag"]
QueueAction = Literal["hold", "release", "cancel", "priority"]
MAX_JOBS = 1000  # per request
UNDONE_BY: dict[str, JobsAction] = {"archive": "restore", "restore": "archive", "tag": "untag", "untag": "tag"}


class JobsActionRequest(StrictModel):
    """An action on jobs that the user may change."""

    action: JobsAction
    jobs: list[JobId] = Field(min_length=1, max_length=MAX_JOBS)
    tags: list[tags_and_archive.Tag] = Field(
        default=[],
        max_length=tags_and_archive.MOST_TAGS,
        description="Tags to add or remove. Only for the actions `tag` and `untag`.",
    )

    def get_jobs(self, user: Any) -> QuerySet[Job]:
        """Return the requested jobs that the user may change, ordered by ID."""
        return get_changeable_jobs(user).filter(id__in=self.jobs).order_by("id")

    def explain_unchanged(self, status: str | None) -> str:
        """Return why the action did not change a job with this status, or without access."""
        if status is None:
            return "The job does not exist, or you cannot change it."
        if self.action == "cancel" or (self.action == "archive" and status not in TERMINAL):
            verb = "cancelled" if self.action == "cancel" else "archived"
            return f"The job cannot be {verb} because it {describe_status(status)}."
        return "The action changes nothing, because the job already has the requested state."


class QueueActionRequest(StrictModel):
    """An action on queued jobs by staff or operators of their projects."""

    action: QueueAction
    jobs: list[JobId] = Field(min_length=1, max_length=MAX_JOBS)
    priority: Annotated[int, Field(ge=staff_actions.LOWEST, le=staff_actions.HIGHEST)] | None = Field(
        default=None, description="New priority of the jobs. Only for the action `priority`."
    )

    def get_jobs(self, user: Any) -> QuerySet[Job]:
        """Return the requested jobs that the user may operate, ordered by ID."""
        return get_operable_jobs(user).filter(id__in=self.jobs).order_by("id")

    def explain_unchanged(self, status: str | None) -> str:
        """Return why the action did not change a job with this status, or without access."""
        if status is None:
            return "The job does not exist."
        if self.action == "cancel":
            return f"The job has already ended as {status}." if status in TERMINAL else f"The job is already {status}."
        if status != Status.QUEUED:
            return f"The job is not queued because it {describe_status(status)}."
        already = {"hold": "is already held", "release": "is not held", "priority": "already has this priority"}
        return f"The job {already[self.action]}."


def apply(request: JobsActionRequest | QueueActionRequest, user: Any) -> list[str]:
    """Apply the action to the requested jobs that the user may change, and return the IDs of the changed jobs.

    Raises:
        SpecError: A new tag is invalid, or a job would have too many tags. No job is changed.
        PermissionDenied: Only staff can change priorities, because they affect the jobs of other projects.
    """
    by, jobs = user.get_username(), request.get_jobs(user)
    if request.action == "cancel":
        return [job.id for job in jobs if actions.cancel(job, by)]
    ids = list(jobs.values_list("id", flat=True))
    if isinstance(request, JobsActionRequest):
        return _apply_to_jobs(request, ids, by)
    if request.action == "hold":
        return staff_actions.hold(ids, by)
    if request.action == "release":
        return staff_actions.release(ids, by)
    if not may_change_all_jobs(user):
        raise PermissionDenied("Only staff can change priorities.")
    assert request.priority is not None, "the view requires it"
    return staff_actions.prioritise(ids, request.priority, by)


def _apply_to_jobs(request: JobsActionRequest, ids: list[str], by: str) -> list[str]:
    match request.action:
        case "tag":
            if problems := [one for name in request.tags for one in check_name("tags", name)]:
                raise SpecError(problems)
            return tags_and_archive.tag(ids, request.tags, by)
        case "untag":
            return tags_and_archive.untag(ids, request.tags, by)
        case "archive":
            return tags_and_archive.archive(ids, by)
        case "restore":
            return tags_and_archive.restore(ids, by)
        case "cancel":
            raise AssertionError("`apply` cancels jobs")
    assert_never(request.action)


def list_unchanged(
    request: JobsActionRequest | QueueActionRequest, changed: list[str], user: Any
) -> list[UnchangedJob]:
    """List the requested jobs that the action did not change, with reasons."""
    left = [job for job in dict.fromkeys(request.jobs) if job not in set(changed)]
    statuses = dict(request.get_jobs(user).filter(id__in=left).values_list("id", "status"))
    return [UnchangedJob(job=job, reason=request.explain_unchanged(statuses.get(job))) for job in left]


class MoveRequest(StrictModel):
    """The new position of a job among jobs of equal priority: an end of the queue, or before another job."""

    to: staff_actions.Where | None = None
    before: JobId | None = None


def explain_unmoved(job: str, before: str | None) -> str:
    """Return why a queued job kept its position."""
    if before is not None:
        rows = Job.objects.filter(id__in=(job, before)).values_list("id", "status", "priority")
        known = {key: (status, priority) for key, status, priority in rows}
        if before not in known:
            return f"Job {before} does not exist."
        status, priority = known[before]
        if status != Status.QUEUED:
            return f"Job {before} has no place in the queue because it {describe_status(str(status))}."
        own = known[job][1]
        if priority != own:
            return f"Job {before} has priority {priority}, but this job has {own}. Use a job of equal priority."
    return "The job already has this place in the queue."


class JobChange(StrictModel):
    """A change of one job. Omitted fields stay unchanged."""

    archived: bool | None = Field(
        default=None, description="With true, an ended job is archived. With false, an archived job is restored."
    )
    add_tags: list[tags_and_archive.NewTag] = Field(default=[], max_length=tags_and_archive.MOST_TAGS)
    remove_tags: list[tags_and_archive.Tag] = Field(default=[], max_length=tags_and_archive.MOST_TAGS)


class NotEndedError(Exception):
    """Only ended jobs can be archived."""


def parse_job_change(data: object) -> JobChange:
    """Parse a change of one job. A SpecError about `tags` names the fields that change tags."""
    try:
        return validate_request(JobChange, data)
    except SpecError as error:
        tags = Problem("tags", "`tags` is read-only. Use `add_tags` and `remove_tags`.")
        raise SpecError([tags if one.field == "tags" else one for one in error.problems]) from None


def change_job(change: JobChange, job_id: str, by: str) -> None:
    """Apply all of a change, or none of it.

    Raises:
        NotEndedError: The job cannot be archived, because it has not ended.
        SpecError: The job would have too many tags.
    """
    with transaction.atomic():
        tags_and_archive.untag([job_id], change.remove_tags, by)
        tags_and_archive.tag([job_id], change.add_tags, by)
        if change.archived is None:
            return
        (tags_and_archive.archive if change.archived else tags_and_archive.restore)([job_id], by)
        if tags_and_archive.is_archived(job_id) != change.archived:
            raise NotEndedError
