"""A host whose worker alone has died: what its supervisors say is heard, and none of their jobs is called silent."""

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
from tests.jobs.conftest import attempt_event, host_event, report, say
from tests.planner.wrong_specs import GOOD

LONG_AGO = timezone.now() - timedelta(days=300)
MINUTES_AGO = timedelta(minutes=5)


@pytest.fixture
def job(each_database: str, live_redis: redis.Redis) -> Job:
    """Runs on host-a, whose worker has said nothing for five minutes; its supervisor speaks."""
    told = {"slots": 4, "device": "cpu", "device_name": "test", "memory_bytes": 2**30, "boot_id": "b"}
    Host.objects.create(name="host-a", **told, last_seen=timezone.now())
    made, _ = actions.submit(User.objects.create_user("owner"), GOOD)
    schedule()
    say(live_redis, host_event(attempts=[report(made.id, 1, "running")]))
    read_events(live_redis)
    no_worker()
    Member.objects.update(ordered=timezone.now() - MINUTES_AGO)
    say(live_redis, attempt_event(made.id, 1, "running"))
    read_events(live_redis)
    return made


def no_worker() -> None:
    Host.objects.update(last_seen=timezone.now() - MINUTES_AGO)


def supervisor_falls_silent() -> None:
    Member.objects.update(heard=timezone.now() - MINUTES_AGO)


def status(job: Job) -> str:
    job.refresh_from_db()
    return job.status


def test_it_is_reachable_for_as_long_as_its_supervisor_speaks(job: Job, live_redis: redis.Redis) -> None:
    reconcile(live_redis, LONG_AGO)
    assert status(job) == Status.RUNNING
    assert not attempt_completion.filter_silent_members(Attempt.objects.get()).exists()
    supervisor_falls_silent()
    reconcile(live_redis, LONG_AGO)
    assert status(job) == Status.UNREACHABLE
    assert [member["silent"] for member in serialize_job(job)["members"]] == [True]
    say(live_redis, attempt_event(job.id, 1, "running"))
    read_events(live_redis)
    assert status(job) == Status.RUNNING
    job.status = Status.UNREACHABLE  # as where another host of it is silent
    assert [member["silent"] for member in serialize_job(job)["members"]] == [False]


def test_what_it_said_before_redis_was_lost_is_no_word_of_now(job: Job, live_redis: redis.Redis) -> None:
    supervisor_falls_silent()
    reconcile(live_redis, LONG_AGO)
    say(live_redis, attempt_event(job.id, 1, "running"))
    Cursor.objects.filter(name="events:host-a").update(
        position="99999999999999-0"
    )  # another stream than the one that was read: it is read again
    assert read_events(live_redis) >= 1
    assert status(job) == Status.UNREACHABLE


def test_its_host_is_not_given_up_while_it_speaks(job: Job) -> None:
    host = Host.objects.get()
    with pytest.raises(actions.HostConnectedError, match="A supervisor on host host-a had contact at"):
        actions.mark_host_lost(host, "staff")
    supervisor_falls_silent()
    assert actions.mark_host_lost(host, "staff") == 1


def test_a_worker_that_came_back_without_knowing_it_neither_loses_it_nor_is_told_to_start_it(
    job: Job, live_redis: redis.Redis
) -> None:
    StateChange.objects.filter(status=Status.RUNNING).delete()  # as of one that has not told of a step yet
    Outbox.objects.all().delete()
    for state in (Status.STARTING, Status.RUNNING):
        Job.objects.update(status=state)
        for _ in range(5):
            say(live_redis, host_event())
        read_events(live_redis)
        reconcile(live_redis, LONG_AGO)
        assert status(job) == state
        assert not Outbox.objects.filter(task=TASK_LAUNCH).exists()
        StateChange.objects.create(job=job, attempt=1, status=Status.RUNNING, reason="training")
    assert SlotAllocation.objects.count() == 4
    supervisor_falls_silent()
    reconcile(live_redis, LONG_AGO)
    assert status(job) == Status.LOST


def test_its_cancel_reaches_it_and_waits_for_nobody_else(job: Job, live_redis: redis.Redis) -> None:
    assert actions.cancel(job, "owner")
    reconcile(live_redis, LONG_AGO)
    assert (status(job), job.wait_reason) == (Status.CANCELLING, "")
    assert live_redis.exists(cancel_key(job.id, 1))


def test_given_up_and_heard_again_it_is_told_to_end_and_no_second_one_starts(job: Job, live_redis: redis.Redis) -> None:
    supervisor_falls_silent()
    actions.mark_host_lost(Host.objects.get(), "staff")
    assert status(job) == Status.LOST
    assert actions.requeue(job, "owner")
    assert find_running_attempts({job.id}) == {}, "what its host once held says nothing after it was given up"
    say(live_redis, attempt_event(job.id, 1, "running"))
    read_events(live_redis)
    reconcile(live_redis, LONG_AGO)
    assert live_redis.exists(cancel_key(job.id, 1))
    assert find_running_attempts({job.id}) == {
        job.id: "waiting until the supervisor process on host host-a ends attempt 1"
    }
    say(live_redis, attempt_event(job.id, 1, "exited", "cancelled"))
    read_events(live_redis)
    assert find_running_attempts({job.id}) == {}
    assert status(job) == Status.QUEUED
