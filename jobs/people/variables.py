"""Set environment variables of projects, and encrypt them for the hosts of jobs.

The database stores values encrypted with a key that is derived from the secret key of the board. The controller
decrypts them and encrypts them for one host (`contracts.security`), whose supervisor passes them to the job.
"""

from __future__ import annotations

import base64
from typing import Annotated

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from django.conf import settings
from django.db import transaction
from django.utils.crypto import salted_hmac
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
from planner.facts.validation import NO_NUL, Problem, SpecError, StrictModel

PURPOSE = "variables"


class VariableRequest(StrictModel):
    """A value of a variable. It cannot be read back."""

    value: Annotated[str, Field(max_length=MAX_VARIABLE_BYTES, pattern=NO_NUL)]


class Variable(TypedDict):
    """A variable of a project, without its value."""

    name: str
    changed: str
    changed_by: str


class UnreadableError(Exception):
    """The secret key of the board changed after the variables were set."""


def serialize_variables(project: Project) -> list[Variable]:
    return [
        {"name": one.name, "changed": one.changed.isoformat(), "changed_by": one.changed_by}
        for one in project.variables.all()
    ]


def set_variable(project: Project, name: str, value: str, by: str) -> Variable:
    """Set a variable. Raises SpecError."""
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
        size, rest = len(value.encode()), sum(map(_get_size, others.values()))
        if size > MAX_VARIABLE_BYTES or size + rest > MAX_VARIABLES_TOTAL_BYTES:
            words = (
                f"The value has {size:,} bytes, and the other variables have {rest:,}. "
                f"Use at most {MAX_VARIABLE_BYTES:,} bytes per value, and {MAX_VARIABLES_TOTAL_BYTES:,} in total."
            )
            raise SpecError([Problem("value", words)])
        made, _ = ProjectVariable.objects.update_or_create(
            project=project,
            name=name,
            defaults={"sealed": get_cipher(PURPOSE).encrypt(value.encode()).decode(), "changed_by": by},
        )
        record(by, "set variable", "project", project.name, after={"variable": name})
    return {"name": made.name, "changed": made.changed.isoformat(), "changed_by": made.changed_by}


def remove_variable(project: Project, name: str, by: str) -> bool:
    """Remove a variable. Return whether it existed."""
    with transaction.atomic():
        removed, _ = project.variables.filter(name=name).delete()
        if removed:
            record(by, "remove variable", "project", project.name, before={"variable": name})
    return bool(removed)


def encrypt_for_host(member: Member, job: Job) -> list[str]:
    """Encrypt the variables of a job for the host of a member. Raises UnreadableError.

    Returns nothing if the owner of the job may no longer submit to the project.
    """
    found = ProjectVariable.objects.filter(project__name=job.project).values_list("name", "sealed")
    if not found or member.host is None or not may_submit_to(job.owner, job.project):
        return []
    values = {name: _decrypt(sealed) for name, sealed in found}
    keys = [bytes.fromhex(key) for key in derive_signing_keys(member.host.name, member.host.generation)]
    return encrypt_variables(keys, job.id, job.attempt, values)


def _get_size(sealed: str) -> int:
    try:
        return len(_decrypt(sealed).encode())
    except UnreadableError:
        return 0  # an unreadable value must not block changes of other variables


def _decrypt(sealed: str) -> str:
    try:
        return get_cipher(PURPOSE).decrypt(sealed).decode()
    except InvalidToken:
        raise UnreadableError(
            "the project variables were encrypted with an old secret key. Set the variables again"
        ) from None


def get_cipher(purpose: str) -> MultiFernet:
    """Return a cipher for a purpose. The newest secret key encrypts, and older keys still decrypt."""
    keys = [
        salted_hmac(f"meshboard.{purpose}", "board", secret, algorithm="sha256").digest()
        for secret in (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)
    ]
    return MultiFernet([Fernet(base64.urlsafe_b64encode(key)) for key in keys])
