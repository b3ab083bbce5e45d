"""Invitations: links that make somebody a member of a project, once, and an account for whoever has none."""

from __future__ import annotations

import hashlib
import secrets
from datetime import timedelta
from typing import Annotated, Any

from django.contrib.auth.forms import UserCreationForm
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.core.validators import RegexValidator, validate_email
from django.db import IntegrityError, transaction
from django.db.models import Q, QuerySet
from django.utils import timezone
from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from jobs.core.access import get_role
from jobs.core.audit import record
from jobs.models import Invitation, Membership, Project, Role
from jobs.models.validators import Note
from jobs.people.projects import RoleName, check_members
from planner.facts.validation import NO_NUL, Problem, SpecError, StrictModel

PREFIX = "mbi_"
MOST_INVITATIONS = 200  # of a project, that may still be accepted


def _mail_address(text: str) -> str:
    """
    Raises:
        ValueError: it is none.
    """
    try:
        validate_email(text)
    except ValidationError:
        raise ValueError("`email` is not a mail address. Use an address such as ann@example.com.") from None
    return text


MailAddress = Annotated[
    str, Field(max_length=254, json_schema_extra={"format": "email"}), AfterValidator(_mail_address)
]


class InvitationRequest(StrictModel):
    """Whom a link makes what."""

    role: RoleName
    days: int = Field(default=7, ge=1, le=90, description="Days until the invitation expires.")
    note: Note = Field(default="", description="Note about the invited person, for other admins.")
    email: MailAddress | None = Field(
        default=None,
        description="Mail address of the only account that can use the invitation. null: any account.",
    )


class AcceptRequest(StrictModel):
    """What came with an invitation's link."""

    token: Annotated[str, Field(min_length=1, max_length=200, pattern=NO_NUL)]


class InvitationDetail(TypedDict):
    id: int
    role: str
    note: str
    email: str | None
    created_by: str
    expires: str


class NewInvitation(InvitationDetail):
    """With its link, which nobody is told again."""

    token: str
    url: str
    mailed: Annotated[
        str | None,
        Field(description="Result of the invitation mail, as a sentence. null if no mail was sent."),
    ]


# Of new accounts: no letter of another script that looks like one of these, and nothing that a spreadsheet carries out.
USERNAME = r"\A[A-Za-z0-9][A-Za-z0-9_.-]*\Z"
USERNAME_WORDS = "Use only letters (a to z), digits, and _ . - characters. Start with a letter or digit."


class NotInvitedError(Exception):
    """An invitation is none, was used or revoked, is over, or is another's; in words."""


class AccountForm(UserCreationForm):  # type: ignore[type-arg]  # Django's forms take no parameters at run time
    """Who follows an invitation says how they are called from now on."""

    class Meta:
        model = User
        fields = ("username",)

    def __init__(self, invitation: Invitation, *data: Any) -> None:
        super().__init__(*data)
        self.fields["username"].validators.append(RegexValidator(USERNAME, USERNAME_WORDS))
        self.fields["username"].help_text = USERNAME_WORDS
        self.instance.email = invitation.email

    def clean(self) -> dict[str, Any] | None:
        email = self.instance.email
        if email and User.objects.filter(email__iexact=email).exists():
            raise ValidationError(f"An account with the mail address {email} already exists. Log in to this account.")
        return super().clean()


def still_open(project: Project) -> QuerySet[Invitation]:
    """Those that may still be accepted."""
    return project.invitations.filter(_is_open())


def told(invitation: Invitation) -> InvitationDetail:
    return {
        "id": invitation.pk,
        "role": invitation.get_role_display(),
        "note": invitation.note,
        "email": invitation.email or None,
        "created_by": invitation.created_by,
        "expires": invitation.expires.isoformat(),
    }


