"""The page Notifications, the email at the end of a job, and the pages of webhooks."""

from __future__ import annotations

import json
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from jobs.core.access import find_job, may_administer
from jobs.core.errors import NotFoundError
from jobs.core.filters import get_list_page
from jobs.core.text import is_storable
from jobs.models import TERMINAL, Delivery, Outcome, Status
from jobs.pages.view_helpers import get_user, join_sentences, render_secret
from jobs.people.notifications import email_settings, webhooks
from jobs.people.notifications.email_settings import (
    OWN_JOBS,
    get_project_settings,
    get_sorted_projects,
    replace_email_settings,
)
from jobs.people.notifications.outbox import get_silent_reason
from jobs.people.notifications.webhook_transport import get_secret
from jobs.planning.schemas import validate_request
from planner.facts.validation import SpecError

PROJECTS_PER_PAGE = 20
DELIVERIES_PER_PAGE = 50
FIELD_PREFIX = "project:"  # followed by the project name, which is empty for the jobs of the user
TONES = {Outcome.WAITING: "info", Outcome.DELIVERED: "good", Outcome.GIVEN_UP: "bad"}


@require_POST
def end_mail(request: HttpRequest, job_id: str) -> HttpResponse:
    """Request an email at the end of the job, or cancel the request with `forget`. Redirect to the job."""
    user, job = get_user(request), find_job(request.user, job_id)
    try:
        if "forget" in request.POST:
            email_settings.cancel_end_email(user, job)
        else:
            email_settings.request_end_email(user, job)
    except email_settings.NoMailError as error:
        messages.info(request, f"Email is off: {error}")
    return redirect("job-detail", job.id)


@require_http_methods(["GET", "POST"])
def notifications(request: HttpRequest) -> HttpResponse:
    """Show the form, and save the choices for the projects on this page."""
    user = get_user(request)
    if request.method == "POST":
        choices = {
            name.removeprefix(FIELD_PREFIX): request.POST.getlist(name)
            for name in request.POST
            if name.startswith(FIELD_PREFIX)
        }
        try:
            replace_email_settings(user, choices, of=request.POST.getlist("shown"))
            messages.success(request, "Notifications saved.")
        except SpecError as error:
            messages.error(request, " ".join(problem.message for problem in error.problems))
        return redirect(f"{reverse('notifications')}?{request.GET.urlencode()}")
    found = get_list_page(request, get_sorted_projects(user), "name", size=PROJECTS_PER_PAGE)
    projects = [project.name for project in found.page]
    context = {
        "listed": found,
        "wishes": get_project_settings(user, [OWN_JOBS, *projects]),
        "states": Status.values,
        "field": FIELD_PREFIX,
        "projects": projects,
        "mails": bool(settings.EMAIL_HOST),
    }
    return render(request, "notifications/notifications.html", context)


@require_GET
def list_webhooks(request: HttpRequest, project: str) -> HttpResponse:
    """Show your webhooks of a project, or all for an admin. `?job=` opens the form for the end of this job."""
    webhooks.check_webhook_project(request.user, project)
    context = {
        "project": project,
        "hooks": webhooks.serialize_webhooks(webhooks.get_visible_webhooks(request.user, project)),
        "states": Status.values,
        "may_administer": may_administer(request.user, project),
        "drafted": {"job": job, "states": TERMINAL} if (job := request.GET.get("job", "")[:16]) else None,
    }
    return render(request, "notifications/webhooks.html", context)


@require_POST
def make(request: HttpRequest, project: str) -> HttpResponse:
    """Create a webhook and show its secret."""
    webhooks.check_webhook_project(request.user, project)
    try:
        hook = webhooks.create_webhook(
            get_user(request), project, validate_request(webhooks.WebhookRequest, _read_form(request.POST))
        )
    except SpecError as error:
        messages.error(request, join_sentences(error))
        return redirect("webhooks", project)
    return render_secret(request, "notifications/secret.html", {"hook": hook, "secret": get_secret(hook)})


@require_GET
def webhook(request: HttpRequest, project: str, key: str) -> HttpResponse:
    """Show a webhook and its log. `?part=log` returns only the log."""
    hook = webhooks.find_webhook(request.user, project, key)
    page = Paginator(hook.deliveries.order_by("-id"), DELIVERIES_PER_PAGE).get_page(request.GET.get("page"))
    context: dict[str, Any] = {
        "hook": hook,
        "silent": get_silent_reason(hook),
        "page": page,
        "lines": [_format_delivery(delivery) for delivery in page],
        "states": Status.values,
        "may_administer": may_administer(hook.owner, project),
    }
    part = request.GET.get("part") == "log"
    return render(request, "notifications/log.html" if part else "notifications/webhook.html", context)


@require_POST
def change(request: HttpRequest, project: str, key: str) -> HttpResponse:
    """Save the form. With only `active`, pause or resume the webhook."""
    hook = webhooks.find_webhook(request.user, project, key)
    only_active = "active" in request.POST and "name" not in request.POST
    data = {"active": request.POST["active"] == "true"} if only_active else _read_form(request.POST)
    try:
        webhooks.change_webhook(get_user(request), hook, validate_request(webhooks.WebhookChange, data))
    except SpecError as error:
        messages.error(request, join_sentences(error))
    return redirect("webhook", project, key)


@require_POST
def rotate(request: HttpRequest, project: str, key: str) -> HttpResponse:
    """Create a new secret and show it."""
    hook = webhooks.find_webhook(request.user, project, key)
    webhooks.rotate_secret(get_user(request), hook)
    return render_secret(request, "notifications/secret.html", {"hook": hook, "secret": get_secret(hook)})


@require_POST
def ping(request: HttpRequest, project: str, key: str) -> HttpResponse:
    """Send a ping. The log shows the result."""
    if webhooks.send_ping(get_user(request), webhooks.find_webhook(request.user, project, key)) is None:
        messages.warning(request, "A ping is already being sent.")
    return redirect("webhook", project, key)


@require_POST
def redeliver(request: HttpRequest, project: str, key: str, delivery: str) -> HttpResponse:
    """Send a message again."""
    hook = webhooks.find_webhook(request.user, project, key)
    found = Delivery.objects.filter(webhook=hook, key=delivery).first() if is_storable(delivery) else None
    if found is None:
        raise NotFoundError("delivery")
    if not webhooks.redeliver(get_user(request), hook, found):
        messages.warning(request, "The delivery is already scheduled.")
    return redirect("webhook", project, key)


@require_http_methods(["GET", "POST"])
def delete(request: HttpRequest, project: str, key: str) -> HttpResponse:
    """Ask for confirmation, then delete the webhook."""
    hook = webhooks.find_webhook(request.user, project, key)
    if request.method == "GET":
        return render(request, "notifications/delete.html", {"hook": hook})
    webhooks.delete_webhook(get_user(request), hook)
    return redirect("webhooks", project)


def _format_delivery(delivery: Delivery) -> dict[str, Any]:
    message = json.loads(delivery.body)
    return {
        "delivery": delivery,
        "tone": TONES[Outcome(delivery.outcome)],
        "job": message["job"],
        "last": delivery.tries[-1] if delivery.tries else None,
        "body": json.dumps(message, indent=2, ensure_ascii=False),
    }


def _read_form(posted: QueryDict) -> dict[str, Any]:
    return {
        "name": posted.get("name", "").strip(),
        "url": posted.get("url", "").strip(),
        "states": posted.getlist("states"),
        "job": posted.get("job", "").strip(),
        "everybody": "everybody" in posted,
    }
