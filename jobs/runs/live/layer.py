"""Channels' layer in Redis, of which a cancellation is heard."""

from __future__ import annotations

from typing import Any

from channels_redis.core import RedisChannelLayer

from jobs.core.redis_connection import heard


class Layer(RedisChannelLayer):  # type: ignore[misc]  # channels_redis has no types
    """As it is, but for its connections."""

    def create_pool(self, index: int) -> Any:
        pool = super().create_pool(index)
        heard(pool)
        return pool
