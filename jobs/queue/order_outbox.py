"""Sends what transactions decided to send. Sent and then not deleted means sent twice, which hosts expect."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from typing import Any

import kombu.exceptions
import redis
from celery import Celery
from django import db
from django.conf import settings
from django.db.models import QuerySet

from contracts.codec import BadMessageError, validate_launch_order, validate_lend_order
from contracts.names import TASK_LAUNCH, TASK_LEND
from jobs.core.credentials import derive_loan_secret
from jobs.models import Loan, Member, Outbox
from jobs.people.variables import UnreadableError, sealed_for
from jobs.queue.attempt_completion import fail_unsent

log = logging.getLogger(__name__)

BATCH = 500
TRANSIENT = (redis.RedisError, kombu.exceptions.OperationalError, db.OperationalError, db.InterfaceError)
ORDER_LASTS = timedelta(seconds=60)  # a host carries no older order out


def deliver(client: redis.Redis) -> int:
    """Send the oldest rows, in order; returns how many went. What Redis does not take stays, with all behind it.

    Raises:
        redis.RedisError, kombu.exceptions.OperationalError: Redis is away or full.
        django.db.OperationalError, django.db.InterfaceError: The database is away or locked.
    """
    rows = list(Outbox.objects.order_by("id")[:BATCH])
    if not rows:
        return 0
    seconds, microseconds = client.time()
    expires = seconds + microseconds / 1e6 + ORDER_LASTS.total_seconds()
    for row in rows:
        try:
            arguments = [COMPLETED[row.task](row.arguments[0], expires)] if row.task in COMPLETED else row.arguments
            if arguments != [None]:
                producer(settings.REDIS_URL).send_task(row.task, args=arguments, queue=row.queue)
        except TRANSIENT:
            raise  # the row stays for the next call
        except Exception:
            log.exception("Dropped a message that cannot be sent: %s to %s", row.task, row.queue)
        row.delete()
    return len(rows)


@lru_cache(maxsize=4)
def producer(url: str) -> Celery:
    """What sends to hosts' queues."""
    app = Celery("meshboard-controller", broker=url, set_as_current=False)
    app.conf.update(
        task_serializer="json",
        task_ignore_result=True,
        task_publish_retry=False,  # the row stays, and the next tick tries again
        broker_transport_options={"socket_timeout": 5, "socket_connect_timeout": 2, "socket_keepalive": True},
    )
    return app


def _order(told: Any, expires: float) -> Any:
    """The order as it leaves, None where nobody waits for it any more; one that no host could read fails its job."""
    node = told["gang"]["node"] if "gang" in told else 0
    of_attempt = Member.objects.filter(attempt__job_id=told["job"], attempt__number=told["attempt"], node=node)
    member = of_attempt.filter(ended__isnull=True).select_related("attempt__job__owner", "host").first()
    if member is None:
        return None
    try:
        handed = {"variables": sealed} if (sealed := sealed_for(member, member.attempt.job)) else {}
        return validate_launch_order({**_with_loan(told, node), **handed, "expires": expires})
    except (BadMessageError, UnreadableError) as error:
        fail_unsent(member, f"the order to the host cannot be sent: {error}")
        return None


def _with_loan(told: Any, node: int) -> Any:
    """The first host of an attempt that is lent a checkpoint is told the secret."""
    job, attempt = told["job"], told["attempt"]
    if node or "checkpoint" not in told or not _lent(job, attempt).exists():
        return told
    return {**told, "checkpoint": {**told["checkpoint"], "lent": derive_loan_secret(job, attempt)}}


def _lend_order(told: Any, expires: float) -> Any:
    """The order as it leaves, None where the attempt has ended meanwhile."""
    if not _lent(told["job"], told["attempt"]).filter(attempt__ended__isnull=True).exists():
        return None
    return validate_lend_order({**told, "secret": derive_loan_secret(told["job"], told["attempt"]), "expires": expires})


def _lent(job: str, attempt: int) -> QuerySet[Loan]:
    return Loan.objects.filter(attempt__job_id=job, attempt__number=attempt)


# What is added to an order as it is sent, by its task.
COMPLETED: dict[str, Callable[[Any, float], Any]] = {TASK_LAUNCH: _order, TASK_LEND: _lend_order}
