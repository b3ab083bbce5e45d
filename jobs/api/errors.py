"""Responses to refused and failed requests: problem details for every exception of a view."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Mapping
from typing import Any, Final

from django.core.exceptions import PermissionDenied, SuspiciousOperation
from django.http import Http404, JsonResponse
from rest_framework.permissions import SAFE_METHODS
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import exception_handler, set_rollback

from jobs.api.parameters import KEY, BadParameterError
from jobs.api.problems import (
    CONTENT_TYPE,
    WHOLE_REQUEST,
    ProblemDetails,
    ProblemLocation,
    build_problem,
    build_request_problem,
)
from jobs.core.errors import (
    DISK_FULL_MESSAGE,
    NotFoundError,
    describe_outage,
    get_request_id,
    is_database_read_only,
    is_disk_full,
)
from jobs.people.invitations import NotInvitedError
from jobs.people.notifications.email_settings import NoMailError
from jobs.planning.auto_layout import NoOfferError
from jobs.planning.measured_runs import NoAdviceError
from jobs.planning.planner_processes import BusyError
from jobs.queue import actions
from jobs.queue.staff_actions import BusyHostError
from jobs.runs.baselines import NotUsableError
from jobs.runs.history.queries.step_breakdown import NoStepsError
from jobs.runs.history.queries.tables import BadQueryError, NoTableError
from jobs.runs.history.store.folder import NoHistoryError
from jobs.runs.traces.imports.store import TooManyImportsError
from planner.facts.validation import Problem, SpecError

log = logging.getLogger(__name__)

RETRY_AFTER_S = 5
RETRY_LATER: Mapping[str, str] = {"Retry-After": str(RETRY_AFTER_S)}
READ_METHODS = ("GET", "HEAD")  # their parameters are in the query
# A change may have been committed before the connection broke.
UNKNOWN_RESULT = "The change may have been made. Check the object, or repeat the request with the same Idempotency-Key."
# Status, field, and location of exceptions whose text is the message.
ANSWERS: Final[Mapping[type[Exception], tuple[int, str, ProblemLocation | None]]] = {
    actions.DisprovedError: (409, "proof", None),
    actions.HostConnectedError: (409, "host", None),
    actions.CalibrationError: (409, "host", None),
    BusyHostError: (409, "host", None),
    NoHistoryError: (404, "attempt", "query"),
    NoMailError: (409, "mail", None),
    NoStepsError: (404, "from", "query"),
    NoTableError: (404, "table", "path"),
    NotInvitedError: (409, "token", None),
    NotUsableError: (409, "job", None),
    TooManyImportsError: (409, "import", None),
}
# Path parameters whose name differs from the kind of object in a `NotFoundError`.
PATH_PARAMETERS: Final[Mapping[str, tuple[str, ...]]] = {
    "job": ("job_id", "run"),
    "member": ("user",),
    "baseline": ("branch",),
    "file": ("place",),
    **dict.fromkeys(("host", "pool", "primitive"), ("name",)),
    **dict.fromkeys(("token", "import", "upload", "webhook", "invitation"), ("key",)),
}


class RunEndedProblem(ProblemDetails):
    """Refusal of a report of an ended run. `cancel`: end the ranks."""

    cancel: bool


def make_problem_response(body: ProblemDetails, headers: Mapping[str, str] | None = None) -> Response:
    """Return the REST response of a refusal."""
    return Response(body, status=body["status"], content_type=CONTENT_TYPE, headers=dict(headers or {}))


def make_page_problem_response(body: ProblemDetails, headers: Mapping[str, str] | None = None) -> JsonResponse:
    """Return the response of a refusal outside REST views, for scripts of pages."""
    return JsonResponse(body, status=body["status"], content_type=CONTENT_TYPE, headers=dict(headers or {}))


def refuse(
    status: int,
    field: str,
    message: str,
    location: ProblemLocation | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return a refusal with one problem. `location` is None if the field is not in the request."""
    return make_problem_response(build_problem(status, [Problem(field, message)], location), headers)


