"""The link of an invitation with a mail address, mailed there where the board sends mail."""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings
from django.http import HttpRequest
from django.urls import reverse
from django.utils import timezone
from django.utils.http import urlencode

from jobs.models import Invitation
from jobs.models.notifications import make_delivery_key
from jobs.people.notifications.mail import Mail, send

MOST_AN_HOUR = 50  # of a project: whoever may invite shall not write to strangers through the board


def mail(invitation: Invitation, text: str) -> str | None:
    """What became of the mail, in words; None where there is none to send. `text`: what it is accepted with. Waits for
    the mail server: the board does not keep the text to send it later."""
    if not invitation.email or not settings.EMAIL_HOST:
        return None
    project, address = invitation.project, invitation.email
    hour = timezone.now() - timedelta(hours=1)
    if project.invitations.filter(created__gt=hour).exclude(email="").count() > MOST_AN_HOUR:
        return (
            f"The invitation was not mailed to {address}. "
            f"Project {project.name} has reached the limit of {MOST_AN_HOUR} invitations per hour."
        )
    lines = [
        f"{invitation.created_by} invites you to project {project.name} as {invitation.get_role_display()}.",
        "",
        settings.BOARD_URL + get_invitation_path(text),
        "",
        f"The link is only for you, works once, and expires at {invitation.expires:%Y-%m-%d %H:%M} UTC.",
    ]
    went = send(Mail(address, f"Invitation to project {project.name}", "\n".join(lines), make_delivery_key()))
    if went.delivered:
        return f"The invitation was mailed to {address}."
    return f"The invitation was not mailed to {address}. {went.words}"


def get_invitation_path(text: str) -> str:
    """Return the address of the page that accepts the invitation with this token."""
    return f"{reverse('invitation')}?{urlencode({'token': text})}"


def get_invitation_url(request: HttpRequest, text: str) -> str:
    """Return the full address. The token is in the query, because no log contains queries."""
    return request.build_absolute_uri(get_invitation_path(text))
