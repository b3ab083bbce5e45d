"""`/healthz`: whether this web process reaches its database and its Redis, for whoever watches or restarts it."""

from __future__ import annotations

from django.db import DatabaseError, connection
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.utils.deprecation import MiddlewareMixin
from redis.exceptions import RedisError

from jobs.connection import connect_once

PATH = "/healthz"
PATIENCE_S = 0.5  # to connect, and again for an answer: a prober has little more


class HealthMiddleware(MiddlewareMixin):
    """Answers before the host name is checked and before anybody is logged in: a prober knows an address only."""

    def process_request(self, request: HttpRequest) -> HttpResponse | None:
        if request.path != PATH:
            return None
        found = {"database": _database_answers(), "redis": _redis_answers()}
        return JsonResponse(found, status=200 if all(found.values()) else 503)


def _database_answers() -> bool:
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except DatabaseError:
        return False
    return True


def _redis_answers() -> bool:
    try:
        with connect_once(PATIENCE_S) as client:
            return bool(client.ping())
    except RedisError:
        return False
