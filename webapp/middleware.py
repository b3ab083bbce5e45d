"""Middleware: health checks, escaped bidirectional controls, and errors of admin pages."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import cache

from django.conf import settings
from django.core.exceptions import ValidationError
from django.core.paginator import InvalidPage
from django.db import DatabaseError, connection
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder
from django.db.models import F
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.utils.deprecation import MiddlewareMixin
from django.views.defaults import bad_request
from redis.exceptions import RedisError

from contracts.fields import escape_direction_overrides
from jobs.core.redis_client import connect_once
from jobs.models import Lease
from jobs.queue.work_lease import explain_unhealthy
from webapp.serving.request_guard import HEALTH_PATHS

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 0.5  # to connect, and again for a response, because probes have short timeouts
PROBE_LEASE = "readyz"  # row that `/readyz` writes
PROBE_KEY = "meshboard:readyz"
PROBE_KEY_TTL_S = 60
BIDI_CONTROLS = re.compile(rb"\xe2\x80[\xaa-\xae]|\xe2\x81[\xa6-\xa9]")  # U+202A to U+202E, U+2066 to U+2069
USER_ERRORS = (ValueError, OverflowError, RecursionError, InvalidPage, ValidationError)


class HealthMiddleware(MiddlewareMixin):
    """Return health checks without a login and for every host name.

    `/healthz` checks the connections to the database and to Redis. `/readyz` also writes to both, and checks the
    migrations and the controller. A restart of the web server fixes none of them, so a probe that restarts it uses
    `/healthz`.
    """

    def process_request(self, request: HttpRequest) -> HttpResponse | None:
        if request.path not in HEALTH_PATHS:
            return None
        found = {"database": _database_answers(), "redis": _redis_answers()}
        if request.path == "/readyz":
            found |= {"database_writes": found["database"] and _database_accepts_writes()}
            found |= {"redis_writes": found["redis"] and _redis_accepts_writes()}
            found |= {"migrations": found["database"] and _is_migrated()}
            found |= {"controller": found["migrations"] and not explain_unhealthy()}
        return JsonResponse(found, status=200 if all(found.values()) else 503)


def _database_answers() -> bool:
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except DatabaseError:
        return False
    return True


def _database_accepts_writes() -> bool:
    """Write one row, which a read-only or full database rejects."""
    try:
        if not Lease.objects.filter(name=PROBE_LEASE).update(beats=F("beats") + 1):
            Lease.objects.get_or_create(name=PROBE_LEASE)
    except DatabaseError as error:
        log.warning("The database refuses writes: %s", error)
        return False
    return True


def _is_migrated() -> bool:
    """Return whether the database has all migrations of this code. It can have newer ones too."""
    return _list_migrations() <= set(MigrationRecorder(connection).applied_migrations())


@cache
def _list_migrations() -> frozenset[tuple[str, str]]:
    return frozenset(MigrationLoader(None).graph.nodes)


def _redis_answers() -> bool:
    try:
        with connect_once(PROBE_TIMEOUT_S) as client:
            return bool(client.ping())
    except RedisError:
        return False


def _redis_accepts_writes() -> bool:
    """Write one key, which a replica or a full Redis rejects."""
    try:
        with connect_once(PROBE_TIMEOUT_S) as client:
            return bool(client.set(PROBE_KEY, "1", ex=PROBE_KEY_TTL_S))
    except RedisError as error:
        log.warning("Redis refuses writes: %s", error)
        return False


def escape_bidi_controls(
    get_response: Callable[[HttpRequest], HttpResponseBase],
) -> Callable[[HttpRequest], HttpResponseBase]:
    """Escape characters in pages that would reverse the direction of a line."""

    def respond(request: HttpRequest) -> HttpResponseBase:
        response = get_response(request)
        if isinstance(response, HttpResponse) and response.get("Content-Type", "").startswith("text/html"):
            response.content = BIDI_CONTROLS.sub(_escape, response.content)
            if "Content-Length" in response:
                response["Content-Length"] = str(len(response.content))
        return response

    return respond


def _escape(found: re.Match[bytes]) -> bytes:
    return escape_direction_overrides(found[0].decode()).encode()


class AdminMiddleware:
    """Set the content security policy of admin pages, and return 400 for addresses and forms that they cannot read.

    The log has the traceback, because the cause can be an error of Meshboard.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        response = self._get_response(request)
        if request.path.startswith("/admin/"):
            response._csp_replace = settings.ADMIN_CONTENT_SECURITY_POLICY  # type: ignore[attr-defined]  # of django-csp
        return response

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        found = request.resolver_match
        if found is None or "admin" not in found.namespaces or not isinstance(exception, USER_ERRORS):
            return None
        log.error("The admin cannot read %s", request.path, exc_info=exception)
        return bad_request(request, exception)


def private_response_middleware(
    get_response: Callable[[HttpRequest], HttpResponseBase],
) -> Callable[[HttpRequest], HttpResponseBase]:
    """Forbid proxies and browsers to store responses to authenticated requests, unless a view sets Cache-Control."""

    def respond(request: HttpRequest) -> HttpResponseBase:
        response = get_response(request)
        is_authenticated = "Authorization" in request.headers or settings.SESSION_COOKIE_NAME in request.COOKIES
        if is_authenticated and "Cache-Control" not in response:
            response["Cache-Control"] = "private, no-store"
        return response

    return respond
