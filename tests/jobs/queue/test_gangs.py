"""Run attempts on several hosts: they end with their last member, with the report of its cause."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.utils import timezone

from contracts.codec import validate_launch_order
from contracts.names import TASK_LAUNCH, cancel_key
from jobs.models import Attempt, DeadLetter, Host, Job, Member, Outbox, SlotAllocation, Status
from jobs.queue import actions, attempt_completion
from jobs.queue.inbound.reconcile import reconcile
from jobs.queue.inbound.streams import read_events
from jobs.queue.lifecycle import start_jobs
from jobs.queue.orders import resend_launch_order
from jobs.queue.scheduling.scheduler import schedule
from jobs.queue.scheduling.snapshot import find_running_attempts
from tests.jobs.conftest import attempt_event, host_event, report, send_event
from tests.planner.wrong_specs import GOOD

SINCE = timezone.now() - timedelta(hours=1)
SUMMARY: dict[str, Any] = {
    "steps": 5,
    "tokens_per_s": None,
    "losses": [],
    "eval_losses": [],
    "cells": {},
    "verdict": {},
}


@pytest.fixture
def gang(owner: User, make_host: Callable[..., Host], live_redis: redis.Redis) -> Job:
    """Create a running job with two ranks on each of two hosts."""
    hosts = [make_host(name) for name in ("host-a", "host-b")]
    Host.objects.update(address="10.0.0.1")
    job, _ = actions.submit(owner, {**GOOD, "layout": {"dp": 2, "tp": 2}})
    start_jobs({job.id: (1, "placed")})
    attempt = Attempt.objects.create(job=job, number=1)
    for node, host in enumerate(hosts):
        member = Member.objects.create(
            attempt=attempt, node=node, host=host, host_name=host.name, first_rank=2 * node, num_ranks=2,
            ordered=timezone.now(),
        )  # fmt: skip
        SlotAllocation.objects.bulk_create(SlotAllocation(host=host, slot=slot, member=member) for slot in (0, 1))
        send_event(live_redis, attempt_event(job.id, 1, "running", host=host.name))
    read_events(live_redis)
    job.refresh_from_db()
    assert job.status == Status.RUNNING
    return job


def falls_silent(host: str) -> None:
    """Host with its worker and supervisors."""
    ago = timezone.now() - timedelta(minutes=5)
    Host.objects.filter(name=host).update(last_seen=ago)
    Member.objects.filter(host__name=host).update(heard=ago)


def ends(client: redis.Redis, job: Job, host: str, outcome: str, **told: Any) -> Job:
    event = attempt_event(job.id, 1, "exited", outcome, host)
    event["report"]["exit"] |= told
    send_event(client, event)
    read_events(client)
    job.refresh_from_db()
    return job


def test_gang_succeeds_when_all_members_succeed(gang: Job, live_redis: redis.Redis) -> None:
    parts = {"parameters": 1, "gradients": 1, "optimizer": 2, "copies": 0, "gradients_then": None, "beside": 3}
    told = {**SUMMARY, "peak_bytes": {"2": 7}, "memory": {"2": parts}}
    assert ends(live_redis, gang, "host-b", "succeeded", summary=told).status == "running"
    assert SlotAllocation.objects.count() == 2, "an ended member has no slots"
    reconcile(live_redis, SINCE)
    assert not live_redis.exists(cancel_key(gang.id, 1)), "one that ended well ends no other"
    told = {**SUMMARY, "peak_bytes": {"0": 5}, "memory": {"0": parts}}
    assert ends(live_redis, gang, "host-a", "succeeded", summary=told).status == "succeeded"
    attempt = Attempt.objects.get()
    assert attempt.exit["summary"]["peak_bytes"] == {"0": 5, "2": 7}
    assert attempt.exit["summary"]["memory"] == {"0": parts, "2": parts}
    assert attempt.ended is not None
    assert not SlotAllocation.objects.exists()


def test_progress_comes_from_one_member(gang: Job, live_redis: redis.Redis) -> None:
    """The run resumed after step 40, and one member counted one more step before its cancellation."""
    for host, steps in (("host-a", 62), ("host-b", 63)):
        ends(live_redis, gang, host, "cancelled", summary={**SUMMARY, "steps": steps, "ran_steps": steps - 40})
    summary = Attempt.objects.get().exit["summary"]
    assert (summary["steps"], summary["ran_steps"]) == (63, 23)


def test_first_failed_member_ends_the_others(gang: Job, live_redis: redis.Redis) -> None:
    job = ends(live_redis, gang, "host-b", "failed", reason="rank 2: it broke", failed_at=100.0, finished=900.0)
    assert (job.status, job.wait_reason) == (
        "running",
        "rank 2: it broke, so Meshboard ends the job on its other hosts",
    )
    reconcile(live_redis, SINCE)
    assert live_redis.exists(cancel_key(gang.id, 1))
    job = ends(live_redis, gang, "host-a", "failed", reason="rank 0: lost a peer", failed_at=101.0, finished=800.0)
    assert job.status == "failed"
    assert job.history.last().reason == "rank 2: it broke"
    assert Attempt.objects.get().exit["reason"] == "rank 2: it broke"


def test_member_that_lost_a_peer_is_not_the_cause(gang: Job, live_redis: redis.Redis) -> None:
    # A rank that a signal killed is noticed a second later than its peers notice that it is gone.
    ends(live_redis, gang, "host-a", "failed", reason="rank 0: lost a peer", failed_at=100.0, lost_peer=True)
    job = ends(live_redis, gang, "host-b", "failed", reason="rank 2 was killed", failed_at=101.0, lost_peer=False)
    assert (job.status, job.history.last().reason) == ("failed", "rank 2 was killed")


def test_cancelled_member_is_not_the_cause(gang: Job, live_redis: redis.Redis) -> None:
    ends(live_redis, gang, "host-a", "failed", reason="rank 1: it broke")
    job = ends(live_redis, gang, "host-b", "cancelled")
    assert (job.status, job.history.last().reason) == ("failed", "rank 1: it broke")


def test_job_is_lost_after_a_lost_member_and_the_end_of_others(gang: Job, live_redis: redis.Redis) -> None:
    falls_silent("host-b")
    reconcile(live_redis, SINCE)
    gang.refresh_from_db()
    assert gang.status == "unreachable"
    send_event(live_redis, host_event("host-a", attempts=[report(gang.id, 1, "running")]))
    read_events(live_redis)
    gang.refresh_from_db()
    assert gang.status == "unreachable", "one host speaks, the other is silent still"
    assert actions.mark_host_lost(Host.objects.get(name="host-b"), "staff") == 1
    gang.refresh_from_db()
    assert gang.status == "unreachable", "the member on host-a ends first"
    reconcile(live_redis, SINCE)
    assert live_redis.exists(cancel_key(gang.id, 1))
    job = ends(live_redis, gang, "host-a", "cancelled")
    assert (job.status, job.history.last().reason) == ("lost", "host host-b was marked as lost by staff")
    told = Attempt.objects.get().exit
    assert (told["outcome"], told["reason"], told["rank"]) == ("lost", "host host-b was marked as lost by staff", None)


def test_cancellation_waits_for_all_members(gang: Job, live_redis: redis.Redis) -> None:
    assert actions.cancel(gang, "owner")
    assert ends(live_redis, gang, "host-a", "cancelled").status == "cancelling"
    assert ends(live_redis, gang, "host-b", "cancelled").status == "cancelled"


def test_cancelled_gang_reports_the_cancellation(gang: Job, live_redis: redis.Redis) -> None:
    assert actions.cancel(gang, "owner")
    ends(live_redis, gang, "host-a", "cancelled", reason="cancelled on request")
    job = ends(live_redis, gang, "host-b", "failed", reason="connection reset", lost_peer=True)
    assert (job.status, job.history.last().reason) == ("cancelled", "cancelled on request")


def test_launch_orders_have_the_place_in_the_gang(gang: Job) -> None:
    for member in Member.objects.all():
        resend_launch_order(gang, member)
    orders = [row.arguments[0] for row in Outbox.objects.filter(task=TASK_LAUNCH).order_by("id")]
    assert [order["gang"]["node"] for order in orders] == [0, 1]
    assert [node["host"] for node in orders[0]["gang"]["nodes"]] == ["host-a", "host-b"]
    assert {node["ranks"] for node in orders[0]["gang"]["nodes"]} == {2}


def test_repeated_exit_event_changes_nothing(gang: Job, live_redis: redis.Redis) -> None:
    ends(live_redis, gang, "host-a", "failed", reason="first")
    ends(live_redis, gang, "host-a", "succeeded", reason="second")
    assert Member.objects.get(node=0).reason == "first"
    assert attempt_completion.list_attempts_to_end() == [(gang.id, 1)]


@pytest.fixture
def given_up(gang: Job, live_redis: redis.Redis) -> Job:
    """Mark the second host as lost, and requeue the job."""
    falls_silent("host-b")
    actions.mark_host_lost(Host.objects.get(name="host-b"), "staff")
    ends(live_redis, gang, "host-a", "cancelled")
    assert actions.requeue(gang, "owner")
    gang.refresh_from_db()
    return gang


def test_next_attempt_waits_for_the_lease_of_a_silent_host(given_up: Job) -> None:
    now = timezone.now()
    reason = find_running_attempts({given_up.id}, now)[given_up.id]
    assert reason.startswith("attempt 1 may still run on silent host host-b until its lease ends at ")
    schedule()
    given_up.refresh_from_db()
    assert (given_up.status, given_up.wait_reason) == ("queued", reason)
    assert find_running_attempts({given_up.id}, now + timedelta(seconds=3600 - 300)) != {}
    assert find_running_attempts({given_up.id}, now + timedelta(seconds=3600 - 300 + 31)) == {}


def test_next_attempt_starts_after_the_host_has_contact(given_up: Job, live_redis: redis.Redis) -> None:
    send_event(live_redis, host_event("host-b", attempts=[report(given_up.id, 1, "running")]))
    read_events(live_redis)
    assert find_running_attempts({given_up.id})[given_up.id] == "waiting until host host-b ends attempt 1"
    reconcile(live_redis, SINCE)
    assert live_redis.exists(cancel_key(given_up.id, 1))
    send_event(live_redis, host_event("host-b"))
    read_events(live_redis)
    assert find_running_attempts({given_up.id}) == {}


def test_retry_order_has_the_newest_checkpoint(gang: Job, live_redis: redis.Redis) -> None:
    for step in (20, 10):  # as a stream that is read again may bring them
        event = attempt_event(gang.id, 1, "running", host="host-a")
        event["report"]["checkpoint"] = f"{gang.id}/1/step-{step:08d}"
        send_event(live_redis, event)
    foreign = attempt_event(gang.id, 1, "running", host="host-a")
    foreign["report"]["checkpoint"] = "others/1/step-00000099"
    send_event(live_redis, foreign)
    read_events(live_redis)
    assert DeadLetter.objects.get().reason.startswith("checkpoint: others/1/step-00000099 does not belong to attempt")
    for host in ("host-b", "host-a"):
        ends(live_redis, gang, host, "failed")
    assert actions.requeue(gang, "owner")
    Outbox.objects.all().delete()
    schedule()
    order = Outbox.objects.get().arguments[0]
    assert order["checkpoint"] == {"name": f"{gang.id}/1/step-00000020", "host": "host-a"}
    validate_launch_order({**order, "expires": 1.0})
