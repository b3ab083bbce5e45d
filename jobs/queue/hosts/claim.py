"""A Redis serves one board: by a key in it, the controller of a second one notices and keeps its hands off.

Two would take each other's hosts for strangers: each takes away the users that the other makes, and where hosts are
called alike, each eats what the other's say. Controllers of one board know each other by their lease in its database.
"""

from __future__ import annotations

from typing import Any

import redis
from django.conf import settings

from jobs.core.redis_connection import connect_once
from jobs.models import Lease

KEY = "meshboard:controller"
LASTS_S = 30  # without a turn of the controller that has it
PATIENCE_S = 1.0  # each turn of a controller asks, also of a Redis that stands still
WORDS = "The controller of another board uses this Redis"
ADVICE = "Use one Redis per board (MESHBOARD_REDIS_URL)."


class Claim:
    """By which a controller has its Redis; made once a controller."""

    def __init__(self) -> None:
        self._client = _client()

    def hold(self, ours: str, before: str) -> str:
        """Take it, from the one of this board that had it before, or keep it; else another board's that has it.

        Raises what Redis did.
        """
        if self._client.set(KEY, ours, nx=True, ex=LASTS_S):
            return ""
        found = _holder(self._client)
        if found not in ("", ours, before):
            return found
        self._client.set(KEY, ours, ex=LASTS_S)
        return ""

    def release(self, ours: str) -> None:
        """Let another board's controller start at once."""
        if _holder(self._client) == ours:
            self._client.delete(KEY)

    def close(self) -> None:
        self._client.close()


def another_board() -> str:
    """The controller of another board that works on our Redis; empty where none does. Raises what Redis did."""
    with _client() as client:
        found = _holder(client)
    return "" if not found or Lease.objects.filter(holder=found).exists() else found


def _client() -> redis.Redis:
    client = connect_once(PATIENCE_S)
    if settings.REDIS_ACCESS != "shared":  # hosts' users are of the whole server, whichever database of it we use
        client.connection_pool.connection_kwargs["db"] = 0
    return client


def _holder(client: redis.Redis) -> str:
    found: Any = client.get(KEY)
    return (found or b"").decode(errors="replace")
