"""Select the fields of a spec that hosts need.

Select the hosts that can send a checkpoint to a retry.

Sends what transactions decided to send. Sent and then not deleted means sent twice, which hosts expect.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
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
from contracts.control import VERSION, ResumeCheckpoint
from contracts.names import TASK_LAUNCH, TASK_LEND, host_queue
from jobs.core.credentials import derive_loan_secret
from jobs.models import Attempt, Host, Job, Loan, Member, Outbox
from jobs.people.variables import UnreadableError, sealed_for
from jobs.queue.attempt_completion import fail_unsent

SERVER_FIELDS = ("project", "run", "retry", "after", "after_failed")
SERVER_RESOURCE_FIELDS = ("max_hosts", "pool", "labels")


def spec_for_hosts(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the spec without the fields that only the server reads.

    A host may have the previous version, which rejects unknown fields. Drop a new field here while it has its default.
    """
    sent = {name: value for name, value in spec.items() if name not in SERVER_FIELDS}
    if "resources" in sent:
        resources = spec["resources"].items()
        sent["resources"] = {name: value for name, value in resources if name not in SERVER_RESOURCE_FIELDS}
    return sent


def find_newest_checkpoint(job: Job) -> ResumeCheckpoint | None:
    """The newest checkpoint that an earlier attempt told of: rank 0 writes it, on the first host."""
    told = Attempt.objects.filter(job=job, number__lt=job.attempt).exclude(checkpoint="").order_by("-number")
    found = told.filter(members__node=0).values_list("checkpoint", "members__host_name").first()
    return ResumeCheckpoint(name=found[0], host=found[1]) if found else None


def create_loans(placed: Iterable[tuple[Attempt, Collection[str]]]) -> list[Outbox]:
    """Have retries on these hosts sent what none of them has; the orders for those who do.

    A host that is silent, or was removed, is not asked: the attempt then fails and names it.
    """
    wanted = {}
    for attempt, hosts in placed:
        kept = find_newest_checkpoint(attempt.job) if attempt.number > 1 else None
        if kept is not None and kept["host"] not in hosts:
            wanted[attempt] = kept["host"]
    if not wanted:
        return []
    lenders = {host.name: host for host in Host.objects.reachable().filter(name__in=wanted.values())}
    loans = [Loan(attempt=one, host=lenders[name]) for one, name in wanted.items() if name in lenders]
    return [order(loan) for loan in Loan.objects.bulk_create(loans)]


def order(loan: Loan) -> Outbox:
    """For the host that lends; its secret and when it expires are set as it is sent."""
    job = loan.attempt.job
    told: dict[str, Any] = {"v": VERSION, "job": job.id, "attempt": loan.attempt.number, "owner": job.owner_id}
    return Outbox(task=TASK_LEND, queue=host_queue(loan.host.name), arguments=[told])


log = logging.getLogger(__name__)

BATCH = 500
TRANSIENT = (redis.RedisError, kombu.exceptions.OperationalError, db.OperationalError, db.InterfaceError)
ORDER_LIFETIME = timedelta(seconds=60)  # a host carries no older order out


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
    expires = seconds + microseconds / 1e6 + ORDER_LIFETIME.total_seconds()
    for row in rows:
        try:
            arguments = (
                [ORDER_BUILDERS[row.task](row.arguments[0], expires)] if row.task in ORDER_BUILDERS else row.arguments
            )
            if arguments != [None]:
                get_producer(settings.REDIS_URL).send_task(row.task, args=arguments, queue=row.queue)
        except TRANSIENT:
            raise  # the row stays for the next call
        except Exception:
            log.exception("Dropped a message that cannot be sent: %s to %s", row.task, row.queue)
        row.delete()
    return len(rows)


@lru_cache(maxsize=4)
def get_producer(url: str) -> Celery:
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
ORDER_BUILDERS: dict[str, Callable[[Any, float], Any]] = {TASK_LAUNCH: _order, TASK_LEND: _lend_order}
