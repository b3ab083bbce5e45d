"""Create, mail, and accept invitations to projects."""

from __future__ import annotations

import hashlib
import secrets
from datetime import timedelta
from typing import Annotated, Any

from django.conf import settings
from django.contrib.auth.forms import UserCreationForm
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.core.validators import RegexValidator, validate_email
from django.db import IntegrityError, transaction
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils import timezone
from django.utils.http import urlencode
from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from jobs.core.access import get_role
from jobs.core.audit import record
from jobs.models import Invitation, Membership, Project, Role
from jobs.models.notifications import make_delivery_key
from jobs.models.validators import Note
from jobs.people.notifications.mail import Mail, send_mail
from jobs.people.projects import RoleName, check_members
from planner.facts.validation import NO_NUL, Problem, SpecError, StrictModel

PREFIX = "mbi_"
MAX_OPEN_INVITATIONS = 200  # per project


def _validate_mail_address(text: str) -> str:
    try:
        validate_email(text)
    except ValidationError:
        raise ValueError("`email` is not a mail address. Use an address such as ann@example.com.") from None
    return text


MailAddress = Annotated[
    str, Field(max_length=254, json_schema_extra={"format": "email"}), AfterValidator(_validate_mail_address)
]


class InvitationRequest(StrictModel):
    """A new invitation."""

    role: RoleName
    days: int = Field(default=7, ge=1, le=90, description="Days until the invitation expires.")
    note: Note = Field(default="", description="Note about the invited person, for other admins.")
    email: MailAddress | None = Field(
        default=None,
        description="Mail address of the only account that can use the invitation. null: any account.",
    )


class AcceptRequest(StrictModel):
    """Token from the link of an invitation."""

    token: Annotated[str, Field(min_length=1, max_length=200, pattern=NO_NUL)]


class InvitationDetail(TypedDict):
    id: int
    role: str
    note: str
    email: str | None
    created_by: str
    expires: str


class NewInvitation(InvitationDetail):
    """A new invitation with its link, which is shown once."""

    token: str
    url: str
    mailed: Annotated[
        str | None,
        Field(description="Result of the invitation mail, as a sentence. null if no mail was sent."),
    ]


# Names of new accounts exclude look-alike letters of other scripts and formulas of spreadsheets.
USERNAME_PATTERN = r"\A[A-Za-z0-9][A-Za-z0-9_.-]*\Z"
USERNAME_HELP = "Use only letters (a to z), digits, and _ . - characters. Start with a letter or digit."


class NotInvitedError(Exception):
    """The invitation does not exist, is no longer valid, or is for another account. The text says which."""


class AccountForm(UserCreationForm):  # type: ignore[type-arg]  # Django's forms take no parameters at run time
    """Form with which an invited user creates an account."""

    class Meta:
        model = User
        fields = ("username",)

    def __init__(self, invitation: Invitation, *data: Any) -> None:
        super().__init__(*data)
        self.fields["username"].validators.append(RegexValidator(USERNAME_PATTERN, USERNAME_HELP))
        self.fields["username"].help_text = USERNAME_HELP
        self.instance.email = invitation.email

    def clean(self) -> dict[str, Any] | None:
        email = self.instance.email
        if email and User.objects.filter(email__iexact=email).exists():
            raise ValidationError(f"An account with the mail address {email} already exists. Log in to this account.")
        return super().clean()


def get_open_invitations(project: Project) -> QuerySet[Invitation]:
    """Return the invitations that can still be accepted."""
    return project.invitations.filter(_open_filter())


def serialize_invitation(invitation: Invitation) -> InvitationDetail:
    return {
        "id": invitation.pk,
        "role": invitation.get_role_display(),
        "note": invitation.note,
        "email": invitation.email or None,
        "created_by": invitation.created_by,
        "expires": invitation.expires.isoformat(),
    }


def create_invitation(project: Project, invitation_request: InvitationRequest, by: str) -> tuple[Invitation, str]:
    """Create an invitation and return it with its token, which is shown once. Raises SpecError."""
    check_members(project)
    text = PREFIX + secrets.token_urlsafe(32)
    with transaction.atomic():
        Project.objects.select_for_update(no_key=True).get(pk=project.pk)  # serializes concurrent requests
        if get_open_invitations(project).count() >= MAX_OPEN_INVITATIONS:
            raise SpecError(
                [
                    Problem(
                        "role",
                        f"The project has {MAX_OPEN_INVITATIONS} open invitations, the maximum. Revoke one first.",
                    )
                ]
            )
        made = Invitation.objects.create(
            project=project,
            role=Role[invitation_request.role.upper()],
            hash=_digest(text),
            note=invitation_request.note,
            email=invitation_request.email or "",
            created_by=by,
            expires=timezone.now() + timedelta(days=invitation_request.days),
        )
        after = {
            "role": invitation_request.role,
            "note": invitation_request.note,
            "email": invitation_request.email,
            "id": made.pk,
        }
        record(by, "invite", "project", project.name, after=after)
    return made, text