def reject_body(request: Request) -> None:
    """Raise SpecError with all fields of a body that the request does not take."""
    body = request.data
    if not body and body in ({}, None, ""):
        return
    names = list(body) if isinstance(body, dict) else [WHOLE_REQUEST]
    raise SpecError([Problem(str(name)[:100], "This request takes no body. Omit the field.") for name in names[:20]])


def log_failure(path: str, error: BaseException | None = None) -> str:
    """Log an internal error, and return the id that its response quotes."""
    error_id = get_request_id() or secrets.token_hex(16)
    log.error("error %s for %s", error_id, path, exc_info=error)
    return error_id


def build_internal_error(error_id: str) -> ProblemDetails:
    """Return the body of a 500."""
    return build_request_problem(500, f"Internal error. See {error_id} in the server log.")


def handle_exception(error: Exception, context: dict[str, Any]) -> Response:
    """Return the response for an exception of a view, as the exception handler of DRF."""
    request, view = context["request"], context["view"]
    if answer := next((answer for kind, answer in ANSWERS.items() if isinstance(error, kind)), None):
        status, field, location = answer
        return refuse(status, field, str(error), location)
    if isinstance(error, NoAdviceError | NoOfferError):
        return refuse(409, error.field, str(error))
    if isinstance(error, actions.KeyReusedError):
        message = f"`{KEY.name}` was used before with another body. Use a new idempotency key."
        return refuse(422, KEY.name, message, "header")
    if isinstance(error, BadQueryError):
        return make_problem_response(build_problem(400, error.problems, "query"))
    if isinstance(error, SpecError):
        return _refuse_spec(error, request, view)
    if isinstance(error, BadParameterError):
        return make_problem_response(build_problem(400, error.problems, error.location))
    if isinstance(error, BusyError):
        return make_problem_response(build_request_problem(503, str(error)), RETRY_LATER)
    if message := describe_outage(error):
        log.warning("No answer to %s, because a service is unavailable: %s", request.path, error)
        if request.method not in SAFE_METHODS and not is_database_read_only(error):
            message = f"{message} {UNKNOWN_RESULT}"
        return make_problem_response(build_request_problem(503, message), RETRY_LATER)
    if isinstance(error, OSError) and is_disk_full(error):
        log.error("%s: %s for %s", DISK_FULL_MESSAGE, error, request.path)
        message = f"{DISK_FULL_MESSAGE} Free disk space on the board, then try again."
        return make_problem_response(build_request_problem(503, message), RETRY_LATER)
    if isinstance(error, SuspiciousOperation):  # for example too many form fields
        return make_problem_response(build_request_problem(400, str(error)))
    response = exception_handler(error, context)
    if response is None:
        set_rollback()
        return make_problem_response(build_internal_error(log_failure(request.path, error)))
    detail = response.data.get("detail", response.data) if isinstance(response.data, dict) else response.data
    body = build_request_problem(response.status_code, str(detail))
    if isinstance(error, Http404 | PermissionDenied):
        kind = error.what if isinstance(error, NotFoundError) else None
        if parameter := find_path_parameter(kind, context["kwargs"]):
            message = body["detail"]
            problem = build_problem(body["status"], [Problem(parameter, message)], "path")
            body = {**problem, "detail": message}
    response.data, response.content_type = body, CONTENT_TYPE
    return response


def _refuse_spec(error: SpecError, request: Request, view: Any) -> Response:
    location: ProblemLocation = "query" if request.method in READ_METHODS else "body"
    body: object = request.data
    fields = body if isinstance(body, Mapping) else {}
    problems = error.problems
    if location == "body" and not isinstance(body, Mapping):
        problems = [Problem(WHOLE_REQUEST, problem.message) for problem in problems]
    # A field that is in the body under its own name is not elsewhere.
    pointers = {name: pointer for name, pointer in view.pointers.items() if name not in fields}
    return make_problem_response(build_problem(422, problems, location, pointers, view.path_fields))


def find_path_parameter(kind: str | None, parameters: Collection[str]) -> str | None:
    """Return the path parameter that names a missing object, else the first one, or None without parameters."""
    names = PATH_PARAMETERS.get(kind, (kind,)) if kind else ()
    return next((name for name in (*names, *parameters) if name in parameters), None)
