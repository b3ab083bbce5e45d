"""Change for which jobs and statuses a user receives emails."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple

from django.conf import settings
from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import Exists, OuterRef, QuerySet
from pydantic import Field

from jobs.core.access import get_visible_projects
from jobs.core.audit import record
from jobs.core.text import is_storable
from jobs.models import TERMINAL, EndWish, Job, MailWish, Project, StateChange, Status, describe_status
from jobs.people.notifications.payloads import EmailSettings, EndEmail
from planner.facts.validation import NO_NUL, Problem, SpecError, StrictModel

OWN_JOBS = ""  # project name that means own jobs in all projects
MAX_PROJECTS = 1000


class EmailSettingRequest(StrictModel):
    """Job statuses for which you receive emails."""

    project: Annotated[str, Field(min_length=1, max_length=100, pattern=NO_NUL)] | None = Field(
        description="Name of the project. null: your own jobs in every project."
    )
    states: list[Annotated[Status, Field(strict=False)]] = Field(max_length=len(Status))


class EmailSettingsRequest(StrictModel):
    """New email settings, which replace all earlier ones."""

    wishes: list[EmailSettingRequest] = Field(max_length=MAX_PROJECTS + 1, description="Each project once.")


class ProjectEmailSetting(NamedTuple):
    """Statuses for which a user receives emails about the jobs of a project."""

    project: str
    states: list[str]


def get_sorted_projects(user: User) -> QuerySet[Project]:
    """Return the visible projects, first those with a setting, sorted by name."""
    settings_of_project = MailWish.objects.filter(user=user, project=OuterRef("name"))
    return get_visible_projects(user).order_by((~Exists(settings_of_project)).asc(), "name")


def get_project_settings(user: User, projects: Iterable[str]) -> list[ProjectEmailSetting]:
    """Return the setting of each of these projects."""
    stored = _get_stored_settings(user)
    return [ProjectEmailSetting(name, stored.get(name, [])) for name in projects]


def serialize_email_settings(user: User) -> EmailSettings:
    """Return the setting of own jobs, then of each visible project."""
    names = [OWN_JOBS, *get_sorted_projects(user).values_list("name", flat=True)[:MAX_PROJECTS]]
    return {
        "email": user.email or None,
        "sends": bool(settings.EMAIL_HOST),
        "wishes": [
            {"project": each.project or None, "states": each.states} for each in get_project_settings(user, names)
        ],
    }


def parse_email_settings(settings_request: EmailSettingsRequest) -> dict[str, list[str]]:
    """Return the statuses per project. Raises SpecError if a project is listed twice."""
    names = [wish.project or OWN_JOBS for wish in settings_request.wishes]
    twice = [
        Problem(f"wishes.{number}.project", "The project is listed twice. List each project only once.")
        for number, name in enumerate(names)
        if name in names[:number]
    ]
    if twice:
        raise SpecError(twice)
    return {
        name: [state.value for state in wish.states] for name, wish in zip(names, settings_request.wishes, strict=True)
    }


def replace_email_settings(user: User, wanted: Mapping[str, list[str]], *, of: Iterable[str] | None = None) -> None:
    """Replace the email settings of a user.

    Args:
        wanted: Statuses per project.
        of: Projects whose settings are replaced. Default: all.

    Raises:
        SpecError: A status or project does not exist.
    """
    known = _filter_projects(user, filter(is_storable, wanted))
    problems = [Problem("project", f"Project {name[:100]!r} does not exist.") for name in wanted if name not in known]
    states = {state for project_states in wanted.values() for state in project_states}
    problems += [
        Problem("states", f"The job status {state[:100]!r} does not exist.") for state in states - set(Status.values)
    ]
    if problems:
        raise SpecError(problems)
    after = {
        name: [state for state in Status.values if state in project_states]
        for name, project_states in wanted.items()
        if project_states
    }
    with transaction.atomic():
        User.objects.select_for_update(no_key=True).get(pk=user.pk)  # serializes concurrent changes
        before = _get_stored_settings(user)
        if of is not None:
            projects = {*of, *wanted}
            others = _filter_projects(user, before) - projects
            after = {name: states for name, states in before.items() if name in others} | after
        if before == after:
            return
        MailWish.objects.filter(user=user).delete()
        MailWish.objects.bulk_create(MailWish(user=user, project=name, states=states) for name, states in after.items())
        record(user.get_username(), "wish for mail", "user", user.get_username(), before, after)


def _filter_projects(user: User, names: Iterable[str]) -> set[str]:
    """Return those of the names for which the user may have a setting."""
    return {OWN_JOBS, *get_visible_projects(user).filter(name__in=list(names)).values_list("name", flat=True)}


def _get_stored_settings(user: User) -> dict[str, list[str]]:
    return dict(MailWish.objects.filter(user=user).values_list("project", "states"))


MAX_END_EMAILS = 1000  # per user


class NoMailError(Exception):
    """The end of the job cannot be mailed. The text says why."""


def get_end_email(user: User, job: Job) -> EndEmail:
    return {
        "asked": EndWish.objects.filter(user=user, job=job).exists(),
        "email": user.email or None,
        "sends": bool(settings.EMAIL_HOST),
    }


def request_end_email(user: User, job: Job) -> None:
    """Request one email when the job has ended. Raises NoMailError."""
    if not settings.EMAIL_HOST:
        raise NoMailError("This board cannot send emails, because it has no mail server.")
    if not user.email:
        raise NoMailError("Your account has no mail address.")
    with transaction.atomic():
        status = Job.objects.select_for_update(no_key=True).values_list("status", flat=True).get(pk=job.pk)
        if status in TERMINAL:  # the lock prevents an end before the request is stored
            raise NoMailError(f"The job has already ended: it {describe_status(status)}.")
        User.objects.select_for_update(no_key=True).get(pk=user.pk)  # serializes concurrent requests
        if EndWish.objects.filter(user=user).count() >= MAX_END_EMAILS:
            maximum = f"{MAX_END_EMAILS:,} jobs, the maximum"
            raise NoMailError(f"You already requested emails for {maximum}. Cancel one of these requests first.")
        _, new = EndWish.objects.get_or_create(user=user, job=job)
        if new:
            record(user.get_username(), "request email at end", "job", job.id)


def cancel_end_email(user: User, job: Job) -> bool:
    """Cancel the request. Return whether there was one."""
    with transaction.atomic():
        gone, _ = EndWish.objects.filter(user=user, job=job).delete()
        if gone:
            record(user.get_username(), "cancel email at end", "job", job.id)
    return bool(gone)


def pop_end_email_users(changes: Sequence[StateChange]) -> dict[str, list[User]]:
    """Delete and return the requests of the jobs that one of the changes ends, except jobs that are retried."""
    ids = {change.job_id for change in changes if change.status in TERMINAL}
    wishes = EndWish.objects.filter(job__in=ids)
    if not ids or not wishes.exists():
        return {}
    jobs = Job.objects.only("id", "attempt", "status", "stop", "spec").filter(id__in=wishes.values("job"))
    ended = [job.id for job in jobs if job.get_retry_reason() is None]
    found: dict[str, list[User]] = {}
    for wish in wishes.filter(job__in=ended).select_related("user"):
        found.setdefault(wish.job_id, []).append(wish.user)
    wishes.filter(job__in=ended).delete()
    return found