def invite(project: Project, asked: InvitationRequest, by: str) -> tuple[Invitation, str]:
    """An invitation, and the text that it is accepted with, which nobody sees again.

    Raises:
        SpecError: one too many, or the project has no members.
    """
    check_members(project)
    text = PREFIX + secrets.token_urlsafe(32)
    with transaction.atomic():
        Project.objects.select_for_update(no_key=True).get(pk=project.pk)  # of several at once each counts those before
        if still_open(project).count() >= MOST_INVITATIONS:
            raise SpecError(
                [
                    Problem(
                        "role", f"The project has {MOST_INVITATIONS} open invitations, the maximum. Revoke one first."
                    )
                ]
            )
        made = Invitation.objects.create(
            project=project,
            role=Role[asked.role.upper()],
            hash=_digest(text),
            note=asked.note,
            email=asked.email or "",
            created_by=by,
            expires=timezone.now() + timedelta(days=asked.days),
        )
        after = {"role": asked.role, "note": asked.note, "email": asked.email, "id": made.pk}
        record(by, "invite", "project", project.name, after=after)
    return made, text


def revoke(project: Project, number: int, by: str) -> bool:
    """True when this call did it."""
    with transaction.atomic():
        done = still_open(project).filter(pk=number).update(revoked=timezone.now())
        if done:
            record(by, "revoke invitation", "project", project.name, before={"id": number})
    return bool(done)


def find(text: str) -> Invitation:
    """
    Raises:
        NotInvitedError: there is none that may still be accepted.
    """
    found = Invitation.objects.filter(hash=_digest(text)).select_related("project").first()
    if found is None:
        raise NotInvitedError("The invitation does not exist. Check that you opened the complete link.")
    if found.accepted:
        raise NotInvitedError("This invitation was used. Ask for a new invitation.")
    if found.revoked:
        raise NotInvitedError("This invitation was revoked. Ask for a new invitation.")
    if found.expires <= timezone.now():
        raise NotInvitedError(
            f"This invitation expired at {found.expires:%Y-%m-%d %H:%M} UTC. Ask for a new invitation."
        )
    maker = User.objects.filter(username=found.created_by).first()
    if maker is None or get_role(maker, found.project.name) != Role.ADMIN:
        raise NotInvitedError(
            "The user who sent this invitation is no longer a project admin. Ask another admin for an invitation."
        )
    return found


def check_whose(invitation: Invitation, user: User) -> None:
    """
    Raises:
        NotInvitedError: it is for a mail address that is not the user's.
    """
    if invitation.email and invitation.email.casefold() != user.email.casefold():
        raise NotInvitedError(
            f"This invitation is not for the mail address of user {user.get_username()}. "
            "Log in with the invited account."
        )


def accept(user: User, text: str) -> Membership:
    """Become a member; who is one already with a higher role keeps it.

    Raises:
        NotInvitedError: there is no such invitation, it is another's, or somebody was first.
    """
    invitation = find(text)
    check_whose(invitation, user)
    with transaction.atomic():
        _take(invitation, user)
        return _join(invitation, user)


def make_account(form: AccountForm, invitation: Invitation) -> User | None:
    """The account that a valid form asks for, a member of the project; None where its name is taken by now, as the form
    then says.

    Raises:
        NotInvitedError: somebody was first.
    """
    user: User = form.save(commit=False)  # hashes the password, before anything is held
    name = user.get_username()
    try:
        with transaction.atomic():
            _take(invitation, user)
            user.save()
            record(name, "make account", "user", name, after={"invitation": invitation.pk, "email": user.email})
            _join(invitation, user)
    except IntegrityError:
        form.add_error("username", "A user with that username already exists.")
        return None
    return user


def _take(invitation: Invitation, user: User) -> None:
    """It is good for one: of several at once the first has it."""
    taken = Invitation.objects.filter(_is_open(), pk=invitation.pk)
    if taken.update(accepted=timezone.now(), accepted_by=user.get_username()) != 1:
        raise NotInvitedError("Another person used this invitation first. Ask for a new invitation.")


def _join(invitation: Invitation, user: User) -> Membership:
    made, is_new = Membership.objects.get_or_create(
        project=invitation.project,
        user=user,
        defaults={"role": invitation.role, "added_by": invitation.created_by},
    )
    if not is_new and made.role < invitation.role:
        Membership.objects.filter(pk=made.pk).update(role=invitation.role)
        made.refresh_from_db()
    name, role = user.get_username(), invitation.get_role_display()
    after = {"user": name, "role": role, "invitation": invitation.pk}
    record(name, "join", "project", invitation.project.name, after=after)
    return made


def _is_open() -> Q:
    return Q(accepted=None, revoked=None, expires__gt=timezone.now())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
