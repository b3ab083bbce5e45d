"""Which runs a branch is held to: set, shown, forgotten. Each change is one transaction with its audit entry."""

from __future__ import annotations

from typing import Annotated

from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.db.models import QuerySet
from pydantic import Field
from typing_extensions import TypedDict

from jobs.core.access import find_project, role_in, visible_job
from jobs.core.audit import record
from jobs.core.errors import MissingError
from jobs.core.job_details import Moment
from jobs.models import DEFAULT_PROJECT, BaselineRun, Project, Role, Status, stands
from jobs.runs.baselines.alike import measured_of, why_unlike
from jobs.runs.baselines.facts import Facts, NoFactsError, facts
from planner.facts.parse_spec import SpecDict
from planner.facts.validation import JobId, Problem, SpecError, StrictModel

MOST_RUNS = 20  # of a branch, the newest
MOST_BRANCHES = 200  # of a project


class BaselineWish(StrictModel):
    """Which run a branch is held to."""

    job: JobId = Field(description="Id of a succeeded job of the project.")


class SetRun(TypedDict):
    """A run, and who said that builds are held to it."""

    job: str
    name: str
    by: str
    at: Moment


class KeptRun(SetRun):
    """A run that builds are held to, and what it measured."""

    facts: Facts


class LeftAside(SetRun):
    """A run of the branch that has no mean with its newest."""

    why: Annotated[str, Field(description="Spec fields in which this job differs from the newest job.")]


class Baseline(TypedDict):
    """Of a branch, the newest run first: those that ran what the newest ran, and the others."""

    project: str
    branch: str
    spec: Annotated[
        SpecDict | None,
        Field(description="Spec fields of the newest job that affect the results. null if they are not stored."),
    ]
    runs: list[KeptRun]
    left_aside: Annotated[
        list[LeftAside], Field(description="Runs with a different spec, which the mean of `runs` excludes.")
    ]


class BranchBrief(TypedDict):
    """One branch of a list: how many runs are kept of it, of whatever spec, and the newest."""

    branch: str
    runs: int
    job: str
    name: str
    by: str
    at: Moment


class NotSetError(Exception):
    """The job cannot be a baseline as it is."""


def branches(user: User, project: str) -> list[BranchBrief]:
    """By name. Raises MissingError."""
    found: dict[str, BranchBrief] = {}
    for run in _seen(user, project).defer("facts", "spec").order_by("branch", "-at", "-id"):
        if run.branch in found:
            found[run.branch]["runs"] += 1
            continue
        at = run.at.isoformat()
        found[run.branch] = {
            "branch": run.branch,
            "runs": 1,
            "job": run.job,
            "name": run.name,
            "by": run.by,
            "at": at,
        }
    return list(found.values())


def baseline(user: User, project: str, branch: str) -> Baseline:
    """Raises MissingError."""
    runs = list(_seen(user, project).filter(branch=branch))
    if not runs:
        raise MissingError("baseline")
    told = [(run, "" if run is runs[0] else why_unlike(run.spec, runs[0].spec)) for run in runs]
    return {
        "project": project,
        "branch": branch,
        "spec": runs[0].spec,
        "runs": [{**_brief(run), "facts": run.facts} for run, why in told if not why],
        "left_aside": [{**_brief(run), "why": why} for run, why in told if why],
    }


def add(user: User, project: str, branch: str, job_id: str) -> Baseline:
    """The job's run becomes the newest of the branch's; beyond MOST_RUNS the oldest go.

    Raises:
        SpecError: there is no such job, it is another project's, or there are MOST_BRANCHES.
        NotSetError: it did not succeed, or told nothing.
        PermissionDenied, MissingError
    """
    _check_may_set(user, project)
    job = visible_job(user, job_id)
    if job is None:
        raise SpecError([Problem("job", "The job does not exist, or you cannot see it.")])
    if job.project != project:
        raise SpecError([Problem("job", f"The job is in project {job.project}, not in {project}.")])
    if job.status != Status.SUCCEEDED:
        raise NotSetError(f"The job {stands(job.status)}. Use a job that succeeded.")
    try:
        told = facts(job.attempts.get(number=job.attempt).exit, job.world_size)
    except NoFactsError as error:
        raise NotSetError(str(error)) from None
    mine = _mine(user, project)
    with transaction.atomic():
        list(Project.objects.select_for_update(no_key=True).filter(name=project))  # each counts those before it
        others = mine.exclude(branch=branch).values("branch").distinct().count()
        if others >= MOST_BRANCHES:
            raise SpecError(
                [
                    Problem(
                        "branch",
                        f"The project has {others} baselines, and the maximum is {MOST_BRANCHES}. Delete one first.",
                    )
                ]
            )
        BaselineRun.objects.update_or_create(
            {"name": job.name, "facts": told, "spec": measured_of(job.spec), "by": user.get_username()},
            project=project,
            branch=branch,
            owner=_owner(user, project),
            job=job.id,
        )
        newest = mine.filter(branch=branch).values_list("pk", flat=True)[:MOST_RUNS]
        mine.filter(branch=branch).exclude(pk__in=list(newest)).delete()
        record(user.get_username(), "set baseline", "baseline", f"{project}/{branch}", after=job.id)
    return baseline(user, project, branch)


def forget(user: User, project: str, branch: str) -> None:
    """All its runs. Raises PermissionDenied, MissingError."""
    _check_may_set(user, project)
    with transaction.atomic():
        gone, _ = _seen(user, project).filter(branch=branch).delete()
        if not gone:
            raise MissingError("baseline")
        record(user.get_username(), "forget baseline", "baseline", f"{project}/{branch}", before=gone)


def _brief(run: BaselineRun) -> SetRun:
    return {"job": run.job, "name": run.name, "by": run.by, "at": run.at.isoformat()}


def _owner(user: User, project: str) -> User | None:
    return user if project == DEFAULT_PROJECT else None


def _mine(user: User, project: str) -> QuerySet[BaselineRun]:
    return BaselineRun.objects.filter(project=project, owner=_owner(user, project))


def _seen(user: User, project: str) -> QuerySet[BaselineRun]:
    """Raises MissingError alike for a project that is not there and one of which the user is no member."""
    if project != DEFAULT_PROJECT:  # which everybody is in, also where it has no row
        find_project(user, project)
    return _mine(user, project)


def _check_may_set(user: User, project: str) -> None:
    """In `default` everybody may, for themselves; elsewhere operators."""
    role = role_in(user, project)
    if role is None:
        raise MissingError("project")
    if project != DEFAULT_PROJECT and role < Role.OPERATOR:
        raise PermissionDenied(f"You need the `operator` role in project {project}. Your role is {role.label}.")
