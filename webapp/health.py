"""For whoever watches or restarts a web process. `/healthz`: whether it reaches its database and its Redis.

`/readyz`: whether the board does its work, too: the database has every migration that this code needs, and a
controller ticks. Restarting a web mends neither, so a probe that restarts asks the first.
"""

from __future__ import annotations

from functools import cache

from django.db import DatabaseError, connection
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.utils.deprecation import MiddlewareMixin
from redis.exceptions import RedisError

from jobs.core.redis_connection import connect_once
from jobs.queue.control.lease import unhealthy

PATHS = ("/healthz", "/readyz")
PATIENCE_S = 0.5  # to connect, and again for an answer: a prober has little more


class HealthMiddleware(MiddlewareMixin):
    """Answers before the host name is checked and before anybody is logged in: a prober knows an address only."""

    def process_request(self, request: HttpRequest) -> HttpResponse | None:
        if request.path not in PATHS:
            return None
        found = {"database": _database_answers(), "redis": _redis_answers()}
        if request.path == "/readyz":
            found |= {"migrations": found["database"] and _is_migrated()}
            found |= {"controller": found["migrations"] and not unhealthy()}
        return JsonResponse(found, status=200 if all(found.values()) else 503)


def _database_answers() -> bool:
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except DatabaseError:
        return False
    return True


def _is_migrated() -> bool:
    """Whether it has all that this code knows; an older web beside a newer one is ready as well."""
    return _known() <= set(MigrationRecorder(connection).applied_migrations())


@cache
def _known() -> frozenset[tuple[str, str]]:
    return frozenset(MigrationLoader(None).graph.nodes)


def _redis_answers() -> bool:
    try:
        with connect_once(PATIENCE_S) as client:
            return bool(client.ping())
    except RedisError:
        return False
