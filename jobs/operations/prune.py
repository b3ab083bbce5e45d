"""Delete old data. docs/reference/bounds.md lists the limits."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import redis
from axes.models import AccessAttempt, AccessFailureLog, AccessLog
from django.core.management import call_command
from django.db.models import Count, QuerySet
from django.utils import timezone
from knox.models import AuthToken

from contracts.names import events_stream, host_queue, telemetry_stream
from jobs.models import Host, IdempotentRequest, Lease, Member, RunToken, StateChange
from jobs.people.notifications import outbox
from jobs.planning import uploads
from jobs.queue.hosts import joining
from jobs.queue.inbound import event_handlers
from jobs.queue.work_lease import CONTROLLER
from jobs.runs.traces.imports import store

log = logging.getLogger(__name__)

PRUNE_INTERVAL = timedelta(hours=1)
IDEMPOTENCY_LIFETIME = timedelta(days=7)
LOGIN_LIFETIME = timedelta(days=30)
RUN_TOKEN_LIFETIME = timedelta(days=7)  # after the end of the attempt, whose reports are then rejected
TELEMETRY_LIFETIME = timedelta(days=1)  # like the lifetime that supervisors set
QUEUE_LIFETIME = timedelta(days=1)  # of silent hosts, whose orders have expired
MAX_STATE_CHANGES = 1000  # per job
TELEMETRY_KEYS = "meshboard:telemetry:*"


def prune_if_due(client: redis.Redis) -> None:
    """Prune once per hour, in any controller."""
    row = Lease.objects.filter(name=CONTROLLER).first()
    now = timezone.now()
    if row is None or (row.pruned is not None and now - PRUNE_INTERVAL < row.pruned <= now):
        return
    if Lease.objects.filter(name=CONTROLLER, pruned=row.pruned).update(pruned=now) == 1:
        removed = {what: count for what, count in prune(client).items() if count}
        if removed:
            log.info("pruned %s", ", ".join(f"{count:,} {what}" for what, count in removed.items()))


def prune(client: redis.Redis) -> dict[str, int]:
    """Delete all old data. Return the number of deleted rows per kind."""
    now = timezone.now()
    steps: dict[str, Callable[[], int]] = {
        "Idempotency-Keys": lambda: _delete(IdempotentRequest.objects.filter(created__lt=now - IDEMPOTENCY_LIFETIME)),
        "expired tokens": lambda: _delete(AuthToken.objects.filter(expiry__lt=now)),
        "join tokens": joining.delete_expired_tokens,
        "tokens of runs": lambda: _delete(RunToken.objects.filter(attempt__ended__lt=now - RUN_TOKEN_LIFETIME)),
        "logins": lambda: sum(
            _delete(model.objects.filter(attempt_time__lt=now - LOGIN_LIFETIME))
            for model in (AccessAttempt, AccessFailureLog, AccessLog)
        ),
        "dead letters": event_handlers.delete_oldest_dead_letters,
        "changes of status": _delete_state_changes,
        "deliveries": outbox.delete_old_deliveries,
        "queues of silent hosts and messages of removed hosts": lambda: _delete_queues(client),
        "imported traces": store.delete_expired,
        "uploads": uploads.delete_unneeded,
        "telemetry streams of ended attempts, which now expire": lambda: _expire_streams(client),
    }
    call_command("clearsessions")
    removed, failed = {}, list[Exception]()
    for what, step in steps.items():
        try:
            removed[what] = step()
        except Exception as error:  # continue with the other steps
            error.add_note(f"The error occurred while deleting {what}.")
            failed.append(error)
    if failed:
        raise ExceptionGroup("Some old data could not be deleted.", failed)
    return removed


def _delete(rows: QuerySet[Any]) -> int:
    """Return the number of deleted rows without their dependents."""
    return rows.delete()[1].get(rows.model._meta.label, 0)


def _delete_state_changes() -> int:
    """Keep the first and the latest changes of a job with too many."""
    counted = StateChange.objects.order_by().values_list("job_id").annotate(count=Count("id"))
    removed = 0
    for job_id, _ in counted.filter(count__gt=MAX_STATE_CHANGES):
        changes = StateChange.objects.filter(job_id=job_id)
        first = changes.values_list("id", flat=True)[0]
        min_id = changes.order_by("-id").values_list("id", flat=True)[MAX_STATE_CHANGES - 2]
        removed += changes.filter(id__gt=first, id__lt=min_id).delete()[0]
    return removed


def _delete_queues(client: redis.Redis) -> int:
    silent = Host.objects.filter(last_seen__lt=timezone.now() - QUEUE_LIFETIME).values_list("name", flat=True)
    gone = Host.objects.filter(removed__isnull=False).values_list("name", flat=True)
    keys = [*(host_queue(name) for name in silent), *(events_stream(name) for name in gone)]
    removed: Any = client.delete(*keys) if keys else 0
    return int(removed)


def _expire_streams(client: redis.Redis) -> int:
    """Set the lifetime of streams whose supervisor died before it could."""
    expiring = 0
    for keys in _in_chunks(client.scan_iter(match=TELEMETRY_KEYS, count=500), 500):
        with client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.ttl(key)
            lasting = [key for key, ttl in zip(keys, pipe.execute(), strict=True) if ttl == -1]
        live = _get_live_streams(lasting)
        with client.pipeline(transaction=False) as pipe:
            for key in set(lasting) - live:
                pipe.expire(key, TELEMETRY_LIFETIME)
            expiring += len(pipe.execute())
    return expiring


def _get_live_streams(keys: list[bytes]) -> set[bytes]:
    members = Member.objects.filter(attempt__ended__isnull=True).order_by()
    rows = members.values_list("attempt__job_id", "attempt__number", "node")
    return {telemetry_stream(job, number, node).encode() for job, number, node in rows} & set(keys)


def _in_chunks(keys: Iterator[bytes], size: int) -> Iterator[list[bytes]]:
    while chunk := list(itertools.islice(keys, size)):
        yield chunk
