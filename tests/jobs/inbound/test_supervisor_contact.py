"""Supervisors keep their jobs reachable after the host worker has died."""

from __future__ import annotations

from datetime import timedelta

import pytest
import redis
from django.contrib.auth.models import User
from django.utils import timezone

from contracts.names import TASK_LAUNCH, cancel_key
from jobs.core.job_details import serialize_job
from jobs.models import Attempt, Cursor, Host, Job, Member, Outbox, SlotAllocation, StateChange, Status
from jobs.queue import actions, attempt_completion
from jobs.queue.inbound.reconcile import reconcile
from jobs.queue.inbound.streams import read_events
from jobs.queue.scheduling.scheduler import schedule
from jobs.queue.scheduling.snapshot import find_running_attempts
from tests.jobs.conftest import attempt_event, host_event, report, send_event
from tests.planner.wrong_specs import GOOD

LONG_AGO = timezone.now() - timedelta(days=300)
MINUTES_AGO = timedelta(minutes=5)


@pytest.fixture
def job(each_database: str, live_redis: redis.Redis) -> Job:
    """Create a running job on host-a, whose worker is silent and whose supervisor sends events."""
    fields = {"slots": 4, "device": "cpu", "device_name": "test", "memory_bytes": 2**30, "boot_id": "b"}
    Host.objects.create(name="host-a", **fields, last_seen=timezone.now())
    made, _ = actions.submit(User.objects.create_user("owner"), GOOD)
    schedule()
    send_event(live_redis, host_event(attempts=[report(made.id, 1, "running")]))
    read_events(live_redis)
    silence_worker()
    Member.objects.update(ordered=timezone.now() - MINUTES_AGO)
    send_event(live_redis, attempt_event(made.id, 1, "running"))
    read_events(live_redis)
    return made


def silence_worker() -> None:
    Host.objects.update(last_seen=timezone.now() - MINUTES_AGO)


def silence_supervisor() -> None:
    Member.objects.update(heard=timezone.now() - MINUTES_AGO)


def status(job: Job) -> str:
    job.refresh_from_db()
    return job.status


def test_job_is_reachable_while_its_supervisor_sends(job: Job, live_redis: redis.Redis) -> None:
    reconcile(live_redis, LONG_AGO)
    assert status(job) == Status.RUNNING
    assert not attempt_completion.filter_silent_members(Attempt.objects.get()).exists()
    silence_supervisor()
    reconcile(live_redis, LONG_AGO)
    assert status(job) == Status.UNREACHABLE
    assert [member["silent"] for member in serialize_job(job)["members"]] == [True]
    send_event(live_redis, attempt_event(job.id, 1, "running"))
    read_events(live_redis)
    assert status(job) == Status.RUNNING
    job.status = Status.UNREACHABLE  # The state if another host of the job is silent.
    assert [member["silent"] for member in serialize_job(job)["members"]] == [False]


def test_events_read_again_are_not_a_new_contact(job: Job, live_redis: redis.Redis) -> None:
    silence_supervisor()
    reconcile(live_redis, LONG_AGO)
    send_event(live_redis, attempt_event(job.id, 1, "running"))
    Cursor.objects.filter(name="events:host-a").update(
        position="99999999999999-0"
    )  # The position is of another stream, so the stream is read again.
    assert read_events(live_redis) >= 1
    assert status(job) == Status.UNREACHABLE


def test_rejects_marking_a_host_with_supervisor_as_lost(job: Job) -> None:
    host = Host.objects.get()
    with pytest.raises(actions.HostConnectedError, match="A supervisor on host host-a had contact at"):
        actions.mark_host_lost(host, "staff")
    silence_supervisor()
    assert actions.mark_host_lost(host, "staff") == 1


def test_restarted_worker_does_not_lose_or_restart_the_job(job: Job, live_redis: redis.Redis) -> None:
    StateChange.objects.filter(status=Status.RUNNING).delete()  # The job has not reported a step yet.
    Outbox.objects.all().delete()
    for state in (Status.STARTING, Status.RUNNING):
        Job.objects.update(status=state)
        for _ in range(5):
            send_event(live_redis, host_event())
        read_events(live_redis)
        reconcile(live_redis, LONG_AGO)
        assert status(job) == state
        assert not Outbox.objects.filter(task=TASK_LAUNCH).exists()
        StateChange.objects.create(job=job, attempt=1, status=Status.RUNNING, reason="training")
    assert SlotAllocation.objects.count() == 4
    silence_supervisor()
    reconcile(live_redis, LONG_AGO)
    assert status(job) == Status.LOST


def test_cancellation_reaches_the_supervisor(job: Job, live_redis: redis.Redis) -> None:
    assert actions.cancel(job, "owner")
    reconcile(live_redis, LONG_AGO)
    assert (status(job), job.wait_reason) == (Status.CANCELLING, "")
    assert live_redis.exists(cancel_key(job.id, 1))


def test_supervisor_of_a_lost_host_ends_before_the_next_attempt(job: Job, live_redis: redis.Redis) -> None:
    silence_supervisor()
    actions.mark_host_lost(Host.objects.get(), "staff")
    assert status(job) == Status.LOST
    assert actions.requeue(job, "owner")
    assert find_running_attempts({job.id}) == {}, "slots of a lost host do not count"
    send_event(live_redis, attempt_event(job.id, 1, "running"))
    read_events(live_redis)
    reconcile(live_redis, LONG_AGO)
    assert live_redis.exists(cancel_key(job.id, 1))
    assert find_running_attempts({job.id}) == {
        job.id: "waiting until the supervisor process on host host-a ends attempt 1"
    }
    send_event(live_redis, attempt_event(job.id, 1, "exited", "cancelled"))
    read_events(live_redis)
    assert find_running_attempts({job.id}) == {}
    assert status(job) == Status.QUEUED
