"""The page Notifications and the email request of one job."""

from __future__ import annotations

from typing import cast

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_POST

from jobs.core.access import find_job
from jobs.core.pagination import listed
from jobs.models import Status
from jobs.people.notifications import ends
from jobs.people.notifications.wishes import OWN, projects_of, wish, wishes_for
from planner.facts.validation import SpecError

PAGE_SIZE = 20  # projects per page
FIELD = "project:"  # prefix of the project name, empty name for own jobs


@require_POST
@login_required
def end_mail(request: HttpRequest, job_id: str) -> HttpResponse:
    """Request an email at the end of the job, or cancel the request with `forget`. Redirect to the job."""
    user, job = cast(User, request.user), find_job(request.user, job_id)
    try:
        if "forget" in request.POST:
            ends.forget(user, job)
        else:
            ends.ask(user, job)
    except ends.NoMailError as error:
        messages.info(request, f"Email is off: {error}")
    return redirect("job-detail", job.id)


@require_http_methods(["GET", "POST"])
@login_required
def notifications(request: HttpRequest) -> HttpResponse:
    """Show the form, and save the choices for the projects on this page."""
    user = cast(User, request.user)
    if request.method == "POST":
        given = {
            name.removeprefix(FIELD): request.POST.getlist(name) for name in request.POST if name.startswith(FIELD)
        }
        try:
            wish(user, given, of=request.POST.getlist("shown"))
            messages.success(request, "Notifications saved.")
        except SpecError as error:
            messages.error(request, " ".join(problem.message for problem in error.problems))
        return redirect(f"{reverse('notifications')}?{request.GET.urlencode()}")
    found = listed(request, projects_of(user), "name", size=PAGE_SIZE)
    projects = [project.name for project in found.page]
    context = {
        "listed": found,
        "wishes": wishes_for(user, [OWN, *projects]),
        "states": Status.values,
        "field": FIELD,
        "projects": projects,
        "mails": bool(settings.EMAIL_HOST),
    }
    return render(request, "telling/notifications.html", context)
