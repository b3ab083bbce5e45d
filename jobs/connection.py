"""Redis for synchronous code."""

from __future__ import annotations

import redis
from django.conf import settings


def connect() -> redis.Redis:
    """A connection with timeouts: whoever waits on Redis holds something else up."""
    return redis.Redis.from_url(settings.REDIS_URL, socket_timeout=5, socket_connect_timeout=2)
