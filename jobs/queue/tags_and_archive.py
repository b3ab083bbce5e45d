"""What people do to find jobs again, and to be rid of them: tags, and the archive. Both can be undone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from django.db import transaction
from pydantic import Field

from jobs.core.audit import record
from jobs.models import TERMINAL, Job, JobTag
from jobs.models.validators import NameRule
from planner.facts.validation import Problem, SpecError

MOST_TAGS = 20  # of a job
Tag = Annotated[str, Field(min_length=1, max_length=50, pattern=r"^[^\x00-\x1f\x7f]+$")]

NewTag = Annotated[Tag, NameRule]


def tag(jobs: Iterable[str], names: Iterable[str], by: str) -> list[str]:
    """Give jobs tags; returns those that lacked one of them.

    Raises:
        SpecError: a job would have more than MOST_TAGS; nothing was changed.
    """
    wanted = list(dict.fromkeys(names))
    changed = []
    with transaction.atomic():
        for job in _locked(jobs):
            has = {tag.name for tag in job.tags.all()}
            new = [name for name in wanted if name not in has]
            if not new:
                continue
            if len(has) + len(new) > MOST_TAGS:
                text = (
                    f"Job {job.id} has {len(has)} tags, "
                    f"and {len(new)} more tags would exceed the maximum of {MOST_TAGS}. Remove tags first."
                )
                raise SpecError([Problem("tags", text)])
            JobTag.objects.bulk_create(JobTag(job=job, name=name) for name in new)
            record(by, "tag", "job", job.id, after=new)
            changed.append(job.id)
    return changed


def untag(jobs: Iterable[str], names: Iterable[str], by: str) -> list[str]:
    """Take tags from jobs; returns those that had one of them."""
    unwanted = set(names)
    changed = []
    with transaction.atomic():
        for job in _locked(jobs):
            gone = sorted(tag.name for tag in job.tags.all() if tag.name in unwanted)
            if not gone:
                continue
            JobTag.objects.filter(job=job, name__in=gone).delete()
            record(by, "untag", "job", job.id, before=gone)
            changed.append(job.id)
    return changed


def archive(jobs: Iterable[str], by: str) -> list[str]:
    """Leave jobs that have ended out of the lists; returns those that this call archived."""
    return _archive(jobs, by, archived=True)


def restore(jobs: Iterable[str], by: str) -> list[str]:
    """Undo `archive`; returns those that this call brought back."""
    return _archive(jobs, by, archived=False)


def is_archived(job_id: str) -> bool:
    return Job.objects.filter(id=job_id, archived=True).exists()


def _archive(jobs: Iterable[str], by: str, *, archived: bool) -> list[str]:
    changed = []
    with transaction.atomic():
        for job in _locked(jobs):
            if job.archived == archived or (archived and job.status not in TERMINAL):
                continue
            Job.objects.filter(id=job.id).update(archived=archived)
            record(by, "archive" if archived else "restore", "job", job.id)
            changed.append(job.id)
    return changed


def _locked(jobs: Iterable[str]) -> list[Job]:
    """In the order of their ids, so that two who change the same jobs wait for each other rather than lock up."""
    rows = Job.objects.select_for_update(no_key=True).filter(id__in=list(jobs)).order_by("id")
    return list(rows.only("id", "status", "archived").prefetch_related("tags"))
