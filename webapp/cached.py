"""What the cache holds is JSON: Django's own pickles would let whoever can write to Redis run code in the web."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from django.core.cache.backends.redis import RedisCache, RedisCacheClient


class Json:
    """How values are written and read."""

    def dumps(self, value: Any) -> Any:
        """Whole numbers as they are: Redis counts them up."""
        return value if type(value) is int else json.dumps(value, default=_plain)

    def loads(self, kept: bytes) -> Any:
        """Raises ValueError: it is none of ours."""
        try:
            return json.loads(kept)
        except RecursionError:
            raise ValueError("nested too deep") from None


class _Client(RedisCacheClient):
    def get(self, key: Any, default: Any) -> Any:
        """What cannot be read is not there."""
        try:
            return super().get(key, default)
        except ValueError:
            return default


class JsonCache(RedisCache):
    """Django's, without its pickles."""

    def __init__(self, server: str, params: dict[str, Any]) -> None:
        options = {**params.get("OPTIONS", {}), "serializer": Json}
        super().__init__(server, {**params, "OPTIONS": options})
        self._class = _Client


def _plain(value: Any) -> Any:
    """The admin's search keeps records; its addresses are made when they are looked at."""
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else str(value)
