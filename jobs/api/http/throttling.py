"""How often one may ask: so many requests and submits of a user, or of a token of his, in each minute of the clock.

They are counted in the cache that all web processes share. While it is away nothing is counted and all is answered.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from django.conf import settings
from django.core.cache import cache
from redis.exceptions import RedisError
from rest_framework.request import Request
from rest_framework.throttling import BaseThrottle

from jobs.runs.live.held_requests import get_held_request

log = logging.getLogger(__name__)

WINDOW_S = 60
AWAY_S = 5.0  # without a try, once the cache did not answer: each try may take a second

_away_until = 0.0


class RequestThrottle(BaseThrottle):
    """Every request."""

    scope = "request"

    def most(self, request: Request) -> int:
        """In a window."""
        return int(settings.REQUESTS_PER_MINUTE)

    def whose(self, request: Request) -> str:
        """Whom they are counted to; empty where to nobody."""
        key = getattr(request.auth, "token_key", "")
        return f"token:{key}" if key else f"user:{request.user.pk}" if request.user.pk else ""

    def allow_request(self, request: Request, view: Any) -> bool:
        held, whose = get_held_request(request), self.whose(request)
        if (held is not None and held.is_repeated) or not whose:
            return True
        count = counted(self.scope, whose)
        return count is None or count <= self.most(request)

    def wait(self) -> float:
        return WINDOW_S - time.time() % WINDOW_S


class SubmitThrottle(RequestThrottle):
    """Of a view whose POST makes work: these are counted apart."""

    def allow_request(self, request: Request, view: Any) -> bool:
        self.scope = "submit" if request.method == "POST" else "request"
        return super().allow_request(request, view)

    def most(self, request: Request) -> int:
        return int(settings.SUBMITS_PER_MINUTE) if self.scope == "submit" else super().most(request)

    def whose(self, request: Request) -> str:
        return f"user:{request.user.pk}" if self.scope == "submit" else super().whose(request)


def counted(scope: str, whose: str) -> int | None:
    """How many of this window, this one included; None where nobody can tell."""
    global _away_until
    if time.monotonic() < _away_until:
        return None
    key = f"rate:{scope}:{whose}:{int(time.time() // WINDOW_S)}"
    try:
        return _one_more(key)
    except (RedisError, OSError, ValueError) as error:  # ValueError: it went between the two
        log.warning("Cannot count requests for the rate limits: %s", error)
        _away_until = time.monotonic() + AWAY_S
        return None


def _one_more(key: str) -> int:
    try:
        return cache.incr(key)
    except ValueError:  # the window's first
        cache.add(key, 0, 2 * WINDOW_S)
        return cache.incr(key)
