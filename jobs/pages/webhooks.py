"""The pages of the webhooks of a project: list, log, settings, and test messages."""

from __future__ import annotations

import json
from typing import Any, cast

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import User
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from jobs.core.access import may_administer
from jobs.core.errors import MissingError
from jobs.core.text import storable
from jobs.models import TERMINAL, Delivery, Outcome, Status, Webhook
from jobs.people.notifications import hooks
from jobs.people.notifications.outbox import why_silent
from jobs.people.notifications.signing import secret_of
from jobs.planning.queries import checked
from planner.facts.validation import SpecError

PAGE_SIZE = 50
TONES = {Outcome.WAITING: "info", Outcome.DELIVERED: "good", Outcome.GIVEN_UP: "bad"}


@require_GET
@login_required
def webhooks(request: HttpRequest, project: str) -> HttpResponse:
    """Show your webhooks of a project, or all for an admin. `?job=` opens the form for the end of this job."""
    hooks.find_project(request.user, project)
    context = {
        "project": project,
        "hooks": hooks.told(hooks.visible_to(request.user, project)),
        "states": Status.values,
        "may_administer": may_administer(request.user, project),
        "drafted": {"job": job, "states": TERMINAL} if (job := request.GET.get("job", "")[:16]) else None,
    }
    return render(request, "telling/webhooks.html", context)


@require_POST
@login_required
def make(request: HttpRequest, project: str) -> HttpResponse:
    """Create a webhook and show its secret."""
    hooks.find_project(request.user, project)
    try:
        hook = hooks.make(_user(request), project, checked(hooks.WebhookQuery, _asked(request.POST)))
    except SpecError as error:
        messages.error(request, _words(error))
        return redirect("webhooks", project)
    return _secret(request, hook)


@require_GET
@login_required
def webhook(request: HttpRequest, project: str, key: str) -> HttpResponse:
    """Show a webhook and its log. `?part=log` returns only the log."""
    hook = hooks.find(request.user, project, key)
    page = Paginator(hook.deliveries.order_by("-id"), PAGE_SIZE).get_page(request.GET.get("page"))
    context: dict[str, Any] = {
        "hook": hook,
        "silent": why_silent(hook),
        "page": page,
        "lines": [_line(delivery) for delivery in page],
        "states": Status.values,
        "may_administer": may_administer(hook.owner, project),
    }
    part = request.GET.get("part") == "log"
    return render(request, "telling/log.html" if part else "telling/webhook.html", context)


@require_POST
@login_required
def change(request: HttpRequest, project: str, key: str) -> HttpResponse:
    """Save the form. With only `active`, pause or resume the webhook."""
    hook = hooks.find(request.user, project, key)
    only_active = "active" in request.POST and "name" not in request.POST
    data = {"active": request.POST["active"] == "true"} if only_active else _asked(request.POST)
    try:
        hooks.change(_user(request), hook, checked(hooks.WebhookChange, data))
    except SpecError as error:
        messages.error(request, _words(error))
    return redirect("webhook", project, key)


@require_POST
@login_required
def rotate(request: HttpRequest, project: str, key: str) -> HttpResponse:
    """Create a new secret and show it."""
    hook = hooks.find(request.user, project, key)
    hooks.rotate(_user(request), hook)
    return _secret(request, hook)


@require_POST
@login_required
def ping(request: HttpRequest, project: str, key: str) -> HttpResponse:
    """Send a ping. The log shows the result."""
    if hooks.send_ping(_user(request), hooks.find(request.user, project, key)) is None:
        messages.warning(request, "A ping is already being sent.")
    return redirect("webhook", project, key)


@require_POST
@login_required
def redeliver(request: HttpRequest, project: str, key: str, delivery: str) -> HttpResponse:
    """Send a message again."""
    hook = hooks.find(request.user, project, key)
    theirs = Delivery.objects.filter(webhook=hook)
    found = theirs.filter(key=delivery).first() if storable(delivery) else None
    if found is None:
        raise MissingError("delivery")
    if not hooks.redeliver(_user(request), hook, found):
        messages.warning(request, "The delivery is already scheduled.")
    return redirect("webhook", project, key)


@require_http_methods(["GET", "POST"])
@login_required
def delete(request: HttpRequest, project: str, key: str) -> HttpResponse:
    """Ask for confirmation, then delete the webhook."""
    hook = hooks.find(request.user, project, key)
    if request.method == "GET":
        return render(request, "telling/delete.html", {"hook": hook})
    hooks.delete(_user(request), hook)
    return redirect("webhooks", project)


def _line(delivery: Delivery) -> dict[str, Any]:
    told = json.loads(delivery.body)
    return {
        "delivery": delivery,
        "tone": TONES[Outcome(delivery.outcome)],
        "job": told["job"],
        "last": delivery.tries[-1] if delivery.tries else None,
        "body": json.dumps(told, indent=2, ensure_ascii=False),
    }


def _asked(posted: QueryDict) -> dict[str, Any]:
    return {
        "name": posted.get("name", "").strip(),
        "url": posted.get("url", "").strip(),
        "states": posted.getlist("states"),
        "job": posted.get("job", "").strip(),
        "everybody": "everybody" in posted,
    }


def _secret(request: HttpRequest, hook: Webhook) -> HttpResponse:
    answer = render(request, "telling/secret.html", {"hook": hook, "secret": secret_of(hook)})
    answer["Cache-Control"] = "no-store"
    return answer


def _user(request: HttpRequest) -> User:
    return cast(User, request.user)


def _words(error: SpecError) -> str:
    return " ".join(problem.sentence for problem in error.problems)
