"""Helpers that several views share: the user, refused requests, secrets, and forms that start a job."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, cast

from django.contrib import messages
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render

from jobs.api.errors import RETRY_LATER, make_page_problem_response
from jobs.api.problems import build_request_problem
from jobs.core.access import may_change_all_jobs
from jobs.models import Job
from jobs.planning.planner_processes import BusyError
from jobs.queue import actions
from planner.facts.validation import SpecError

FORM_KEY_FIELD = "form_key"  # created with the page by `{% form_key %}`

P = ParamSpec("P")


def get_user(request: HttpRequest) -> User:
    return cast(User, request.user)


def get_username(request: HttpRequest) -> str:
    return get_user(request).get_username()


def require_queue_staff(request: HttpRequest) -> str:
    """Return the name of the user.

    Raises:
        PermissionDenied: The user may not change the queue of all projects.
    """
    if not may_change_all_jobs(request.user):
        raise PermissionDenied("Only staff can change the queue.")
    return get_username(request)


def join_sentences(error: SpecError) -> str:
    """Return all problems as one message."""
    return " ".join(problem.sentence for problem in error.problems)


def join_job_sentences(error: SpecError) -> str:
    """Return the problems of an action on selected jobs as one message."""
    if any(problem.field.startswith("jobs") for problem in error.problems):
        return "Select jobs first."
    return join_sentences(error)


def render_secret(request: HttpRequest, template: str, context: dict[str, Any]) -> HttpResponse:
    """Render a page with a secret, which the browser must not store."""
    response = render(request, template, context)
    response["Cache-Control"] = "no-store"
    return response


def refuse_while_busy(error: BusyError) -> JsonResponse:
    """Return the response with status 503 while the planner is busy."""
    return make_page_problem_response(build_request_problem(503, str(error)), RETRY_LATER)


def catch_busy_planner(view: Callable[P, HttpResponse]) -> Callable[P, HttpResponse]:
    """Decorate a view to respond with status 503 while the planner is busy."""

    @wraps(view)
    def respond(*args: P.args, **kwargs: P.kwargs) -> HttpResponse:
        try:
            return view(*args, **kwargs)
        except BusyError as error:
            return refuse_while_busy(error)

    return respond


def submit_once(request: HttpRequest, data: Any, *, check_of: Job | None = None) -> HttpResponse:
    """Queue the job of a form and redirect to it. A repeated form redirects to the job that it started before.

    Args:
        check_of: The run that the job is a reference check of.

    Raises:
        SpecError: See `actions.submit`.
        BusyError: See `actions.submit`.
    """
    key = None
    if form_key := request.POST.get(FORM_KEY_FIELD):
        # A form with other content starts another job.
        content = json.dumps([form_key, data], sort_keys=True)
        key = f"form {hashlib.sha256(content.encode()).hexdigest()}"
    job, queued = actions.submit(get_user(request), data, key=key, check_of=check_of)
    if queued is None:
        messages.info(request, "The form was sent more than once, but only this job was created.")
    return redirect("job-detail", job.id)
