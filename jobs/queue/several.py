"""One action on several jobs of one's own, or of anybody's for staff, as pages and REST ask for it."""

from __future__ import annotations

from typing import Any, Literal

from django.db import transaction
from pydantic import Field

from jobs.core.access import changeable_jobs
from jobs.models import TERMINAL, stands
from jobs.models.names import name_problems
from jobs.planning.queries import checked
from jobs.queue import actions, shelf
from jobs.queue.bulk import MOST
from jobs.queue.shapes import Unchanged
from planner.facts.validation import JobId, Problem, SpecError, StrictModel

Action = Literal["cancel", "archive", "restore", "tag", "untag"]
UNDONE_BY: dict[str, Action] = {"archive": "restore", "restore": "archive", "tag": "untag", "untag": "tag"}


class Several(StrictModel):
    """What is to be done to which jobs."""

    action: Action
    jobs: list[JobId] = Field(min_length=1, max_length=MOST)
    tags: list[shelf.Tag] = Field(
        default=[],
        max_length=shelf.MOST_TAGS,
        description="Tags to add or remove. Only for the actions `tag` and `untag`.",
    )


class JobChange(StrictModel):
    """What is to be changed about one job; what is left out stays."""

    archived: bool | None = Field(
        default=None, description="With true, an ended job is archived. With false, an archived job is restored."
    )
    add_tags: list[shelf.NewTag] = Field(default=[], max_length=shelf.MOST_TAGS)
    remove_tags: list[shelf.Tag] = Field(default=[], max_length=shelf.MOST_TAGS)


def wished(data: object) -> JobChange:
    """Raises SpecError, which says of `tags` by which fields they are changed: whoever reads a job finds them so."""
    try:
        return checked(JobChange, data)
    except SpecError as error:
        tags = Problem("tags", "`tags` is read-only. Use `add_tags` and `remove_tags`.")
        raise SpecError([tags if one.field == "tags" else one for one in error.problems]) from None


def carry_out(asked: Several, user: Any) -> list[str]:
    """Do it to those that the user may change; returns the jobs that it changed.

    Raises:
        SpecError: a tag may not be called so, or a job would have too many; nothing was changed.
    """
    by, jobs = user.get_username(), changeable_jobs(user).filter(id__in=asked.jobs).order_by("id")
    if asked.action == "cancel":
        return [job.id for job in jobs if actions.cancel(job, by)]
    ids = list(jobs.values_list("id", flat=True))
    if asked.action == "tag":
        if problems := [one for name in asked.tags for one in name_problems("tags", name)]:
            raise SpecError(problems)
        return shelf.tag(ids, asked.tags, by)
    if asked.action == "untag":
        return shelf.untag(ids, asked.tags, by)
    return (shelf.archive if asked.action == "archive" else shelf.restore)(ids, by)


def unchanged(asked: Several, changed: list[str], user: Any) -> list[Unchanged]:
    """Of the jobs that were asked for, those that the action did not change, and why."""
    left = [job for job in dict.fromkeys(asked.jobs) if job not in set(changed)]
    statuses = dict(changeable_jobs(user).filter(id__in=left).values_list("id", "status"))
    return [Unchanged(job=job, reason=_why(asked.action, statuses.get(job))) for job in left]


def _why(action: Action, status: str | None) -> str:
    if status is None:
        return "The job does not exist, or you cannot change it."
    if action == "cancel" or (action == "archive" and status not in TERMINAL):
        return f"The job cannot be {'cancelled' if action == 'cancel' else 'archived'} because it {stands(status)}."
    return "The action changes nothing, because the job already has the requested state."


class NotEndedError(Exception):
    """What lives is not archived."""


def change(asked: JobChange, job_id: str, by: str) -> None:
    """All of it or nothing.

    Raises:
        NotEndedError: it was to be archived, and has not ended.
        SpecError: it would have too many tags.
    """
    with transaction.atomic():
        shelf.untag([job_id], asked.remove_tags, by)
        shelf.tag([job_id], asked.add_tags, by)
        if asked.archived is None:
            return
        (shelf.archive if asked.archived else shelf.restore)([job_id], by)
        if shelf.is_archived(job_id) != asked.archived:
            raise NotEndedError
