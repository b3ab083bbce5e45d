"""Newer events of hosts are applied, and silence alone neither loses a job nor frees a slot."""

from __future__ import annotations

import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.utils import timezone

from contracts.names import TASK_ACKNOWLEDGE, TASK_LAUNCH, TASK_RESEND_REPORT, cancel_key, events_stream, host_queue
from jobs.core.job_details import serialize_job
from jobs.models import Attempt, Cursor, DeadLetter, Host, Job, Member, Outbox, SlotAllocation, StateChange, Status
from jobs.queue import actions
from jobs.queue.inbound import streams
from jobs.queue.inbound.reconcile import reconcile
from jobs.queue.inbound.streams import read_events
from jobs.queue.scheduling.scheduler import schedule
from tests.jobs.conftest import attempt_event, host_event, report, send_event, sign_event
from tests.planner.wrong_specs import GOOD
from tests.support.processes import RedisServer

EVENTS = events_stream("host-a")
LONG_AGO = timezone.now() - timedelta(days=300)


@pytest.fixture
def job(owner: User, make_host: Callable[..., Host]) -> Job:
    """Create a job that is placed on all slots of host-a."""
    make_host()
    made, _ = actions.submit(owner, GOOD)
    schedule()
    return made


def receive(client: redis.Redis, *events: dict[str, Any]) -> None:
    for event in events:
        send_event(client, event)
    read_events(client)
    reconcile(client, LONG_AGO)


def status(job: Job) -> str:
    job.refresh_from_db()
    return job.status


def start_running(job: Job, client: redis.Redis, **changes: Any) -> None:
    receive(client, host_event(attempts=[report(job.id, 1, "running")], **changes))
    assert status(job) == Status.RUNNING
    Member.objects.update(ordered=timezone.now() - timedelta(minutes=5))


def set_silent(**time: int) -> None:
    Host.objects.update(last_seen=timezone.now() - timedelta(**time))


def list_silent(job: Job) -> list[bool]:
    return [member["silent"] for member in serialize_job(job)["members"]]


def test_silent_host_keeps_job_and_slots(job: Job, live_redis: redis.Redis) -> None:
    start_running(job, live_redis)
    set_silent(days=100)
    reconcile(live_redis, LONG_AGO)
    reconcile(live_redis, LONG_AGO)
    assert status(job) == Status.UNREACHABLE
    assert SlotAllocation.objects.count() == 4
    assert not live_redis.exists(cancel_key(job.id, 1))
    reason = StateChange.objects.filter(job=job).last()
    assert reason is not None
    assert reason.reason.startswith("no contact with host host-a since 20")
    start_running(job, live_redis)
    history = [change.status for change in StateChange.objects.filter(job=job)]
    assert history == ["queued", "starting", "running", "unreachable", "running"]


def test_silence_counts_only_while_events_are_read(job: Job, live_redis: redis.Redis) -> None:
    start_running(job, live_redis)
    set_silent(minutes=20)
    reconcile(live_redis, timezone.now() - timedelta(seconds=29))
    assert (status(job), list_silent(job)) == (Status.RUNNING, [False])
    reconcile(live_redis, timezone.now() - timedelta(seconds=31))
    assert (status(job), list_silent(job)) == (Status.UNREACHABLE, [True])


def test_cancellation_waits_for_a_silent_host(job: Job, live_redis: redis.Redis) -> None:
    start_running(job, live_redis)
    set_silent(hours=1)
    assert actions.cancel(job, "tester")
    reconcile(live_redis, LONG_AGO)
    assert status(job) == Status.CANCELLING
    assert "no contact with host" in job.wait_reason
    assert job.wait_reason.endswith("the job ends when the host has contact again, or when staff mark the host as lost")
    assert live_redis.exists(cancel_key(job.id, 1))
    assert SlotAllocation.objects.count() == 4
    receive(live_redis, host_event(attempts=[report(job.id, 1, "running")]))
    assert (status(job), job.wait_reason) == (Status.CANCELLING, "")


