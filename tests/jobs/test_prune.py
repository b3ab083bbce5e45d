"""Deletion of old rows and streams."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from io import StringIO

import pytest
import redis
from axes.models import AccessLog
from django.contrib.auth.models import User
from django.contrib.sessions.models import Session
from django.core.management import call_command
from django.utils import timezone
from knox.models import AuthToken

from contracts.names import host_queue, telemetry_stream
from jobs.models import (
    Attempt,
    Host,
    IdempotentRequest,
    Job,
    Lease,
    Member,
    RunToken,
    StateChange,
    Status,
    TokenGrant,
)
from jobs.operations import prune
from jobs.operations.prune import prune_if_due
from jobs.people import tokens
from jobs.queue import actions, attempt_completion
from jobs.queue.scheduling.scheduler import schedule
from jobs.queue.work_lease import WorkLease
from tests.planner.wrong_specs import GOOD

NOW = timezone.now()
OLD = NOW - timedelta(days=40)


def test_deletes_only_old_rows(
    owner: User, make_host: Callable[..., Host], live_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prune, "MAX_STATE_CHANGES", 5)
    make_host()
    Host.objects.create(name="gone", slots=1, device="cpu", device_name="", memory_bytes=1, boot_id="", last_seen=OLD)
    ended, _ = actions.submit(owner, GOOD, key="old")
    schedule()
    attempt_completion.lose_member(Member.objects.get(), "gone")
    running, _ = actions.submit(owner, GOOD, key="new")
    schedule()
    IdempotentRequest.objects.filter(key="old").update(created=OLD)
    for number in range(20):
        StateChange.objects.create(job=ended, attempt=1, status=Status.RUNNING, reason=str(number))
    for expiry in (OLD, NOW + timedelta(days=1)):
        AuthToken.objects.create(owner)
        AuthToken.objects.filter(expiry__isnull=True).update(expiry=expiry)
        Session.objects.create(session_key=str(expiry), session_data="", expire_date=expiry)
        log = AccessLog.objects.create(username="a")
        AccessLog.objects.filter(pk=log.pk).update(attempt_time=expiry)
    AuthToken.objects.update(expiry=None)
    AuthToken.objects.filter(pk=AuthToken.objects.all()[0].pk).update(expiry=OLD)
    streams = [telemetry_stream(job, 1) for job in (ended.id, running.id, "deleted")]
    for stream in streams:
        live_redis.xadd(stream, {"b": b""})
    for name in ("gone", "host-a"):
        live_redis.lpush(host_queue(name), b"an order")

    output = StringIO()
    call_command("prune", stdout=output)
    assert "1 Idempotency-Keys" in output.getvalue()

    assert list(IdempotentRequest.objects.values_list("key", flat=True)) == ["new"]
    assert AuthToken.objects.count() == Session.objects.count() == AccessLog.objects.count() == 1
    reasons = list(StateChange.objects.filter(job=ended).values_list("reason", flat=True))
    assert reasons == ["submitted", "16", "17", "18", "19"]
    assert [live_redis.ttl(stream) > 0 for stream in streams] == [True, False, True]
    assert [live_redis.exists(host_queue(name)) for name in ("gone", "host-a")] == [0, 1]
    assert Job.objects.count() == 2


def test_deletes_expired_tokens_with_their_grants(
    owner: User, make_host: Callable[..., Host], live_redis: redis.Redis
) -> None:
    """An expired token must not stop the deletion of other rows."""
    for name in ("ci", "stays"):
        tokens.create_token(owner, tokens.ApiTokenRequest(name=name, scopes=["read"]))
    AuthToken.objects.filter(grant__name="ci").update(expiry=OLD)
    make_host()
    for number in (1, 2):
        job, _ = actions.submit(owner, GOOD)
        RunToken.objects.create(attempt=Attempt.objects.create(job=job, number=1), digest=str(number))
    Attempt.objects.filter(tokens__digest="1").update(ended=OLD)
    removed = prune.prune(live_redis)
    assert (removed["expired tokens"], removed["tokens of runs"]) == (1, 1)
    assert TokenGrant.objects.get().name == "stays"
    assert RunToken.objects.get().digest == "2"


def test_failed_step_does_not_stop_the_others(
    owner: User, live_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> int:
        raise OSError("no")

    monkeypatch.setattr(prune.event_handlers, "delete_oldest_dead_letters", fail)
    stream = telemetry_stream("deleted", 1)
    live_redis.xadd(stream, {"b": b""})
    with pytest.RaisesGroup(OSError):
        prune.prune(live_redis)
    assert live_redis.ttl(stream) > 0


def test_prunes_once_per_hour(db: None, live_redis: redis.Redis) -> None:
    WorkLease().hold()
    prune_if_due(live_redis)
    first = Lease.objects.get().pruned
    prune_if_due(live_redis)
    assert Lease.objects.get().pruned == first
    for other in (
        timezone.now() - timedelta(minutes=61),
        timezone.now() + timedelta(days=9),
    ):  # The second is after a clock was set back.
        Lease.objects.update(pruned=other)
        prune_if_due(live_redis)
        assert Lease.objects.get().pruned != other
