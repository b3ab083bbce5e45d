"""Where an invitation's link leads: whoever is logged in is asked, whoever is not makes an account or logs in."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib import messages
from django.contrib.auth import login
from django.contrib.auth.decorators import login_not_required
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.http import urlencode
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods

from jobs.models import Invitation
from jobs.people import invitations
from jobs.people.invitation_mail import get_invitation_path

BY_PASSWORD = "django.contrib.auth.backends.ModelBackend"  # noqa: S105 - what a session says it was begun with


@sensitive_post_parameters("password1", "password2")
@login_not_required
@require_http_methods(["GET", "POST"])
@never_cache
def invitation(request: HttpRequest) -> HttpResponse:
    """Asks first: a link that somebody was sent makes them nothing unasked."""
    text = request.GET.get("token", "")
    try:
        found = invitations.find(text)
        user = request.user
        answer = _asked(request, user, found, text) if isinstance(user, User) else _welcomed(request, found, text)
    except invitations.NotInvitedError as error:
        answer = render(request, "people/invitation.html", {"problem": str(error)}, status=404)
    # Not `no-referrer`: a form of such a page is sent from the origin `null`, which is refused as forged.
    answer["Referrer-Policy"] = "strict-origin"
    return answer


def _asked(request: HttpRequest, user: User, found: Invitation, text: str) -> HttpResponse:
    invitations.check_whose(found, user)
    if request.method != "POST":
        return render(request, "people/invitation.html", {"invitation": found})
    made = invitations.accept(user, text)
    messages.success(request, f"You joined project {made.project.name} with the role {made.get_role_display()}.")
    return redirect("project", made.project.name)


def _welcomed(request: HttpRequest, found: Invitation, text: str) -> HttpResponse:
    login_url = f"{reverse('login')}?{urlencode({'next': get_invitation_path(text)})}"
    if not settings.INVITED_PEOPLE:
        return render(request, "people/invitation.html", {"invitation": found, "login_url": login_url})
    form: Any = invitations.AccountForm(found, *([request.POST] if request.method == "POST" else []))
    user = invitations.make_account(form, found) if form.is_valid() else None
    if user is None:
        context = {"invitation": found, "form": form, "login_url": login_url}
        return render(request, "people/invitation.html", context, status=422 if form.is_bound else 200)
    login(request, user, backend=BY_PASSWORD)
    messages.success(
        request,
        f"Your account is ready. You joined project {found.project.name} with the role {found.get_role_display()}.",
    )
    return redirect("project", found.project.name)
