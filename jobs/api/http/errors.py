"""How a view refuses, and what becomes of an exception in one: problem details, whoever asks and whatever broke."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from typing import Any

from django.core.exceptions import PermissionDenied, SuspiciousOperation
from django.db import InterfaceError, OperationalError
from django.http import Http404, JsonResponse
from rest_framework.permissions import SAFE_METHODS
from rest_framework.response import Response
from rest_framework.views import exception_handler, set_rollback

from jobs.api.http.addressed import parameter_of
from jobs.api.http.parameters import BadParameterError
from jobs.api.http.problems import CONTENT_TYPE, WHOLE, ProblemDetails, Where, details
from jobs.core.errors import DISK_FULL_MESSAGE, NotFoundError, get_request_id, is_disk_full
from jobs.planning.planner_processes import BusyError
from jobs.runs.history.queries.tables import BadQueryError
from planner.facts.validation import Problem, SpecError

log = logging.getLogger(__name__)

RETRY_AFTER_S = 5
LATER: Mapping[str, str] = {"Retry-After": str(RETRY_AFTER_S)}
READS = ("GET", "HEAD")  # what they ask is in the address
AWAY = "The database does not answer."
NOT_KNOWN = (
    f"{AWAY} The change may have been made. Check the object, or repeat the request with the same Idempotency-Key."
)


class RunEndedProblem(ProblemDetails):
    """A refusal to hear a run that is over. `cancel`: whether its ranks are to end."""

    cancel: bool


def refused(body: ProblemDetails, headers: Mapping[str, str] | None = None) -> Response:
    """REST's answer of a refusal."""
    answer = Response(body, status=body["status"], content_type=CONTENT_TYPE)
    for name, value in (headers or {}).items():
        answer[name] = value
    return answer


def refused_page(body: ProblemDetails, headers: Mapping[str, str] | None = None) -> JsonResponse:
    """The same where no view of REST answers: scripts of pages read it."""
    return JsonResponse(body, status=body["status"], content_type=CONTENT_TYPE, headers=dict(headers or {}))


def of_request(status: int, words: str) -> ProblemDetails:
    """Of a request as a whole."""
    return details(status, [Problem(WHOLE, words)])


def failure(path: str, error: BaseException | None = None) -> str:
    """Log a failure of ours under an id that its answer quotes; returns the id."""
    reference = get_request_id() or secrets.token_hex(16)
    log.error("error %s for %s", reference, path, exc_info=error)
    return reference


def _top(body: object) -> Mapping[str, Any]:
    return body if isinstance(body, Mapping) else {}


def failed(reference: str) -> ProblemDetails:
    """Of a 500."""
    return of_request(500, f"Internal error. See {reference} in the server log.")


def handle(error: Exception, context: dict[str, Any]) -> Response:
    """DRF's exception handler: a SpecError is 422, a database away or a disk full 503, what nobody expected 500.

    A view's `places` say where in the body fields stand that do not stand under their own name.
    """
    request, view = context["request"], context["view"]
    if isinstance(error, BadQueryError):
        return refused(details(400, error.problems, "query"))
    if isinstance(error, SpecError):
        where: Where = "query" if request.method in READS else "body"
        problems = error.problems
        if where == "body" and not isinstance(request.data, Mapping):
            problems = [Problem(WHOLE, problem.message) for problem in problems]
        # What stands in the body under its own name is meant there, though something by that name belongs elsewhere.
        places = {name: place for name, place in view.places.items() if name not in _top(request.data)}
        return refused(details(422, problems, where, places, view.of_path))
    if isinstance(error, BadParameterError):
        return refused(details(400, error.problems, error.where))
    if isinstance(error, BusyError):
        return refused(of_request(503, str(error)), LATER)
    if isinstance(error, OperationalError | InterfaceError):
        log.warning("the database did not answer for %s: %s", request.path, error)
        changes = request.method not in SAFE_METHODS  # and may have been committed as the database went away
        return refused(of_request(503, NOT_KNOWN if changes else AWAY), LATER)
    if isinstance(error, OSError) and is_disk_full(error):
        log.error("%s: %s for %s", DISK_FULL_MESSAGE, error, request.path)
        return refused(of_request(503, f"{DISK_FULL_MESSAGE} Free disk space on the board, then try again."), LATER)
    if isinstance(error, SuspiciousOperation):  # more fields than are read, say
        return refused(of_request(400, str(error)))
    response = exception_handler(error, context)
    if response is None:
        set_rollback()
        return refused(failed(failure(request.path, error)))
    detail = response.data.get("detail", response.data) if isinstance(response.data, dict) else response.data
    body = of_request(response.status_code, str(detail))
    if isinstance(error, Http404 | PermissionDenied):
        what = error.what if isinstance(error, NotFoundError) else None
        body = _addressed(body, parameter_of(what, context["kwargs"]))
    response.data, response.content_type = body, CONTENT_TYPE
    return response


def _addressed(body: ProblemDetails, parameter: str | None) -> ProblemDetails:
    """Of what the address names, where it names anything; told to people as before."""
    if parameter is None:
        return body
    words = body["detail"]
    return {**details(body["status"], [Problem(parameter, words)], "path"), "detail": words}
