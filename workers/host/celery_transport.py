"""Celery's Redis transport, extended so that an invalid message cannot stop the host worker.

Kombu removes a message from the queue before it reads it, and every error while reading ends the worker. Any sender who
can push into the host's queue could stop the worker. This transport drops such messages. It also stores all its keys
below the host's own prefix and runs no scripts, because the host's Redis user is allowed neither.
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

MAX_RETRY_INTERVAL_S = 4.0


class QoS(redis.QoS):
    """Redeliver messages that were not finished in time.

    Kombu's lock is left out, because a host has one worker, and tasks accept a second delivery.
    """

    channel: Any
    _num_calls = 0

    def restore_visible(self, start: int = 0, num: int | None = 10, interval: int = 10) -> None:
        self._num_calls += 1
        if (self._num_calls - 1) % (interval or 1):
            return
        with self.channel.conn_or_acquire() as client:
            latest = time.time() - self.visibility_timeout
            late = client.zrange(
                self.unacked_index_key, latest, 0, desc=True, byscore=True, offset=start if num else None, num=num
            )
            for tag in late or []:
                self.restore_by_tag(tag, client)


class Channel(redis.Channel):
    """Drop messages that cannot be read (`_brpop_read`, `_receive`) or that the consumer rejects (`basic_consume`)."""

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
        """Read a message. Raises Empty and errors of Redis."""
        try:
            return read()
        except Exception as error:
            if _is_redis_error(error) or isinstance(error, Empty):
                raise
            log.warning("dropped an unreadable message: %r", error)
            return True

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[..., Any] | None, consumer_tag: str | None, **kwargs: Any
    ) -> str:
        def consume(message: Any) -> None:
            try:
                if callback is not None:
                    callback(message)
            except Exception as error:
                if _is_redis_error(error):
                    raise
                log.warning("dropped an invalid message: %r", error)
                if not message.acknowledged:
                    message.reject()

        tag: str = super().basic_consume(queue, no_ack, consume, consumer_tag, **kwargs)
        return tag


def _is_redis_error(error: Exception) -> bool:
    """Return whether Redis caused an error. Kombu's own list contains KeyError, and a message can cause a DataError."""
    return isinstance(error, (OSError, RedisError)) and not isinstance(error, DataError)


def get_key_options(prefix: str) -> dict[str, str]:
    """Return transport options that put every key of the channel below a prefix."""
    return {
        "unacked_key": f"{prefix}unacked",
        "unacked_index_key": f"{prefix}unacked_index",
        "unacked_mutex_key": f"{prefix}unacked_mutex",
        "keyprefix_queue": f"{prefix}binding.%s",
        "keyprefix_binding_deadlines": f"{prefix}binding_deadlines",
        "keyprefix_binding_permanent": f"{prefix}binding_permanent.%s",
    }


class Connection(kombu.Connection):
    """Retry an unreachable Redis every few seconds. Kombu's interval grows to 30 s."""

    def ensure_connection(self, *arguments: Any, **named: Any) -> Any:
        return super().ensure_connection(*arguments, **{"interval_max": MAX_RETRY_INTERVAL_S, **named})


class AMQP(amqp.AMQP):
    """Celery's broker access with this module's connection."""

    Connection = Connection


class Transport(redis.Transport):
    """The transport that the host worker's Celery app names."""

    Channel = Channel
