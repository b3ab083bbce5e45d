"""What a person is mailed of, and where webhooks are."""

from __future__ import annotations

from typing import cast

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods

from jobs.models import DEFAULT_PROJECT, Status
from jobs.telling.wishes import OWN, wish, wishes_of
from planner.facts.spec import SpecError

FIELD = "project:"  # and its name; what is of one's own jobs has none


@require_http_methods(["GET", "POST"])
@login_required
def notifications(request: HttpRequest) -> HttpResponse:
    """The form, and what it saves."""
    user = cast(User, request.user)
    if request.method == "POST":
        given = {
            name.removeprefix(FIELD): request.POST.getlist(name) for name in request.POST if name.startswith(FIELD)
        }
        try:
            wish(user, given)
            messages.success(request, "Saved.")
        except SpecError as error:
            messages.error(request, "; ".join(problem.message for problem in error.problems))
        return redirect("notifications")
    wishes = wishes_of(user)
    projects = [each.project for each in wishes if each.project != OWN]
    context = {
        "wishes": wishes,
        "states": Status.values,
        "field": FIELD,
        "projects": projects if DEFAULT_PROJECT in projects else [DEFAULT_PROJECT, *projects],
        "mails": bool(settings.EMAIL_HOST),
    }
    return render(request, "telling/notifications.html", context)
