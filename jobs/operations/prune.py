"""Forgets what nobody needs any more. docs/reference/bounds.md lists what is kept, and for how long."""

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
from jobs.people.notifications import deliveries
from jobs.queue.hosts import joining
from jobs.queue.inbound import event_handlers
from jobs.queue.work_lease import CONTROLLER
from jobs.runs.traces.imports import store

log = logging.getLogger(__name__)

EVERY = timedelta(hours=1)
IDEMPOTENCY_LASTS = timedelta(days=7)
LOGINS_LAST = timedelta(days=30)
RUN_TOKENS_LAST = timedelta(days=7)  # of an attempt that ended: what it says then is refused anyway
TELEMETRY_LASTS = timedelta(days=1)  # as long as a supervisor lets its stream live on
QUEUE_LASTS = timedelta(days=1)  # of a silent host: every order in it has long expired
MOST_CHANGES = 1000  # of a job's status
TELEMETRY_KEYS = "meshboard:telemetry:*"


def prune_if_due(client: redis.Redis) -> None:
    """Once an hour, whichever controller works."""
    row = Lease.objects.filter(name=CONTROLLER).first()
    now = timezone.now()
    if row is None or (row.pruned is not None and now - EVERY < row.pruned <= now):
        return
    if Lease.objects.filter(name=CONTROLLER, pruned=row.pruned).update(pruned=now) == 1:
        removed = {what: count for what, count in prune(client).items() if count}
        if removed:
            log.info("pruned %s", ", ".join(f"{count:,} {what}" for what, count in removed.items()))


def prune(client: redis.Redis) -> dict[str, int]:
    """Forget what is over its bound; returns how many of each went."""
    now = timezone.now()
    steps: dict[str, Callable[[], int]] = {
        "Idempotency-Keys": lambda: _delete(IdempotentRequest.objects.filter(created__lt=now - IDEMPOTENCY_LASTS)),
        "expired tokens": lambda: _delete(AuthToken.objects.filter(expiry__lt=now)),
        "join tokens": joining.delete_expired_tokens,
        "tokens of runs": lambda: _delete(RunToken.objects.filter(attempt__ended__lt=now - RUN_TOKENS_LAST)),
        "logins": lambda: sum(
            _delete(model.objects.filter(attempt_time__lt=now - LOGINS_LAST))
            for model in (AccessAttempt, AccessFailureLog, AccessLog)
        ),
        "dead letters": event_handlers.delete_oldest_dead_letters,
        "changes of status": _forget_changes,
        "deliveries": deliveries.forget_old,
        "queues of silent hosts and messages of removed hosts": lambda: _forget_queues(client),
        "imported traces": store.delete_expired,
        "telemetry streams of ended attempts, which now expire": lambda: _let_streams_expire(client),
    }
    call_command("clearsessions")
    removed, failed = {}, list[Exception]()
    for what, step in steps.items():
        try:
            removed[what] = step()
        except Exception as error:  # one that fails holds up no other
            error.add_note(f"The error occurred while deleting {what}.")
            failed.append(error)
    if failed:
        raise ExceptionGroup("Some old data could not be deleted.", failed)
    return removed


def _delete(rows: QuerySet[Any]) -> int:
    """How many of these went, with what hangs on them."""
    return rows.delete()[1].get(rows.model._meta.label, 0)


def _forget_changes() -> int:
    """A job that goes back and forth keeps its first change and its newest."""
    counted = StateChange.objects.order_by().values_list("job_id").annotate(count=Count("id"))
    removed = 0
    for job_id, _ in counted.filter(count__gt=MOST_CHANGES):
        changes = StateChange.objects.filter(job_id=job_id)
        first = changes.values_list("id", flat=True)[0]
        oldest_kept = changes.order_by("-id").values_list("id", flat=True)[MOST_CHANGES - 2]
        removed += changes.filter(id__gt=first, id__lt=oldest_kept).delete()[0]
    return removed


def _forget_queues(client: redis.Redis) -> int:
    silent = Host.objects.filter(last_seen__lt=timezone.now() - QUEUE_LASTS).values_list("name", flat=True)
    gone = Host.objects.filter(removed__isnull=False).values_list("name", flat=True)
    keys = [*(host_queue(name) for name in silent), *(events_stream(name) for name in gone)]
    removed: Any = client.delete(*keys) if keys else 0
    return int(removed)


def _let_streams_expire(client: redis.Redis) -> int:
    """A stream whose supervisor died before it could say when to forget it."""
    expiring = 0
    for keys in _in_chunks(client.scan_iter(match=TELEMETRY_KEYS, count=500), 500):
        with client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.ttl(key)
            lasting = [key for key, ttl in zip(keys, pipe.execute(), strict=True) if ttl == -1]
        live = _unended(lasting)
        with client.pipeline(transaction=False) as pipe:
            for key in set(lasting) - live:
                pipe.expire(key, TELEMETRY_LASTS)
            expiring += len(pipe.execute())
    return expiring


def _unended(keys: list[bytes]) -> set[bytes]:
    """Of these streams, those whose attempt may still write."""
    members = Member.objects.filter(attempt__ended__isnull=True).order_by()
    rows = members.values_list("attempt__job_id", "attempt__number", "node")
    return {telemetry_stream(job, number, node).encode() for job, number, node in rows} & set(keys)


def _in_chunks(keys: Iterator[bytes], size: int) -> Iterator[list[bytes]]:
    while chunk := list(itertools.islice(keys, size)):
        yield chunk
