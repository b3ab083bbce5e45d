"""Apply an action to several jobs, and change tags and the archive."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, assert_never

from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.db.models import QuerySet
from pydantic import Field

from jobs.core.access import get_changeable_jobs, get_operable_jobs, may_change_all_jobs
from jobs.core.audit import record
from jobs.models import TERMINAL, Job, JobTag, Status, describe_status
from jobs.models.validators import NameRule, check_name
from jobs.planning.schemas import validate_request
from jobs.queue import actions, staff_actions
from jobs.queue.view import UnchangedJob
from planner.facts.validation import JobId, Problem, SpecError, StrictModel

JobsAction = Literal["cancel", "archive", "restore", "tag", "untag"]
QueueAction = Literal["hold", "release", "cancel", "priority"]
MAX_JOBS = 1000  # per request
MAX_TAGS = 20  # per job
Tag = Annotated[str, Field(min_length=1, max_length=50, pattern=r"^[^\x00-\x1f\x7f]+$")]
NewTag = Annotated[Tag, NameRule]
INVERSE_ACTIONS: dict[str, JobsAction] = {"archive": "restore", "restore": "archive", "tag": "untag", "untag": "tag"}


class JobsActionRequest(StrictModel):
    """An action on jobs that the user may change."""

    action: JobsAction
    jobs: list[JobId] = Field(min_length=1, max_length=MAX_JOBS)
    tags: list[Tag] = Field(
        default=[],
        max_length=MAX_TAGS,
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
    priority: Annotated[int, Field(ge=staff_actions.MIN_PRIORITY, le=staff_actions.MAX_PRIORITY)] | None = Field(
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


def apply_action(request: JobsActionRequest | QueueActionRequest, user: Any) -> list[str]:
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
    return staff_actions.set_priority(ids, request.priority, by)


def _apply_to_jobs(request: JobsActionRequest, ids: list[str], by: str) -> list[str]:
    match request.action:
        case "tag":
            if problems := [one for name in request.tags for one in check_name("tags", name)]:
                raise SpecError(problems)
            return tag(ids, request.tags, by)
        case "untag":
            return untag(ids, request.tags, by)
        case "archive" | "restore":
            return set_archived(ids, by, archived=request.action == "archive")
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
    add_tags: list[NewTag] = Field(default=[], max_length=MAX_TAGS)
    remove_tags: list[Tag] = Field(default=[], max_length=MAX_TAGS)


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
        untag([job_id], change.remove_tags, by)
        tag([job_id], change.add_tags, by)
        if change.archived is None:
            return
        set_archived([job_id], by, archived=change.archived)
        if Job.objects.filter(id=job_id, archived=True).exists() != change.archived:
            raise NotEndedError


def tag(jobs: Iterable[str], names: Iterable[str], by: str) -> list[str]:
    """Add tags to jobs, and return the changed jobs.

    Raises:
        SpecError: A job would have too many tags. No job is changed.
    """
    wanted = list(dict.fromkeys(names))
    changed = []
    with transaction.atomic():
        for job in _lock(jobs):
            before = {tag.name for tag in job.tags.all()}
            new = [name for name in wanted if name not in before]
            if not new:
                continue
            if len(before) + len(new) > MAX_TAGS:
                text = (
                    f"Job {job.id} has {len(before)} tags, "
                    f"and {len(new)} more tags would exceed the maximum of {MAX_TAGS}. Remove tags first."
                )
                raise SpecError([Problem("tags", text)])
            JobTag.objects.bulk_create(JobTag(job=job, name=name) for name in new)
            record(by, "tag", "job", job.id, after=new)
            changed.append(job.id)
    return changed


def untag(jobs: Iterable[str], names: Iterable[str], by: str) -> list[str]:
    """Remove tags from jobs, and return the changed jobs."""
    unwanted = set(names)
    changed = []
    with transaction.atomic():
        for job in _lock(jobs):
            removed = sorted(tag.name for tag in job.tags.all() if tag.name in unwanted)
            if not removed:
                continue
            JobTag.objects.filter(job=job, name__in=removed).delete()
            record(by, "untag", "job", job.id, before=removed)
            changed.append(job.id)
    return changed


def set_archived(jobs: Iterable[str], by: str, *, archived: bool) -> list[str]:
    """Archive ended jobs or restore archived jobs, and return the changed jobs."""
    changed = []
    with transaction.atomic():
        for job in _lock(jobs):
            if job.archived == archived or (archived and job.status not in TERMINAL):
                continue
            Job.objects.filter(id=job.id).update(archived=archived)
            record(by, "archive" if archived else "restore", "job", job.id)
            changed.append(job.id)
    return changed


def _lock(jobs: Iterable[str]) -> list[Job]:
    """Lock jobs in the order of their IDs, which prevents deadlocks of concurrent changes."""
    rows = Job.objects.select_for_update(no_key=True).filter(id__in=list(jobs)).order_by("id")
    return list(rows.only("id", "status", "archived").prefetch_related("tags"))
