"""Celery's Redis transport, which a message that is none cannot bring down.

Kombu pops a message before it reads it, and lets every error of the reading end the worker: once per message, anybody
who can push into the host's queue could stop it. Here such a message is dropped and the worker goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import Empty
from typing import Any

from kombu.transport import redis
from redis.exceptions import DataError, RedisError

log = logging.getLogger(__name__)


class Channel(redis.Channel):
    """Drops what it cannot read (the two overridden readers) and what its consumer cannot take (basic_consume)."""

    def _brpop_read(self, **options: Any) -> bool:
        return self._read(lambda: super(Channel, self)._brpop_read(**options))  # type: ignore[misc]

    def _receive(self) -> bool:
        return self._read(super()._receive)  # type: ignore[misc]

    def _read(self, read: Callable[[], bool]) -> bool:
        """Raises Empty, and what Redis does wrong."""
        try:
            return read()
        except Exception as error:
            if _redis_fails(error) or isinstance(error, Empty):
                raise
            log.warning("dropped a message that cannot be read: %r", error)
            return True

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[..., Any] | None, consumer_tag: str | None, **kwargs: Any
    ) -> str:
        def take(message: Any) -> None:
            try:
                if callback is not None:
                    callback(message)
            except Exception as error:
                if _redis_fails(error):
                    raise
                log.warning("dropped a message that cannot be taken: %r", error)
                if not message.acknowledged:
                    message.reject()

        tag: str = super().basic_consume(queue, no_ack, take, consumer_tag, **kwargs)
        return tag


def _redis_fails(error: Exception) -> bool:
    """Kombu's own list of connection errors has KeyError in it; a DataError is of what the message made us send."""
    return isinstance(error, (OSError, RedisError)) and not isinstance(error, DataError)


class Transport(redis.Transport):
    """What the host worker speaks to its broker with."""

    Channel = Channel
