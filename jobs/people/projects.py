"""Projects and who belongs to them: what their admins and staff do, each in one transaction with its audit entry."""

from __future__ import annotations

import hashlib
import secrets
from datetime import timedelta
from typing import Annotated, Any, Literal

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils import timezone
from pydantic import Field
from typing_extensions import TypedDict

from jobs.access import role_in
from jobs.models import DEFAULT_PROJECT, Invitation, Membership, Project, Role
from jobs.queue.audit import record
from planner.facts.spec import NO_NUL, Problem, SpecError, Strict

RoleName = Literal["viewer", "submitter", "operator", "admin"]
PREFIX = "mbi_"
MOST_INVITATIONS = 200  # of a project, that may still be accepted
MOST_SLOTS = 2**31 - 1


class ProjectWish(Strict):
    """A new project."""

    name: Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._=-]*$")]
    slots: int | None = Field(default=None, ge=0, le=MOST_SLOTS, description="that its jobs may hold; null: any number")


class ProjectChange(Strict):
    """What a project's admins may set."""

    own_slots: int | None = Field(
        ge=0,
        le=MOST_SLOTS,
        description="slots that its jobs may hold, at most what staff gave; null: that",
    )


class RoleWish(Strict):
    """What a member may do."""

    role: RoleName


class InvitationWish(Strict):
    """Whom a link makes what."""

    role: RoleName
    days: int = Field(default=7, ge=1, le=90, description="how long it lasts")
    note: str = Field(default="", max_length=200, pattern=NO_NUL, description="whom it is for")


class AcceptWish(Strict):
    """What came with an invitation's link."""

    token: Annotated[str, Field(min_length=1, max_length=200, pattern=NO_NUL)]


class ProjectTold(TypedDict):
    """A project, and what one may do in it."""

    name: str
    role: str | None
    slots: int | None
    own_slots: int | None
    weight: float


class MemberTold(TypedDict):
    user: str
    role: str
    added: str
    added_by: str


class InvitationTold(TypedDict):
    id: int
    role: str
    note: str
    created_by: str
    expires: str


class NewInvitation(InvitationTold):
    """With its link, which nobody is told again."""

    token: str
    url: str


class NotInvitedError(Exception):
    """An invitation is none, was used or revoked, or is over."""


def told(project: Project, user: Any) -> ProjectTold:
    role = role_in(user, project.name)
    return {
        "name": project.name,
        "role": role.label if role is not None else None,
        "slots": project.slots,
        "own_slots": project.own_slots,
        "weight": project.weight,
    }


def make(asked: ProjectWish, by: str) -> Project:
    """
    Raises:
        SpecError: there is one of this name.
    """
    with transaction.atomic():
        project, is_new = Project.objects.get_or_create(name=asked.name, defaults={"slots": asked.slots})
        if not is_new:
            raise SpecError([Problem("name", f"there is a project {asked.name!r} already")])
        record(by, "add", "project", project.name, after={"slots": asked.slots})
    return project


def keep_to(project: Project, own_slots: int | None, by: str) -> None:
    """Set what its admins keep it to.

    Raises:
        SpecError: more than staff gave.
    """
    if own_slots is not None and project.slots is not None and own_slots > project.slots:
        raise SpecError([Problem("own_slots", f"{own_slots}, and staff gave {project.slots}")])
    with transaction.atomic():
        before = Project.objects.values_list("own_slots", flat=True).get(pk=project.pk)
        if before != own_slots:
            Project.objects.filter(pk=project.pk).update(own_slots=own_slots)
            record(by, "own slots", "project", project.name, before, own_slots)


def members(project: Project) -> list[MemberTold]:
    return [
        {
            "user": one.user.get_username(),
            "role": one.get_role_display(),
            "added": one.added.isoformat(),
            "added_by": one.added_by,
        }
        for one in project.memberships.select_related("user")
    ]


