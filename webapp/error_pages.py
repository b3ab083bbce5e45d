"""Responses without a view: problem documents below /api, else pages."""

from __future__ import annotations

import logging
import sys

from django.db import InterfaceError, OperationalError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views import csrf, defaults
from redis.exceptions import RedisError

from jobs.api.errors import RETRY_LATER, build_internal_error, log_failure, make_page_problem_response
from jobs.api.problems import build_request_problem
from jobs.core.errors import DISK_FULL_MESSAGE, is_disk_full
from webapp.serving.request_guard import is_api_path

log = logging.getLogger(__name__)

AWAY: dict[tuple[type[Exception], ...], str] = {
    (OperationalError, InterfaceError): "The database",
    (RedisError,): "Redis",
}


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Respond to a host name, path, or form that Django rejects."""
    if not is_api_path(request.path):
        return defaults.bad_request(request, exception)
    return make_page_problem_response(build_request_problem(400, "The request is malformed."))


def permission_denied(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Respond to a request without permission."""
    if not is_api_path(request.path):
        return defaults.permission_denied(request, exception)
    return make_page_problem_response(build_request_problem(403, "You do not have permission for this request."))


def csrf_failure(request: HttpRequest, reason: str = "") -> HttpResponse:
    """Respond to a form without a CSRF token."""
    if not is_api_path(request.path):
        return csrf.csrf_failure(request, reason)
    return make_page_problem_response(build_request_problem(403, f"CSRF: {reason}"))


def page_not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Respond to an unknown path."""
    if not is_api_path(request.path):
        return defaults.page_not_found(request, exception)
    return make_page_problem_response(build_request_problem(404, "The path does not exist."))


def server_error(request: HttpRequest) -> HttpResponse:
    """Respond with the ID of the log entry, or with 503 if the database, Redis, or the disk fails."""
    error = sys.exception()
    away = next((name for kinds, name in AWAY.items() if isinstance(error, kinds)), None)
    full = isinstance(error, OSError) and is_disk_full(error)
    if (away or full) and not is_api_path(request.path):
        words = DISK_FULL_MESSAGE if full else f"{away} does not answer."
        log.warning("%s Request: %s: %s", words, request.path, error)
        answer = render(request, "503.html", {"words": words}, status=503)
        answer["Retry-After"] = RETRY_LATER["Retry-After"]
        return answer
    reference = log_failure(request.path)
    if not is_api_path(request.path):
        return render(request, "500.html", {"reference": reference}, status=500)
    return make_page_problem_response(build_internal_error(reference))
