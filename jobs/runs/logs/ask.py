"""One part of a log: asked of its host, and the answer checked."""

from __future__ import annotations

import logging
import secrets
import time
from typing import Any

import redis
from django.conf import settings

from contracts.codec import BadMessageError, decode_log_part, validate_log_order
from contracts.logs import VERSION, LogFile, LogOrder, LogPart
from contracts.names import TASK_READ_LOG, host_queue, log_key
from contracts.security import SIGNATURE_BYTES
from jobs.core.credentials import signed_by
from jobs.core.redis_connection import connect
from jobs.queue.order_outbox import producer
from jobs.runs.logs.places import NoLogError, Place

log = logging.getLogger(__name__)

PATIENCE_S = 10.0  # for a host to answer


def ask(place: Place, file: LogFile, offset: int) -> LogPart:
    """What a log holds from `offset` on. It blocks.

    Raises:
        NoLogError: the host has no such log, or does not answer.
        redis.RedisError, kombu.exceptions.OperationalError: Redis is away.
    """
    with connect() as client:
        told: Any = client.time()
        now = told[0] + told[1] / 1e6
        order = LogOrder(
            v=VERSION,
            job=place.job,
            attempt=place.attempt,
            rank=place.rank,
            file=file,
            offset=offset,
            question=secrets.token_hex(16),
            expires=now + PATIENCE_S,
        )
        queue = host_queue(place.host.name)
        producer(settings.REDIS_URL).send_task(TASK_READ_LOG, args=[validate_log_order(order)], queue=queue)
        return _answer(client, place, order["question"])


def _answer(client: redis.Redis, place: Place, question: str) -> LogPart:
    host = place.host
    key, until = log_key(host.name, question), time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        found: Any = client.blpop([key], timeout=1)
        if found is None:
            continue
        try:
            part = _checked(place, question, found[1])
        except BadMessageError as error:
            log.warning("Dropped an invalid answer to a log request from host %s: %s", host.name, error)
            continue
        if part["problem"]:
            raise NoLogError(404, f"Host {host.name} reports: {part['problem']}")
        return part
    raise NoLogError(503, f"Host {host.name} has the log, but did not answer within {PATIENCE_S:g} s.")


def _checked(place: Place, question: str, sealed: bytes) -> LogPart:
    """Raises BadMessageError where another wrote it, or it answers something else."""
    signed, body = sealed[:SIGNATURE_BYTES], sealed[SIGNATURE_BYTES:]
    if not signed_by(place.host, body, signed):
        raise BadMessageError(f"the answer is not signed by host {place.host.name}")
    part = decode_log_part(body)
    if part["question"] != question:
        raise BadMessageError("the answer is for another request")
    return part