def test_lost_host_cancels_its_attempt_when_it_returns(job: Job, live_redis: redis.Redis) -> None:
    start_running(job, live_redis)
    host = Host.objects.get()
    with pytest.raises(actions.HostConnectedError):
        actions.mark_host_lost(host, "tester")
    set_silent(hours=1)
    assert actions.mark_host_lost(host, "tester") == 1
    assert status(job) == Status.LOST
    assert SlotAllocation.objects.count() == 0
    last = StateChange.objects.filter(job=job).last()
    assert last is not None
    assert last.reason == "host host-a was marked as lost by tester"
    reconcile(live_redis, LONG_AGO)
    live_redis.delete(cancel_key(job.id, 1))
    receive(live_redis, host_event(attempts=[report(job.id, 1, "running")]))
    assert live_redis.exists(cancel_key(job.id, 1))
    host.refresh_from_db()
    assert host.holding == [[job.id, 1, [0, 1, 2, 3]]]
    receive(live_redis, attempt_event(job.id, 1, "exited", "cancelled"))
    host.refresh_from_db()
    assert (status(job), host.holding) == (Status.LOST, [])
    assert Attempt.objects.get().exit["outcome"] == "cancelled"


def test_attempt_missing_from_three_heartbeats_is_lost(job: Job, live_redis: redis.Redis) -> None:
    start_running(job, live_redis)
    receive(live_redis, host_event(), host_event())
    assert (status(job), Member.objects.get().missed) == (Status.RUNNING, 2)
    receive(live_redis, host_event(attempts=[report(job.id, 1, "running")]), host_event(), host_event())
    assert status(job) == Status.RUNNING, "only three consecutive heartbeats count"
    assert SlotAllocation.objects.count() == 4
    receive(live_redis, host_event())
    assert status(job) == Status.LOST
    assert SlotAllocation.objects.count() == 0


def test_requests_the_exit_report_before_losing_an_attempt(job: Job, live_redis: redis.Redis) -> None:
    """A restored database can miss an exit report that the host has deleted as acknowledged."""
    resend_orders = Outbox.objects.filter(task=TASK_RESEND_REPORT)
    receive(live_redis, host_event())
    assert not resend_orders.exists(), "its order can still arrive"
    start_running(job, live_redis)
    receive(live_redis, host_event(), host_event())
    assert [(one.queue, one.arguments) for one in resend_orders] == [(host_queue("host-a"), [job.id, 1])]
    receive(live_redis, host_event(attempts=[report(job.id, 1, "exited", "succeeded")]), host_event(), host_event())
    assert status(job) == Status.SUCCEEDED


def test_resends_a_lost_launch_order(job: Job, live_redis: redis.Redis) -> None:
    Outbox.objects.all().delete()
    Member.objects.update(ordered=timezone.now() - timedelta(minutes=5))
    reconcile(live_redis, LONG_AGO)
    assert Outbox.objects.count() == 0, "its host has sent no heartbeat yet"
    receive(live_redis, *[host_event() for _ in range(5)])
    assert status(job) == Status.STARTING
    reconcile(live_redis, LONG_AGO)
    assert Outbox.objects.get(task=TASK_LAUNCH).arguments[0]["slots"] == [0, 1, 2, 3]


def test_resends_a_launch_order_after_silence(job: Job, live_redis: redis.Redis) -> None:
    Outbox.objects.all().delete()
    set_silent(hours=1)
    reconcile(live_redis, LONG_AGO)
    assert status(job) == Status.UNREACHABLE
    Member.objects.update(ordered=timezone.now() - timedelta(minutes=5))
    receive(live_redis, *[host_event() for _ in range(5)])
    assert Outbox.objects.filter(task=TASK_LAUNCH).count() == 1
    start_running(job, live_redis)


def test_cancelled_launch_with_lost_order_ends(job: Job, live_redis: redis.Redis) -> None:
    actions.cancel(job, "tester")
    receive(live_redis, *[host_event() for _ in range(5)])
    assert status(job) == Status.CANCELLING, "its order can still be executed"
    Member.objects.update(ordered=timezone.now() - timedelta(minutes=5))
    receive(live_redis, host_event())
    assert status(job) == Status.CANCELLED
    assert SlotAllocation.objects.count() == 0


