"""Why the board would not take a job, besides what its spec says of itself: told of a draft as of what is submitted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.conf import settings

from jobs.access import role_in, visible_jobs
from jobs.models import DEFAULT_PROJECT, Pool, Project, Role
from jobs.naming import name_problems
from jobs.planning.calibration import calibration_problems
from jobs.planning.lab_memory import lab_memory_problems
from jobs.planning.room import host_problems, room_problems
from jobs.planning.there import There
from planner.facts.kinds import num_slots, product_words
from planner.facts.spec import JobSpec, Problem
from planner.facts.words import counted


def refusals(owner: Any, spec: JobSpec, there: Sequence[There]) -> list[Problem]:
    """All of them but the checkpoint's (`jobs.planning.resumed`), which a plan tells apart. `there`: `hosts_there`."""
    return [
        *room_problems(spec, there),
        *host_problems(spec, there),
        *lab_memory_problems(spec, there),
        *_engine_missing(spec),
        *name_problems("name", spec.name),
        *_queue_problems(owner, spec),
        *calibration_problems(owner, spec, there),
    ]


def _engine_missing(spec: JobSpec) -> list[Problem]:
    if spec.resources.engine == "slurm" and settings.SLURM is None:
        return [Problem("resources.engine", "this board runs no jobs on Slurm: MESHBOARD_SLURM_FOLDER is not set")]
    return []


def _queue_problems(owner: Any, spec: JobSpec) -> list[Problem]:
    """What the spec says of its turn, against the projects, pools and jobs that there are."""
    found = []
    project = Project.objects.filter(name=spec.project).first()
    role = role_in(owner, spec.project)
    if role is None or (project is None and spec.project != DEFAULT_PROJECT):
        found.append(Problem("project", f"there is no project {spec.project!r}, or you are no member of it"))
    elif role < Role.SUBMITTER:
        text = f"you are a {role.label} of {spec.project!r}; its submitters, operators and admins submit to it"
        found.append(Problem("project", text))
    elif project is not None and spec.resources.engine == "slurm" and project.variables.exists():
        found.append(
            Problem("resources.engine", f"project {project.name} hands its jobs variables, and Slurm gets none")
        )
    elif project is not None and project.most_slots is not None and num_slots(spec) > project.most_slots:
        text = (
            f"{product_words(spec.layout)}, and project {project.name} may hold {counted(project.most_slots, 'slot')}"
        )
        found.append(Problem("layout", text))
    pool = spec.resources.pool
    if pool is not None and not Pool.objects.filter(name=pool).exists():
        found.append(Problem("resources.pool", f"there is no pool {pool!r}"))
    theirs = visible_jobs(owner).filter(id__in=spec.after).values_list("id", flat=True) if spec.after else ()
    found += [
        Problem("after", f"there is no job {job!r}, or it is not yours") for job in sorted({*spec.after} - {*theirs})
    ]
    return found
