"""Build orders to hosts, and send them from the outbox.

An order can be sent twice if the process ends before it deletes the row. Hosts ignore repeated orders.
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
from django.db.models import JSONField, QuerySet, Value

from contracts.codec import BadMessageError, validate_launch_order, validate_lend_order
from contracts.control import VERSION, Gang, LaunchOrder, Node, ResumeCheckpoint, UploadOrder
from contracts.names import TASK_LAUNCH, TASK_LEND, host_queue
from contracts.traces import log_launch_order
from jobs.core.credentials import derive_loan_secret, derive_upload_secret
from jobs.models import Attempt, Host, Job, Loan, Member, Outbox
from jobs.people.variables import UnreadableError, encrypt_for_host
from jobs.queue.attempt_completion import fail_unsent

log = logging.getLogger(__name__)

SERVER_FIELDS = ("project", "run", "retry", "after", "after_failed", "memory")
SERVER_SECTION_FIELDS = {"resources": ("max_hosts", "pool", "labels"), "script": ("plan",)}
# Fields that the previous version of a host does not know, with their defaults
NEW_DEFAULTS: dict[str, dict[str, Any]] = {
    "script": {"command": None, "upload": None, "log_pattern": None},
    "model": {"block": None},
    "resources": {"disk_limit_bytes": None},
}
NEW_MOE_DEFAULTS: dict[str, Any] = {"shared_ffn_hidden_size": None, "shared_gate": False}
MAX_SENT_ROWS = 500  # per call
TRANSIENT_ERRORS = (redis.RedisError, kombu.exceptions.OperationalError, db.OperationalError, db.InterfaceError)
ORDER_LIFETIME = timedelta(seconds=60)  # hosts ignore older orders


def spec_for_hosts(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the spec without the fields that only the server reads, and without new fields at their defaults.

    A host may have the previous version, which rejects unknown fields.
    """
    sent = {name: value for name, value in spec.items() if name not in SERVER_FIELDS}
    for section, fields in SERVER_SECTION_FIELDS.items():
        if sent.get(section) is not None:
            sent[section] = {name: value for name, value in sent[section].items() if name not in fields}
    for section, defaults in NEW_DEFAULTS.items():
        if sent.get(section) is not None:
            sent[section] = _drop_defaults(sent[section], defaults)
    if moe := (sent.get("model") or {}).get("moe"):
        sent["model"]["moe"] = _drop_defaults(moe, NEW_MOE_DEFAULTS)
    return sent


def _drop_defaults(section: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in section.items() if name not in defaults or value != defaults[name]}


def find_newest_checkpoint(job: Job) -> ResumeCheckpoint | None:
    """Return the latest checkpoint of earlier attempts. Rank 0 writes it on the first host."""
    attempts = Attempt.objects.filter(job=job, number__lt=job.attempt).exclude(checkpoint="").order_by("-number")
    found = attempts.filter(members__node=0).values_list("checkpoint", "members__host_name").first()
    return ResumeCheckpoint(name=found[0], host=found[1]) if found else None


def build_launch_order(job: Job, member: Member, slots: list[int], nodes: list[Node]) -> Outbox:
    """Build the unsaved order that starts a member of an attempt."""
    order = LaunchOrder(
        v=VERSION,
        job=job.id,
        attempt=job.attempt,
        spec=spec_for_hosts(job.spec),
        slots=slots,
        expires=0.0,  # set by `deliver`
        owner=job.owner_id,
    )
    if len(nodes) > 1:
        order["gang"] = Gang(node=member.node, nodes=nodes, lease_s=settings.LEASE_S)
    if job.attempt > 1 and (checkpoint := find_newest_checkpoint(job)):
        order["checkpoint"] = checkpoint
    if job.trace_id:
        order["trace"] = job.trace_id
    if job.upload is not None:
        order["upload"] = UploadOrder(sha256=job.upload.sha256, size=job.upload.size)
    # With an expression, Django inserts rows. Without it, psycopg quotes each letter of a JSON column array.
    arguments = Value([order], JSONField())
    return Outbox(task=TASK_LAUNCH, queue=host_queue(member.host_name), arguments=arguments)


def resend_launch_order(job: Job, member: Member) -> None:
    """Write the order of a member to the outbox again. Hosts start an attempt and send a checkpoint only once."""
    members = member.attempt.members.select_related("host")
    nodes = [Node(host=m.host_name, address=m.host.address if m.host else "", ranks=m.num_ranks) for m in members]
    slots = sorted(member.allocations.values_list("slot", flat=True))
    build_launch_order(job, member, slots, nodes).save()
    if member.node == 0 and (loan := Loan.objects.filter(attempt=member.attempt).first()):
        _build_loan_order(loan).save()


