"""Reasons to refuse a job that depend on the board: hosts, projects, pools and other jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.conf import settings

from jobs.core.access import get_role, get_visible_jobs
from jobs.models import DEFAULT_PROJECT, Pool, Project, Role
from jobs.models.validators import check_name
from jobs.planning.calibration import calibration_problems
from jobs.planning.lab_memory import lab_memory_problems
from jobs.planning.room import host_problems, room_problems
from jobs.planning.there import There
from planner.facts.kinds import format_world_size, get_num_slots
from planner.facts.spec import JobSpec
from planner.facts.validation import Problem, format_count


def refusals(owner: Any, spec: JobSpec, there: Sequence[There]) -> list[Problem]:
    """All of them but the checkpoint's (`jobs.planning.resumed`), which a plan tells apart. `there`: `hosts_there`."""
    return [
        *room_problems(spec, there),
        *host_problems(spec, there),
        *lab_memory_problems(spec, there),
        *_engine_missing(spec),
        *check_name("name", spec.name),
        *_queue_problems(owner, spec),
        *calibration_problems(owner, spec, there),
    ]


def _engine_missing(spec: JobSpec) -> list[Problem]:
    if spec.resources.engine == "slurm" and settings.SLURM is None:
        return [
            Problem(
                "resources.engine",
                "`resources.engine` is slurm, but `MESHBOARD_SLURM_FOLDER` is not set on this board. Use hosts.",
            )
        ]
    return []


def _queue_problems(owner: Any, spec: JobSpec) -> list[Problem]:
    """What the spec says of its turn, against the projects, pools and jobs that there are."""
    found = []
    project = Project.objects.filter(name=spec.project).first()
    role = get_role(owner, spec.project)
    if role is None or (project is None and spec.project != DEFAULT_PROJECT):
        found.append(
            Problem(
                "project",
                f"`project` is {spec.project!r}, but you are not a member of such a project. Use one of your projects.",
            )
        )
    elif role < Role.SUBMITTER:
        text = f"Your role in `project` {spec.project!r} is {role.label}. Ask a project admin for the `submitter` role."
        found.append(Problem("project", text))
    elif project is not None and spec.resources.engine == "slurm" and project.variables.exists():
        found.append(
            Problem(
                "resources.engine",
                f"Project {project.name} has variables, and Slurm jobs cannot use them. Use another project or engine.",
            )
        )
    elif project is not None and project.max_slots is not None and get_num_slots(spec) > project.max_slots:
        limit = format_count(project.max_slots, "slot")
        text = f"{format_world_size(spec.layout)}, but project {project.name} is limited to {limit}. Use fewer ranks."
        found.append(Problem("layout", text))
    pool = spec.resources.pool
    if pool is not None and not Pool.objects.filter(name=pool).exists():
        found.append(
            Problem(
                "resources.pool",
                f"`resources.pool` is {pool!r}, but this pool does not exist. Omit the field to use any host.",
            )
        )
    theirs = get_visible_jobs(owner).filter(id__in=spec.after).values_list("id", flat=True) if spec.after else ()
    found += [
        Problem("after", f"`after` names job {job!r}, but this job does not exist, or you cannot see it.")
        for job in sorted({*spec.after} - {*theirs})
    ]
    return found
