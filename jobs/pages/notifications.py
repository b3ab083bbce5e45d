"""What a person is mailed of, of one job too, and where webhooks are."""

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

from jobs.access import find_job
from jobs.lists import listed
from jobs.models import Status
from jobs.telling import ends
from jobs.telling.wishes import OWN, projects_of, wish, wishes_for
from planner.facts.spec import SpecError

PAGE_SIZE = 20  # projects, each with every state
FIELD = "project:"  # and its name; what is of one's own jobs has none


@require_POST
@login_required
def end_mail(request: HttpRequest, job_id: str) -> HttpResponse:
    """Ask to be mailed when the job has ended, or with `forget` not to be; then back to it."""
    user, job = cast(User, request.user), find_job(request.user, job_id)
    try:
        if "forget" in request.POST:
            ends.forget(user, job)
        else:
            ends.ask(user, job)
    except ends.NoMailError as error:
        messages.info(request, f"No mail will come: {error}.")
    return redirect("job-detail", job.id)


@require_http_methods(["GET", "POST"])
@login_required
def notifications(request: HttpRequest) -> HttpResponse:
    """The form, and what it saves: of the projects that it shows alone."""
    user = cast(User, request.user)
    if request.method == "POST":
        given = {
            name.removeprefix(FIELD): request.POST.getlist(name) for name in request.POST if name.startswith(FIELD)
        }
        try:
            wish(user, given, of=request.POST.getlist("shown"))
            messages.success(request, "Saved.")
        except SpecError as error:
            messages.error(request, "; ".join(problem.message for problem in error.problems))
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