def revoke_invitation(project: Project, number: int, by: str) -> bool:
    """Revoke an open invitation. Return whether it was open."""
    with transaction.atomic():
        done = get_open_invitations(project).filter(pk=number).update(revoked=timezone.now())
        if done:
            record(by, "revoke invitation", "project", project.name, before={"id": number})
    return bool(done)


def find_invitation(text: str) -> Invitation:
    """Return the open invitation of a token, or raise NotInvitedError."""
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


def check_recipient(invitation: Invitation, user: User) -> None:
    """Raise NotInvitedError if the invitation is for another mail address."""
    if invitation.email and invitation.email.casefold() != user.email.casefold():
        raise NotInvitedError(
            f"This invitation is not for the mail address of user {user.get_username()}. "
            "Log in with the invited account."
        )


def accept_invitation(user: User, text: str) -> Membership:
    """Make the user a member. A member with a higher role keeps it. Raises NotInvitedError."""
    invitation = find_invitation(text)
    check_recipient(invitation, user)
    with transaction.atomic():
        _claim_invitation(invitation, user)
        return _add_member(invitation, user)


def create_account(form: AccountForm, invitation: Invitation) -> User | None:
    """Create the account of a valid form and make it a member. Raises NotInvitedError.

    Returns None and adds an error to the form if the name is taken.
    """
    user: User = form.save(commit=False)  # hashes the password before the transaction
    name = user.get_username()
    try:
        with transaction.atomic():
            _claim_invitation(invitation, user)
            user.save()
            record(name, "make account", "user", name, after={"invitation": invitation.pk, "email": user.email})
            _add_member(invitation, user)
    except IntegrityError:
        form.add_error("username", "A user with that username already exists.")
        return None
    return user


def _claim_invitation(invitation: Invitation, user: User) -> None:
    taken = Invitation.objects.filter(_open_filter(), pk=invitation.pk)
    if taken.update(accepted=timezone.now(), accepted_by=user.get_username()) != 1:
        raise NotInvitedError("Another person used this invitation first. Ask for a new invitation.")


def _add_member(invitation: Invitation, user: User) -> Membership:
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


def _open_filter() -> Q:
    return Q(accepted=None, revoked=None, expires__gt=timezone.now())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


MAX_INVITATIONS_PER_HOUR = 50  # per project, against spam


def mail_invitation(invitation: Invitation, text: str) -> str | None:
    """Mail the link and return the result as a sentence. Returns None if no mail is sent.

    Waits for the mail server, because the token is not stored.
    """
    if not invitation.email or not settings.EMAIL_HOST:
        return None
    project, address = invitation.project, invitation.email
    hour = timezone.now() - timedelta(hours=1)
    if project.invitations.filter(created__gt=hour).exclude(email="").count() > MAX_INVITATIONS_PER_HOUR:
        return (
            f"The invitation was not mailed to {address}. "
            f"Project {project.name} has reached the limit of {MAX_INVITATIONS_PER_HOUR} invitations per hour."
        )
    lines = [
        f"{invitation.created_by} invites you to project {project.name} as {invitation.get_role_display()}.",
        "",
        settings.BOARD_URL + get_invitation_path(text),
        "",
        f"The link is only for you, works once, and expires at {invitation.expires:%Y-%m-%d %H:%M} UTC.",
    ]
    went = send_mail(Mail(address, f"Invitation to project {project.name}", "\n".join(lines), make_delivery_key()))
    if went.delivered:
        return f"The invitation was mailed to {address}."
    return f"The invitation was not mailed to {address}. {went.words}"


def get_invitation_path(text: str) -> str:
    """Return the address of the page that accepts the invitation with this token."""
    return f"{reverse('invitation')}?{urlencode({'token': text})}"


def get_invitation_url(request: HttpRequest, text: str) -> str:
    """Return the full address. The token is in the query, because no log contains queries."""
    return request.build_absolute_uri(get_invitation_path(text))
