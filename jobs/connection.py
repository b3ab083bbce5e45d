"""Redis for synchronous code."""

from __future__ import annotations

import redis
from django.conf import settings
from redis.backoff import NoBackoff
from redis.retry import Retry


def connect() -> redis.Redis:
    """A connection with timeouts: whoever waits on Redis holds something else up."""
    return redis.Redis.from_url(settings.REDIS_URL, socket_timeout=5, socket_connect_timeout=2)


def connect_once(patience_s: float) -> redis.Redis:
    """For one question, asked once: `patience_s` to connect, and as long for the answer."""
    return redis.Redis.from_url(
        settings.REDIS_URL,
        socket_timeout=patience_s,
        socket_connect_timeout=patience_s,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=0,
    )