@pytest.mark.parametrize(
    "older",
    [{"sequence": 1}, {"began": 0.5, "sequence": 10**9, "incarnation": "before"}],
    ids=["sequence", "incarnation"],
)
def test_ignores_older_heartbeats(job: Job, live_redis: redis.Redis, older: dict[str, Any]) -> None:
    start_running(job, live_redis)
    before = Host.objects.values().get()
    receive(live_redis, *[host_event(slots=1, boot_id="other", **older) for _ in range(5)])
    assert Host.objects.values().get() == before
    assert (status(job), Member.objects.get().missed) == (Status.RUNNING, 0)


@pytest.mark.parametrize(("ago_s", "max_sequence"), [(0, 1000), (3600, 19_000)])
def test_rejects_impossible_sequence_numbers(live_redis: redis.Redis, db: None, ago_s: int, max_sequence: int) -> None:
    clock: Any = live_redis.time()
    began = float(clock[0] - ago_s)
    receive(live_redis, host_event(sequence=1, began=began))
    receive(live_redis, host_event(sequence=2**53, began=began), host_event(sequence=max_sequence + 500, began=began))
    reasons = list(DeadLetter.objects.values_list("reason", flat=True))
    assert len(reasons) == 2
    assert all("the highest number of a host that started" in reason for reason in reasons)
    receive(live_redis, host_event(sequence=2, began=began, slots=2))
    assert Host.objects.get().slots == 2
    receive(live_redis, host_event(sequence=max_sequence, began=began, slots=3))
    assert Host.objects.get().slots == 3


def test_accepts_sequence_numbers_after_a_clock_change(live_redis: redis.Redis, db: None) -> None:
    live_redis.xadd(EVENTS, sign_event(host_event(sequence=50_000, began=5000.0)), id="1000-0")
    read_events(live_redis)
    assert Host.objects.get().sequence == 50_000


@pytest.mark.parametrize("forged", [{"sequence": 10**9}, {"began": 1e90, "sequence": 1}])
def test_accepts_the_host_after_forged_heartbeats_stop(
    live_redis: redis.Redis, db: None, forged: dict[str, Any]
) -> None:
    receive(live_redis, host_event(slots=2), host_event(slots=1, **forged), host_event(slots=3))
    assert Host.objects.get().slots == 1
    set_silent(seconds=31)
    receive(live_redis, host_event(slots=3))
    assert Host.objects.get().slots == 3


def test_accepts_an_exit_in_an_older_heartbeat(job: Job, live_redis: redis.Redis) -> None:
    start_running(job, live_redis)
    receive(live_redis, host_event(attempts=[report(job.id, 1, "exited", "succeeded")], sequence=0))
    assert status(job) == Status.SUCCEEDED
    assert Outbox.objects.filter(task=TASK_ACKNOWLEDGE).count() == 1


def test_reboot_queues_running_jobs_again(job: Job, live_redis: redis.Redis) -> None:
    start_running(job, live_redis)
    receive(live_redis, host_event(boot_id="after", incarnation="second", began=2.0, sequence=1))
    assert status(job) == Status.QUEUED
    last = StateChange.objects.filter(job=job).last()
    assert last is not None
    assert (last.attempt, last.reason) == (2, "queued again, because the host failed: host host-a was rebooted")
    assert SlotAllocation.objects.count() == 0


def test_reboot_ends_a_cancelled_job(job: Job, live_redis: redis.Redis) -> None:
    start_running(job, live_redis)
    assert actions.cancel(job, "tester")
    receive(live_redis, host_event(boot_id="after", incarnation="second", began=2.0, sequence=1))
    assert status(job) == Status.CANCELLED


def test_accepts_an_exit_report_after_a_reboot(job: Job, live_redis: redis.Redis) -> None:
    start_running(job, live_redis)
    ended = [report(job.id, 1, "exited", "succeeded")]
    receive(live_redis, host_event(boot_id="after", incarnation="second", began=2.0, sequence=1, attempts=ended))
    assert status(job) == Status.SUCCEEDED


