"""Celery's Redis transport, which a message that is none cannot bring down.

It keeps all that it keeps under the host's own keys, and runs no scripts, for its Redis user may neither.

Kombu pops a message before it reads it, and lets every error of the reading end the worker: once per message, anybody
who can push into the host's queue could stop it. Here such a message is dropped and the worker goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from queue import Empty
from typing import Any

import kombu
from celery.app import amqp
from kombu.transport import redis
from redis.exceptions import DataError, RedisError

log = logging.getLogger(__name__)

LONGEST_PAUSE_S = 4.0


class QoS(redis.QoS):
    """Gives back what was taken and not finished in time. Kombu's lock is left out: a host has one worker, and giving
    back twice is what tasks expect anyway."""

    channel: Any
    _turns = 0

    def restore_visible(self, start: int = 0, num: int | None = 10, interval: int = 10) -> None:
        self._turns += 1
        if (self._turns - 1) % (interval or 1):
            return
        with self.channel.conn_or_acquire() as client:
            latest = time.time() - self.visibility_timeout
            late = client.zrange(
                self.unacked_index_key, latest, 0, desc=True, byscore=True, offset=start if num else None, num=num
            )
            for tag in late or []:
                self.restore_by_tag(tag, client)


class Channel(redis.Channel):
    """Drops what it cannot read (the two overridden readers) and what its consumer cannot take (basic_consume)."""

    QoS = QoS
    from_transport_options = (
        *redis.Channel.from_transport_options,
        *("keyprefix_queue", "keyprefix_binding_deadlines", "keyprefix_binding_permanent"),
    )

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
            log.warning("dropped an unreadable message: %r", error)
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
                log.warning("dropped an invalid message: %r", error)
                if not message.acknowledged:
                    message.reject()

        tag: str = super().basic_consume(queue, no_ack, take, consumer_tag, **kwargs)
        return tag


def _redis_fails(error: Exception) -> bool:
    """Kombu's own list of connection errors has KeyError in it; a DataError is of what the message made us send."""
    return isinstance(error, (OSError, RedisError)) and not isinstance(error, DataError)


def keys_below(prefix: str) -> dict[str, str]:
    """Transport options by which every key of the channel begins so."""
    return {
        "unacked_key": f"{prefix}unacked",
        "unacked_index_key": f"{prefix}unacked_index",
        "unacked_mutex_key": f"{prefix}unacked_mutex",
        "keyprefix_queue": f"{prefix}binding.%s",
        "keyprefix_binding_deadlines": f"{prefix}binding_deadlines",
        "keyprefix_binding_permanent": f"{prefix}binding_permanent.%s",
    }


class Connection(kombu.Connection):
    """Asks every few seconds for a Redis that is away, however long it has been; kombu's pauses grow to 30."""

    def ensure_connection(self, *arguments: Any, **named: Any) -> Any:
        return super().ensure_connection(*arguments, **{"interval_max": LONGEST_PAUSE_S, **named})


class AMQP(amqp.AMQP):
    """Celery's way to its broker, with our connections."""

    Connection = Connection


class Transport(redis.Transport):
    """What the host worker speaks to its broker with."""

    Channel = Channel
