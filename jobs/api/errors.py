"""Every refusal, and every failure, has one shape: {"errors": [{"field", "message"}]}."""

from __future__ import annotations

import logging
import secrets
from typing import Any

from django.core.exceptions import SuspiciousOperation
from django.db import InterfaceError, OperationalError
from rest_framework.response import Response
from rest_framework.views import exception_handler, set_rollback
from typing_extensions import TypedDict

from jobs.api.listing import BadParameterError
from jobs.planning.planners import BusyError
from jobs.planning.shapes import Error
from jobs.planning.work import told
from jobs.reference import current
from planner.facts.spec import Problem, SpecError

log = logging.getLogger(__name__)

RETRY_AFTER_S = 5


class Errors(TypedDict):
    """Every refusal."""

    errors: list[Error]


class RunEnded(Errors):
    """A refusal to hear a run that is over. `cancel`: whether its ranks are to end."""

    cancel: bool


def body(problems: list[Problem]) -> Errors:
    return {"errors": told(problems)}


def failure(path: str, error: BaseException | None = None) -> str:
    """Log a failure of ours under an id that its answer quotes; returns the id."""
    reference = current() or secrets.token_hex(16)
    log.error("error %s for %s", reference, path, exc_info=error)
    return reference


def failed(reference: str) -> Errors:
    """The body of a 500."""
    return body([Problem("request", f"something broke on our side; it is in the log under {reference}")])


def busy(error: BusyError) -> Errors:
    """The body of a 503."""
    return body([Problem("request", str(error))])


def handle(error: Exception, context: dict[str, Any]) -> Response:
    """DRF's exception handler: a SpecError is 422, a database that is away 503, what nobody expected 500."""
    if isinstance(error, SpecError):
        return Response(body(error.problems), status=422)
    if isinstance(error, BadParameterError):
        return Response(body(error.problems), status=400)
    if isinstance(error, BusyError):
        return Response(busy(error), status=503, headers={"Retry-After": str(RETRY_AFTER_S)})
    path = context["request"].path
    if isinstance(error, OperationalError | InterfaceError):
        log.warning("the database did not answer for %s: %s", path, error)
        away = [Problem("request", "the database does not answer just now; nothing was changed")]
        return Response(body(away), status=503, headers={"Retry-After": str(RETRY_AFTER_S)})
    if isinstance(error, SuspiciousOperation):  # more fields than are read, say
        return Response(body([Problem("request", str(error))]), status=400)
    response = exception_handler(error, context)
    if response is None:
        set_rollback()
        return Response(failed(failure(path, error)), status=500)
    detail = response.data.get("detail", response.data) if isinstance(response.data, dict) else response.data
    response.data = body([Problem("request", str(detail))])
    return response
