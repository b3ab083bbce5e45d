"""Create projects, and change their quotas and members. Each action is one transaction with its audit entry."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import QuerySet
from pydantic import Field
from typing_extensions import TypedDict

from jobs.core.access import get_roles, is_global_admin
from jobs.core.audit import record
from jobs.models import DEFAULT_PROJECT, BaselineRun, Job, MailWish, Membership, Project, Role, Webhook
from planner.facts.validation import Problem, SpecError, StrictModel

RoleName = Literal["viewer", "submitter", "operator", "admin"]
MAX_SLOTS = 2**31 - 1
JOBS_REMAIN = "Jobs of a deleted project with the same name still exist. Use another name."


class ProjectRequest(StrictModel):
    """A new project."""

    name: Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._=-]*$")]
    slots: int | None = Field(
        default=None, ge=0, le=MAX_SLOTS, description="Slot quota of the project. null: unlimited."
    )


class ProjectChange(StrictModel):
    """Settings that project admins may change."""

    own_slots: int | None = Field(
        ge=0,
        le=MAX_SLOTS,
        description="Slot limit of the project, at most the quota that staff set. null: no limit except the quota.",
    )


class RoleRequest(StrictModel):
    """Role of a member."""

    role: RoleName


class ProjectDetail(TypedDict):
    """A project, and the role of the user in it."""

    name: str
    role: str | None
    slots: int | None
    own_slots: int | None
    weight: float


class MemberDetail(TypedDict):
    user: str
    role: str
    added: str
    added_by: str


def serialize_project(project: Project, user: Any) -> ProjectDetail:
    [one] = serialize_projects([project], user)
    return one


def serialize_projects(projects: Iterable[Project], user: Any) -> list[ProjectDetail]:
    found = list(projects)
    roles = get_roles(user, [project.name for project in found])
    return [
        {
            "name": project.name,
            "role": role.label if (role := roles[project.name]) is not None else None,
            "slots": project.slots,
            "own_slots": project.own_slots,
            "weight": project.weight,
        }
        for project in found
    ]


def has_jobs(name: str) -> bool:
    """Return whether jobs name this project, which may have been deleted."""
    return Job.objects.filter(project=name).exists()


def create_project(project_request: ProjectRequest, by: str) -> Project:
    """Create a project. Raises SpecError if the name exists or jobs of a deleted project have it."""
    with transaction.atomic():
        project, is_new = Project.objects.get_or_create(
            name=project_request.name, defaults={"slots": project_request.slots}
        )
        if not is_new:
            raise SpecError([Problem("name", f"Project {project_request.name!r} already exists. Use another name.")])
        if has_jobs(project_request.name):
            raise SpecError([Problem("name", JOBS_REMAIN)])
        delete_project_data(project_request.name)
        record(by, "add", "project", project.name, after={"slots": project_request.slots})
    return project


def delete_project_data(name: str) -> None:
    """Delete the baselines, email settings, and webhooks of a project name, which may be used again."""
    for kind in (BaselineRun, MailWish, Webhook):
        kind.objects.filter(project=name).delete()


def set_own_slots(project: Project, own_slots: int | None, by: str) -> None:
    """Set the slot limit of the project admins. Raises SpecError if it exceeds the quota of staff."""
    if own_slots is not None and project.slots is not None and own_slots > project.slots:
        raise SpecError(
            [
                Problem(
                    "own_slots",
                    f"`own_slots` is {own_slots}, "
                    f"but the quota that staff set is {project.slots}. Use {project.slots} or less.",
                )
            ]
        )
    with transaction.atomic():
        before = Project.objects.values_list("own_slots", flat=True).get(pk=project.pk)
        if before != own_slots:
            Project.objects.filter(pk=project.pk).update(own_slots=own_slots)
            record(by, "own slots", "project", project.name, before, own_slots)


def get_memberships(project: Project) -> QuerySet[Membership]:
    return project.memberships.select_related("user")


def serialize_members(project: Project) -> list[MemberDetail]:
    return [serialize_member(one) for one in get_memberships(project)]


def serialize_member(one: Membership) -> MemberDetail:
    return {
        "user": one.user.get_username(),
        "role": one.get_role_display(),
        "added": one.added.isoformat(),
        "added_by": one.added_by,
    }


def set_role(project: Project, username: str, role: Role, by: User) -> None:
    """Set the role of a member. Staff can also add members. Raises SpecError."""
    check_members(project)
    with transaction.atomic():
        Project.objects.select_for_update(no_key=True).get(pk=project.pk)  # two who add the same member
        if role != Role.ADMIN:
            _check_admins(project, username, by, "role")
        found = project.memberships.select_for_update().filter(user__username=username).first()
        before = found.get_role_display() if found else None
        if found is not None:
            Membership.objects.filter(pk=found.pk).update(role=role)
        else:
            user = User.objects.filter(username=username, is_active=True).first() if by.is_staff else None
            if user is None:
                raise SpecError([Problem("user", _no_member(project, username[:150], by))])
            Membership.objects.create(project=project, user=user, role=role, added_by=by.get_username())
        if before != role.label:
            after = {"user": username, "role": role.label}
            record(by.get_username(), "member", "project", project.name, before and {"role": before}, after)


def _no_member(project: Project, username: str, by: User) -> str:
    if by.is_staff:
        return f"No active account is named {username!r}. Check the spelling, or invite the person."
    return f"User {username!r} is not a member of project {project.name}. Invite this user."


def remove_member(project: Project, username: str, by: User) -> bool:
    """Remove a member. Return whether there was one. Raises SpecError for the only admin.

    The member still sees and can cancel own jobs in the project, but cannot submit jobs to it.
    """
    with transaction.atomic():
        _check_admins(project, username, by, "user")
        removed, _ = project.memberships.filter(user__username=username).delete()
        if removed:
            record(by.get_username(), "remove member", "project", project.name, before={"user": username})
    return bool(removed)


def _check_admins(project: Project, without: str, by: User, field: str) -> None:
    """Raise SpecError if no active admin is left without this user. Staff may leave a project without admins."""
    if is_global_admin(by):
        return
    # All of them, in one order: of two who remove each other at once, the second finds the first gone.
    admins = project.memberships.select_for_update(of=("self",)).filter(role=Role.ADMIN).select_related("user")
    if [one.user.get_username() for one in admins.order_by("pk") if one.user.is_active] == [without]:
        words = f"User {without} is the only admin of project {project.name}. Make another member an admin first."
        raise SpecError([Problem(field, words)])


def check_members(project: Project) -> None:
    """Raise SpecError if the project cannot have members."""
    if project.name == DEFAULT_PROJECT:
        raise SpecError(
            [Problem("project", f"Project {DEFAULT_PROJECT} is open to all users, so no members can be added.")]
        )
