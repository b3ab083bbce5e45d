"""Variables that a project hands its jobs: written, never read back.

The database holds them encrypted with a key made of the board's secret key. They are opened in the controller as an
order leaves, sealed for its host (`contracts.security`), and opened there by the supervisor, which hands them to the
processes of the job and to nobody else.
"""

from __future__ import annotations

from typing import Annotated

from cryptography.fernet import InvalidToken
from django.db import transaction
from pydantic import Field
from typing_extensions import TypedDict

from contracts.security import (
    MAX_VARIABLE_BYTES,
    MAX_VARIABLES,
    MAX_VARIABLES_TOTAL_BYTES,
    VARIABLE_NAME_PREFIXES,
    encrypt_variables,
    is_allowed_variable,
)
from jobs.core.access import may_submit_to
from jobs.core.audit import record
from jobs.core.credentials import derive_signing_keys
from jobs.models import Job, Member, Project, ProjectVariable
from jobs.people.sealing import board
from planner.facts.validation import NO_NUL, Problem, SpecError, StrictModel

PURPOSE = "variables"


class VariableRequest(StrictModel):
    """A value to hand to jobs. Nobody is told it again."""

    value: Annotated[str, Field(max_length=MAX_VARIABLE_BYTES, pattern=NO_NUL)]


class Variable(TypedDict):
    """A variable of a project's jobs, without its value."""

    name: str
    changed: str
    changed_by: str


class UnreadableError(Exception):
    """The board's secret key is another one than when they were set."""


def known(project: Project) -> list[Variable]:
    return [
        {"name": one.name, "changed": one.changed.isoformat(), "changed_by": one.changed_by}
        for one in project.variables.all()
    ]


def put(project: Project, name: str, value: str, by: str) -> Variable:
    """Set a variable.

    Raises:
        SpecError: jobs are handed none of this name, or it is too large, or one too many.
    """
    if not is_allowed_variable(name):
        words = (
            f"{name[:100]!r} is not a valid variable name. Use capitals, "
            f"digits, and _ after the prefix {' or '.join(VARIABLE_NAME_PREFIXES)}."
        )
        raise SpecError([Problem("variable", words)])
    with transaction.atomic():
        Project.objects.select_for_update(no_key=True).get(pk=project.pk)
        others = {one.name: one.sealed for one in project.variables.exclude(name=name)}
        if len(others) >= MAX_VARIABLES:
            raise SpecError(
                [
                    Problem(
                        "variable",
                        f"The project already has {MAX_VARIABLES} variables, the maximum. Delete a variable first.",
                    )
                ]
            )
        size, rest = len(value.encode()), sum(map(_size, others.values()))
        if size > MAX_VARIABLE_BYTES or size + rest > MAX_VARIABLES_TOTAL_BYTES:
            words = (
                f"The value has {size:,} bytes, and the other variables have {rest:,}. "
                f"Use at most {MAX_VARIABLE_BYTES:,} bytes per value, and {MAX_VARIABLES_TOTAL_BYTES:,} in total."
            )
            raise SpecError([Problem("value", words)])
        made, _ = ProjectVariable.objects.update_or_create(
            project=project,
            name=name,
            defaults={"sealed": board(PURPOSE).encrypt(value.encode()).decode(), "changed_by": by},
        )
        record(by, "set variable", "project", project.name, after={"variable": name})
    return {"name": made.name, "changed": made.changed.isoformat(), "changed_by": made.changed_by}


def remove(project: Project, name: str, by: str) -> bool:
    """True when this call did it."""
    with transaction.atomic():
        removed, _ = project.variables.filter(name=name).delete()
        if removed:
            record(by, "remove variable", "project", project.name, before={"variable": name})
    return bool(removed)


def sealed_for(member: Member, job: Job) -> list[str]:
    """A job's variables, for the host of a member alone. Nothing where its owner may not submit to the project any
    more: what a project hands its jobs is its members'.

    Raises:
        UnreadableError: they were set under another secret key.
    """
    found = ProjectVariable.objects.filter(project__name=job.project).values_list("name", "sealed")
    if not found or member.host is None or not may_submit_to(job.owner, job.project):
        return []
    values = {name: _open(sealed) for name, sealed in found}
    keys = [bytes.fromhex(key) for key in derive_signing_keys(member.host.name, member.host.generation)]
    return encrypt_variables(keys, job.id, job.attempt, values)


def _size(sealed: str) -> int:
    """Bytes of a value. Nothing where the key is another: nobody is handed it, and others must be set beside it."""
    try:
        return len(_open(sealed).encode())
    except UnreadableError:
        return 0


def _open(sealed: str) -> str:
    try:
        return board(PURPOSE).decrypt(sealed).decode()
    except InvalidToken:
        raise UnreadableError(
            "the project variables were encrypted with an old secret key. Set the variables again"
        ) from None
