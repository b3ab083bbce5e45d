"""What is answered where no view answers: problem details at and below /api, else a page."""

from __future__ import annotations

import logging
import sys

from django.db import InterfaceError, OperationalError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views import csrf, defaults
from redis.exceptions import RedisError

from jobs.api.http.errors import LATER, failed, failure, of_request, refused_page
from jobs.core.errors import WORDS, is_full
from webapp.serving.doors import is_api

log = logging.getLogger(__name__)

AWAY: dict[tuple[type[Exception], ...], str] = {
    (OperationalError, InterfaceError): "The database",
    (RedisError,): "Redis",
}


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    """A host name, path or form that Django refuses."""
    if not is_api(request.path):
        return defaults.bad_request(request, exception)
    return refused_page(of_request(400, "The request is malformed."))


def forbidden(request: HttpRequest, exception: Exception) -> HttpResponse:
    """What the user may not."""
    if not is_api(request.path):
        return defaults.permission_denied(request, exception)
    return refused_page(of_request(403, "You do not have permission for this request."))


def forged(request: HttpRequest, reason: str = "") -> HttpResponse:
    """A form without its CSRF token."""
    if not is_api(request.path):
        return csrf.csrf_failure(request, reason)
    return refused_page(of_request(403, f"CSRF: {reason}"))


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    """No such route."""
    if not is_api(request.path):
        return defaults.page_not_found(request, exception)
    return refused_page(of_request(404, "The path does not exist."))


def server_error(request: HttpRequest) -> HttpResponse:
    """An id to quote; the log has the same one. 503 where what the board stands on does not answer or is full."""
    error = sys.exception()
    away = next((name for kinds, name in AWAY.items() if isinstance(error, kinds)), None)
    full = isinstance(error, OSError) and is_full(error)
    if (away or full) and not is_api(request.path):
        words = WORDS if full else f"{away} does not answer."
        log.warning("%s Request: %s: %s", words, request.path, error)
        answer = render(request, "503.html", {"words": words}, status=503)
        answer["Retry-After"] = LATER["Retry-After"]
        return answer
    reference = failure(request.path)
    if not is_api(request.path):
        return render(request, "500.html", {"reference": reference}, status=500)
    return refused_page(failed(reference))