def test_pending_launch_survives_a_reboot(job: Job, live_redis: redis.Redis) -> None:
    receive(live_redis, host_event())
    receive(live_redis, host_event(boot_id="after", incarnation="second", began=2.0, sequence=1))
    assert status(job) == Status.STARTING
    assert SlotAllocation.objects.count() == 4


def test_accepts_a_worker_with_an_older_clock_after_silence(job: Job, live_redis: redis.Redis) -> None:
    start_running(job, live_redis, began=5000.0)
    older_worker = {"began": 1400.0, "incarnation": "second"}
    receive(live_redis, host_event(attempts=[report(job.id, 1, "running")], sequence=1, **older_worker))
    assert Host.objects.get().incarnation == "first"
    set_silent(seconds=31)
    receive(live_redis, host_event(attempts=[report(job.id, 1, "running")], sequence=2, **older_worker))
    assert Host.objects.get().incarnation == "second"


def test_restored_redis_loses_no_job(job: Job, redis_service: RedisServer, live_redis: redis.Redis) -> None:
    old = [host_event(), host_event(), host_event(), host_event()]
    receive(live_redis, *old[:3])
    for event in old:
        send_event(live_redis, event)  # Stays in the dump after trimming.
    live_redis.save()
    read_events(live_redis)
    start_running(job, live_redis)
    redis_service.stop(signal.SIGKILL)
    redis_service.start()
    restored = redis_service.client()
    assert restored.xlen(EVENTS) >= 4
    set_silent(hours=1)
    assert read_events(restored) >= 4, "reads the older stream again"
    reconcile(restored, timezone.now())
    assert (status(job), Member.objects.get().missed) == (Status.RUNNING, 0)
    assert read_events(restored) == 0


def test_reads_events_after_redis_was_emptied(job: Job, live_redis: redis.Redis) -> None:
    start_running(job, live_redis)
    live_redis.flushall()
    # The ids are old, as after the clock of Redis was set back by years.
    event = attempt_event(job.id, 1, "exited", "succeeded")
    live_redis.xadd(EVENTS, sign_event(event), id="1000-0")
    assert read_events(live_redis) == 1
    assert status(job) == Status.SUCCEEDED
    assert Cursor.objects.get(name="events:host-a").position == "1000-0"


def test_trims_processed_events(job: Job, live_redis: redis.Redis) -> None:
    receive(live_redis, *[host_event() for _ in range(150)])
    assert live_redis.xlen(EVENTS) <= 100


def test_stores_the_current_note_of_a_member(job: Job, live_redis: redis.Redis) -> None:
    receive(live_redis, host_event(attempts=[report(job.id, 1, "running", note="rank 1 is stopped")]))
    assert Member.objects.get().note == "rank 1 is stopped"
    receive(live_redis, host_event(attempts=[report(job.id, 1, "running")]))
    assert Member.objects.get().note == ""
    receive(live_redis, host_event(attempts=[report(job.id, 1, "running", note="rank 2 is stopped")]))
    receive(live_redis, attempt_event(job.id, 1, "exited", "failed"))
    assert Member.objects.get().note == ""


def test_processes_repeated_events_once(job: Job, live_redis: redis.Redis, django_assert_max_num_queries: Any) -> None:
    for state in ("starting", "running"):
        for _ in range(streams.EVENTS_PER_READ):
            send_event(live_redis, host_event(attempts=[report(job.id, 1, state)]))
            send_event(live_redis, attempt_event(job.id, 1, state))
    send_event(live_redis, attempt_event(job.id, 1, "exited", "succeeded"))
    last = host_event()
    send_event(live_redis, last)
    with django_assert_max_num_queries(200):  # Single events would need many more queries.
        assert sum(iter(lambda: read_events(live_redis), 0)) == 4 * streams.EVENTS_PER_READ + 2
    assert [change.status for change in StateChange.objects.filter(job=job)] == [
        "queued", "starting", "running", "succeeded",
    ]  # fmt: skip
    assert Host.objects.get().sequence == last["sequence"]
