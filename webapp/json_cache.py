"""Django cache in JSON. Django's pickles would let anyone with access to Redis run code."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from django.core.cache.backends.redis import RedisCache, RedisCacheClient


class JsonSerializer:
    """Serializer of cached values."""

    def dumps(self, value: Any) -> Any:
        """Return JSON, and integers unchanged, because Redis increments them."""
        return value if type(value) is int else json.dumps(value, default=_plain)

    def loads(self, stored: bytes) -> Any:
        """Return the value. Raises ValueError for other data."""
        try:
            return json.loads(stored)
        except RecursionError:
            raise ValueError("nested too deep") from None


class _Client(RedisCacheClient):
    def get(self, key: Any, default: Any) -> Any:
        """Return the default for a value that cannot be read."""
        try:
            return super().get(key, default)
        except ValueError:
            return default


class JsonCache(RedisCache):
    """Redis cache of Django with JSON values."""

    def __init__(self, server: str, params: dict[str, Any]) -> None:
        options = {**params.get("OPTIONS", {}), "serializer": JsonSerializer}
        super().__init__(server, {**params, "OPTIONS": options})
        self._class = _Client


def _plain(value: Any) -> Any:
    """Convert records of the admin search and lazy texts."""
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else str(value)