def set_role(project: Project, username: str, role: Role, by: User) -> None:
    """Change a member's role; staff make anybody a member, others only whom they invited.

    Raises:
        SpecError: no such member, or the project has none.
    """
    _may_have_members(project)
    with transaction.atomic():
        found = project.memberships.select_for_update().filter(user__username=username).first()
        before = found.get_role_display() if found else None
        if found is not None:
            Membership.objects.filter(pk=found.pk).update(role=role)
        else:
            user = User.objects.filter(username=username, is_active=True).first() if by.is_staff else None
            if user is None:
                raise SpecError([Problem("user", f"{username[:150]!r} is no member of {project.name}: invite them")])
            Membership.objects.create(project=project, user=user, role=role, added_by=by.get_username())
        if before != role.label:
            after = {"user": username, "role": role.label}
            record(by.get_username(), "member", "project", project.name, before and {"role": before}, after)


def remove_member(project: Project, username: str, by: str) -> bool:
    """True when this call did it. What jobs they have there stay; they see and end those, and start none."""
    with transaction.atomic():
        removed, _ = project.memberships.filter(user__username=username).delete()
        if removed:
            record(by, "remove member", "project", project.name, before={"user": username})
    return bool(removed)


def open_invitations(project: Project) -> QuerySet[Invitation]:
    """Those that may still be accepted."""
    return project.invitations.filter(_is_open())


def invitation_told(invitation: Invitation) -> InvitationTold:
    return {
        "id": invitation.pk,
        "role": invitation.get_role_display(),
        "note": invitation.note,
        "created_by": invitation.created_by,
        "expires": invitation.expires.isoformat(),
    }


def invite(project: Project, asked: InvitationWish, by: str) -> tuple[Invitation, str]:
    """An invitation, and the text that it is accepted with, which nobody sees again.

    Raises:
        SpecError: one too many, or the project has no members.
    """
    _may_have_members(project)
    if open_invitations(project).count() >= MOST_INVITATIONS:
        raise SpecError([Problem("role", f"{MOST_INVITATIONS} invitations are open, the most: revoke one")])
    text = PREFIX + secrets.token_urlsafe(32)
    with transaction.atomic():
        made = Invitation.objects.create(
            project=project,
            role=Role[asked.role.upper()],
            hash=_digest(text),
            note=asked.note,
            created_by=by,
            expires=timezone.now() + timedelta(days=asked.days),
        )
        record(by, "invite", "project", project.name, after={"role": asked.role, "note": asked.note, "id": made.pk})
    return made, text


def revoke_invitation(project: Project, number: int, by: str) -> bool:
    """True when this call did it."""
    with transaction.atomic():
        done = open_invitations(project).filter(pk=number).update(revoked=timezone.now())
        if done:
            record(by, "revoke invitation", "project", project.name, before={"id": number})
    return bool(done)


def find_invitation(text: str) -> Invitation:
    """
    Raises:
        NotInvitedError: there is none that may still be accepted.
    """
    found = Invitation.objects.filter(_is_open(), hash=_digest(text)).select_related("project").first()
    if found is None:
        raise NotInvitedError("this invitation is none, was used or revoked, or is over: ask for another")
    return found


def accept(user: User, text: str) -> Membership:
    """Become a member; who is one already with a higher role keeps it.

    Raises:
        NotInvitedError: there is no such invitation, or somebody was first.
    """
    invitation, name = find_invitation(text), user.get_username()
    with transaction.atomic():
        taken = Invitation.objects.filter(_is_open(), pk=invitation.pk)
        if taken.update(accepted=timezone.now(), accepted_by=name) != 1:
            raise NotInvitedError("somebody was first: ask for another invitation")
        made, is_new = Membership.objects.get_or_create(
            project=invitation.project,
            user=user,
            defaults={"role": invitation.role, "added_by": invitation.created_by},
        )
        if not is_new and made.role < invitation.role:
            Membership.objects.filter(pk=made.pk).update(role=invitation.role)
        after = {"user": name, "role": invitation.get_role_display(), "invitation": invitation.pk}
        record(name, "join", "project", invitation.project.name, after=after)
    made.refresh_from_db()
    return made


def _is_open() -> Q:
    return Q(accepted=None, revoked=None, expires__gt=timezone.now())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _may_have_members(project: Project) -> None:
    if project.name == DEFAULT_PROJECT:
        raise SpecError([Problem("project", f"{DEFAULT_PROJECT} is everybody's, and has no members")])