def create_loans(placed: Iterable[tuple[Attempt, Collection[str]]]) -> list[Outbox]:
    """Create the loans of checkpoints that retries need from other hosts, and return the unsaved orders.

    A silent or removed host gets no order. The attempt then fails with the name of the host.
    """
    lender_names = {}
    for attempt, hosts in placed:
        checkpoint = find_newest_checkpoint(attempt.job) if attempt.number > 1 else None
        if checkpoint is not None and checkpoint["host"] not in hosts:
            lender_names[attempt] = checkpoint["host"]
    if not lender_names:
        return []
    lenders = {host.name: host for host in Host.objects.reachable().filter(name__in=lender_names.values())}
    loans = [Loan(attempt=one, host=lenders[name]) for one, name in lender_names.items() if name in lenders]
    return [_build_loan_order(loan) for loan in Loan.objects.bulk_create(loans)]


def _build_loan_order(loan: Loan) -> Outbox:
    job = loan.attempt.job
    order: dict[str, Any] = {"v": VERSION, "job": job.id, "attempt": loan.attempt.number, "owner": job.owner_id}
    return Outbox(task=TASK_LEND, queue=host_queue(loan.host.name), arguments=[order])


def deliver(client: redis.Redis) -> int:
    """Send the oldest rows in order, and return their number. Rows that Redis does not accept remain.

    Raises:
        redis.RedisError, kombu.exceptions.OperationalError: Redis is unavailable or full.
        django.db.OperationalError, django.db.InterfaceError: The database is unavailable or locked.
    """
    rows = list(Outbox.objects.order_by("id")[:MAX_SENT_ROWS])
    if not rows:
        return 0
    seconds, microseconds = client.time()
    expires = seconds + microseconds / 1e6 + ORDER_LIFETIME.total_seconds()
    for row in rows:
        try:
            build = ORDER_BUILDERS.get(row.task)
            arguments = [build(row.arguments[0], expires)] if build else row.arguments
            if arguments != [None]:
                get_producer(settings.REDIS_URL).send_task(row.task, args=arguments, queue=row.queue)
                if row.task == TASK_LAUNCH:
                    log_launch_order(log, f"sent to {row.queue}", arguments[0])
        except TRANSIENT_ERRORS:
            raise  # the row stays for the next call
        except Exception:
            log.exception("Dropped a message that cannot be sent: %s to %s", row.task, row.queue)
        row.delete()
    return len(rows)


@lru_cache(maxsize=4)
def get_producer(url: str) -> Celery:
    """Return the Celery app that sends tasks to the queues of hosts."""
    app = Celery("meshboard-controller", broker=url, set_as_current=False)
    app.conf.update(
        task_serializer="json",
        task_ignore_result=True,
        task_publish_retry=False,  # the row stays, and the next tick tries again
        broker_transport_options={"socket_timeout": 5, "socket_connect_timeout": 2, "socket_keepalive": True},
    )
    return app


def _complete_launch_order(order: Any, expires: float) -> Any:
    """Add secrets and expiry. Return None if the member has ended. An invalid order fails the job."""
    job, attempt = order["job"], order["attempt"]
    node = order["gang"]["node"] if "gang" in order else 0
    members = Member.objects.filter(attempt__job_id=job, attempt__number=attempt, node=node, ended__isnull=True)
    member = members.select_related("attempt__job__owner", "host").first()
    if member is None:
        return None
    if node == 0 and "checkpoint" in order and _filter_loans(job, attempt).exists():
        order = {**order, "checkpoint": {**order["checkpoint"], "lent": derive_loan_secret(job, attempt)}}
    if "upload" in order:
        order = {**order, "upload": {**order["upload"], "secret": derive_upload_secret(job, attempt)}}
    try:
        variables = {"variables": sealed} if (sealed := encrypt_for_host(member, member.attempt.job)) else {}
        return validate_launch_order({**order, **variables, "expires": expires})
    except (BadMessageError, UnreadableError) as error:
        fail_unsent(member, f"the order to the host cannot be sent: {error}")
        return None


def _complete_loan_order(order: Any, expires: float) -> Any:
    """Add the secret and expiry. Return None if the attempt has ended."""
    job, attempt = order["job"], order["attempt"]
    if not _filter_loans(job, attempt).filter(attempt__ended__isnull=True).exists():
        return None
    return validate_lend_order({**order, "secret": derive_loan_secret(job, attempt), "expires": expires})


def _filter_loans(job: str, attempt: int) -> QuerySet[Loan]:
    return Loan.objects.filter(attempt__job_id=job, attempt__number=attempt)


# Secrets are added when an order is sent, so the outbox stores none.
ORDER_BUILDERS: dict[str, Callable[[Any, float], Any]] = {
    TASK_LAUNCH: _complete_launch_order,
    TASK_LEND: _complete_loan_order,
}
