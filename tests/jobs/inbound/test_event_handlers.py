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
from tests.jobs.conftest import attempt_event, host_event, report, say, signed
from tests.planner.wrong_specs import GOOD
from tests.support.processes import RedisServer

EVENTS = events_stream("host-a")
LONG_AGO = timezone.now() - timedelta(days=300)


@pytest.fixture
def job(owner: User, make_host: Callable[..., Host]) -> Job:
    """Placed on host-a, which it fills."""
    make_host()
    made, _ = actions.submit(owner, GOOD)
    schedule()
    return made


def hear(client: redis.Redis, *events: dict[str, Any]) -> None:
    for event in events:
        say(client, event)
    read_events(client)
    reconcile(client, LONG_AGO)


def status(job: Job) -> str:
    job.refresh_from_db()
    return job.status


def running(job: Job, client: redis.Redis, **changes: Any) -> None:
    hear(client, host_event(attempts=[report(job.id, 1, "running")], **changes))
    assert status(job) == Status.RUNNING
    Member.objects.update(ordered=timezone.now() - timedelta(minutes=5))


def silent(**time: int) -> None:
    Host.objects.update(last_seen=timezone.now() - timedelta(**time))


def silences(job: Job) -> list[bool]:
    return [member["silent"] for member in serialize_job(job)["members"]]


def test_a_host_silent_for_months_keeps_its_job_and_its_slots(job: Job, live_redis: redis.Redis) -> None:
    running(job, live_redis)
    silent(days=100)
    reconcile(live_redis, LONG_AGO)
    reconcile(live_redis, LONG_AGO)
    assert status(job) == Status.UNREACHABLE
    assert SlotAllocation.objects.count() == 4
    assert not live_redis.exists(cancel_key(job.id, 1))
    reason = StateChange.objects.filter(job=job).last()
    assert reason is not None
    assert reason.reason.startswith("no contact with host host-a since 20")
    running(job, live_redis)
    history = [change.status for change in StateChange.objects.filter(job=job)]
    assert history == ["queued", "starting", "running", "unreachable", "running"]


def test_silence_while_nobody_listened_is_no_silence(job: Job, live_redis: redis.Redis) -> None:
    running(job, live_redis)
    silent(minutes=20)
    reconcile(live_redis, timezone.now() - timedelta(seconds=29))
    assert (status(job), silences(job)) == (Status.RUNNING, [False])
    reconcile(live_redis, timezone.now() - timedelta(seconds=31))
    assert (status(job), silences(job)) == (Status.UNREACHABLE, [True])


def test_a_cancel_waits_for_a_silent_host_and_says_so(job: Job, live_redis: redis.Redis) -> None:
    running(job, live_redis)
    silent(hours=1)
    assert actions.cancel(job, "tester")
    reconcile(live_redis, LONG_AGO)
    assert status(job) == Status.CANCELLING
    assert "no contact with host" in job.wait_reason
    assert job.wait_reason.endswith("the job ends when the host has contact again, or when staff mark the host as lost")
    assert live_redis.exists(cancel_key(job.id, 1))
    assert SlotAllocation.objects.count() == 4
    hear(live_redis, host_event(attempts=[report(job.id, 1, "running")]))
    assert (status(job), job.wait_reason) == (Status.CANCELLING, "")


def test_a_host_given_up_loses_its_attempt_and_is_told_to_end_it_when_it_comes_back(
    job: Job, live_redis: redis.Redis
) -> None:
    running(job, live_redis)
    host = Host.objects.get()
    with pytest.raises(actions.HostConnectedError):
        actions.mark_host_lost(host, "tester")
    silent(hours=1)
    assert actions.mark_host_lost(host, "tester") == 1
    assert status(job) == Status.LOST
    assert SlotAllocation.objects.count() == 0
    last = StateChange.objects.filter(job=job).last()
    assert last is not None
    assert last.reason == "host host-a was marked as lost by tester"
    reconcile(live_redis, LONG_AGO)
    live_redis.delete(cancel_key(job.id, 1))
    hear(live_redis, host_event(attempts=[report(job.id, 1, "running")]))
    assert live_redis.exists(cancel_key(job.id, 1))
    host.refresh_from_db()
    assert host.holding == [[job.id, 1, [0, 1, 2, 3]]]
    hear(live_redis, attempt_event(job.id, 1, "exited", "cancelled"))
    host.refresh_from_db()
    assert (status(job), host.holding) == (Status.LOST, [])
    assert Attempt.objects.get().exit["outcome"] == "cancelled"


def test_an_attempt_that_its_host_has_forgotten_is_lost_after_three_heartbeats(
    job: Job, live_redis: redis.Redis
) -> None:
    running(job, live_redis)
    hear(live_redis, host_event(), host_event())
    assert (status(job), Member.objects.get().missed) == (Status.RUNNING, 2)
    hear(live_redis, host_event(attempts=[report(job.id, 1, "running")]), host_event(), host_event())
    assert status(job) == Status.RUNNING, "three in a row"
    assert SlotAllocation.objects.count() == 4
    hear(live_redis, host_event())
    assert status(job) == Status.LOST
    assert SlotAllocation.objects.count() == 0


def test_a_host_that_does_not_name_an_attempt_is_asked_how_it_ended_before_it_is_lost(
    job: Job, live_redis: redis.Redis
) -> None:
    """As where this database was restored: the host was told before that its end is stored."""
    asked = Outbox.objects.filter(task=TASK_RESEND_REPORT)
    hear(live_redis, host_event())
    assert not asked.exists(), "its order may be on the way"
    running(job, live_redis)
    hear(live_redis, host_event(), host_event())
    assert [(one.queue, one.arguments) for one in asked] == [(host_queue("host-a"), [job.id, 1])]
    hear(live_redis, host_event(attempts=[report(job.id, 1, "exited", "succeeded")]), host_event(), host_event())
    assert status(job) == Status.SUCCEEDED


def test_an_order_lost_on_the_way_is_sent_again_and_again(job: Job, live_redis: redis.Redis) -> None:
    Outbox.objects.all().delete()
    Member.objects.update(ordered=timezone.now() - timedelta(minutes=5))
    reconcile(live_redis, LONG_AGO)
    assert Outbox.objects.count() == 0, "its host has not spoken yet"
    hear(live_redis, *[host_event() for _ in range(5)])
    assert status(job) == Status.STARTING
    reconcile(live_redis, LONG_AGO)
    assert Outbox.objects.get(task=TASK_LAUNCH).arguments[0]["slots"] == [0, 1, 2, 3]


def test_a_start_that_a_silence_caught_is_ordered_again(job: Job, live_redis: redis.Redis) -> None:
    Outbox.objects.all().delete()
    silent(hours=1)
    reconcile(live_redis, LONG_AGO)
    assert status(job) == Status.UNREACHABLE
    Member.objects.update(ordered=timezone.now() - timedelta(minutes=5))
    hear(live_redis, *[host_event() for _ in range(5)])
    assert Outbox.objects.filter(task=TASK_LAUNCH).count() == 1
    running(job, live_redis)


def test_a_cancelled_start_whose_order_was_lost_ends(job: Job, live_redis: redis.Redis) -> None:
    actions.cancel(job, "tester")
    hear(live_redis, *[host_event() for _ in range(5)])
    assert status(job) == Status.CANCELLING, "its order may still be carried out"
    Member.objects.update(ordered=timezone.now() - timedelta(minutes=5))
    hear(live_redis, host_event())
    assert status(job) == Status.CANCELLED
    assert SlotAllocation.objects.count() == 0


@pytest.mark.parametrize(
    "older",
    [{"sequence": 1}, {"began": 0.5, "sequence": 10**9, "incarnation": "before"}],
    ids=["sequence", "incarnation"],
)
def test_an_old_heartbeat_changes_nothing(job: Job, live_redis: redis.Redis, older: dict[str, Any]) -> None:
    running(job, live_redis)
    before = Host.objects.values().get()
    hear(live_redis, *[host_event(slots=1, boot_id="other", **older) for _ in range(5)])
    assert Host.objects.values().get() == before
    assert (status(job), Member.objects.get().missed) == (Status.RUNNING, 0)


@pytest.mark.parametrize(("ago_s", "most"), [(0, 1000), (3600, 19_000)])
def test_a_number_that_no_heartbeat_can_have_does_not_deafen(
    live_redis: redis.Redis, db: None, ago_s: int, most: int
) -> None:
    clock: Any = live_redis.time()
    began = float(clock[0] - ago_s)
    hear(live_redis, host_event(sequence=1, began=began))
    hear(live_redis, host_event(sequence=2**53, began=began), host_event(sequence=most + 500, began=began))
    reasons = list(DeadLetter.objects.values_list("reason", flat=True))
    assert len(reasons) == 2
    assert all("the highest number of a host that started" in reason for reason in reasons)
    hear(live_redis, host_event(sequence=2, began=began, slots=2))
    assert Host.objects.get().slots == 2
    hear(live_redis, host_event(sequence=most, began=began, slots=3))
    assert Host.objects.get().slots == 3


def test_a_clock_set_back_does_not_make_a_host_s_number_too_high(live_redis: redis.Redis, db: None) -> None:
    live_redis.xadd(EVENTS, signed(host_event(sequence=50_000, began=5000.0)), id="1000-0")
    read_events(live_redis)
    assert Host.objects.get().sequence == 50_000


@pytest.mark.parametrize("forged", [{"sequence": 10**9}, {"began": 1e90, "sequence": 1}])
def test_a_host_that_was_spoken_for_is_heard_once_only_it_is(
    live_redis: redis.Redis, db: None, forged: dict[str, Any]
) -> None:
    hear(live_redis, host_event(slots=2), host_event(slots=1, **forged), host_event(slots=3))
    assert Host.objects.get().slots == 1
    silent(seconds=31)
    hear(live_redis, host_event(slots=3))
    assert Host.objects.get().slots == 3


def test_an_end_is_true_in_an_old_heartbeat_too(job: Job, live_redis: redis.Redis) -> None:
    running(job, live_redis)
    hear(live_redis, host_event(attempts=[report(job.id, 1, "exited", "succeeded")], sequence=0))
    assert status(job) == Status.SUCCEEDED
    assert Outbox.objects.filter(task=TASK_ACKNOWLEDGE).count() == 1


def test_a_rebooted_host_has_lost_what_ran_before(job: Job, live_redis: redis.Redis) -> None:
    running(job, live_redis)
    hear(live_redis, host_event(boot_id="after", incarnation="second", began=2.0, sequence=1))
    assert status(job) == Status.LOST
    last = StateChange.objects.filter(job=job).last()
    assert last is not None
    assert last.reason == "host host-a was rebooted"
    assert SlotAllocation.objects.count() == 0


def test_a_rebooted_host_that_tells_of_an_end_is_believed(job: Job, live_redis: redis.Redis) -> None:
    running(job, live_redis)
    ended = [report(job.id, 1, "exited", "succeeded")]
    hear(live_redis, host_event(boot_id="after", incarnation="second", began=2.0, sequence=1, attempts=ended))
    assert status(job) == Status.SUCCEEDED


def test_a_start_on_its_way_survives_the_reboot_of_its_host(job: Job, live_redis: redis.Redis) -> None:
    hear(live_redis, host_event())
    hear(live_redis, host_event(boot_id="after", incarnation="second", began=2.0, sequence=1))
    assert status(job) == Status.STARTING
    assert SlotAllocation.objects.count() == 4


def test_a_worker_that_began_earlier_by_a_clock_set_back_is_believed_once_only_it_is_heard(
    job: Job, live_redis: redis.Redis
) -> None:
    running(job, live_redis, began=5000.0)
    set_back = {"began": 1400.0, "incarnation": "second"}
    hear(live_redis, host_event(attempts=[report(job.id, 1, "running")], sequence=1, **set_back))
    assert Host.objects.get().incarnation == "first"
    silent(seconds=31)
    hear(live_redis, host_event(attempts=[report(job.id, 1, "running")], sequence=2, **set_back))
    assert Host.objects.get().incarnation == "second"


def test_redis_killed_and_restored_from_an_older_dump_loses_no_job(
    job: Job, redis_service: RedisServer, live_redis: redis.Redis
) -> None:
    old = [host_event(), host_event(), host_event(), host_event()]
    hear(live_redis, *old[:3])
    for event in old:
        say(live_redis, event)  # kept in the dump beyond what is trimmed
    live_redis.save()
    read_events(live_redis)
    running(job, live_redis)
    redis_service.stop(signal.SIGKILL)
    redis_service.start()
    restored = redis_service.client()
    assert restored.xlen(EVENTS) >= 4
    silent(hours=1)
    assert read_events(restored) >= 4, "the older stream is read again"
    reconcile(restored, timezone.now())
    assert (status(job), Member.objects.get().missed) == (Status.RUNNING, 0)
    assert read_events(restored) == 0


def test_an_emptied_redis_and_a_clock_set_back_do_not_deafen(job: Job, live_redis: redis.Redis) -> None:
    running(job, live_redis)
    live_redis.flushall()
    # Ids of another time: Redis' clock went back by years.
    event = attempt_event(job.id, 1, "exited", "succeeded")
    live_redis.xadd(EVENTS, signed(event), id="1000-0")
    assert read_events(live_redis) == 1
    assert status(job) == Status.SUCCEEDED
    assert Cursor.objects.get(name="events:host-a").position == "1000-0"


def test_what_was_taken_in_is_not_kept(job: Job, live_redis: redis.Redis) -> None:
    hear(live_redis, *[host_event() for _ in range(150)])
    assert live_redis.xlen(EVENTS) <= 100


def test_a_note_is_shown_until_it_is_gone(job: Job, live_redis: redis.Redis) -> None:
    hear(live_redis, host_event(attempts=[report(job.id, 1, "running", note="rank 1 is stopped")]))
    assert Member.objects.get().note == "rank 1 is stopped"
    hear(live_redis, host_event(attempts=[report(job.id, 1, "running")]))
    assert Member.objects.get().note == ""
    hear(live_redis, host_event(attempts=[report(job.id, 1, "running", note="rank 2 is stopped")]))
    hear(live_redis, attempt_event(job.id, 1, "exited", "failed"))
    assert Member.objects.get().note == ""


def test_what_was_said_again_and_again_while_nobody_listened_is_taken_in_once(
    job: Job, live_redis: redis.Redis, django_assert_max_num_queries: Any
) -> None:
    for state in ("starting", "running"):
        for _ in range(streams.EVENTS_PER_READ):
            say(live_redis, host_event(attempts=[report(job.id, 1, state)]))
            say(live_redis, attempt_event(job.id, 1, state))
    say(live_redis, attempt_event(job.id, 1, "exited", "succeeded"))
    last = host_event()
    say(live_redis, last)
    with django_assert_max_num_queries(200):  # each by itself: far more
        assert sum(iter(lambda: read_events(live_redis), 0)) == 4 * streams.EVENTS_PER_READ + 2
    assert [change.status for change in StateChange.objects.filter(job=job)] == [
        "queued", "starting", "running", "succeeded",
    ]  # fmt: skip
    assert Host.objects.get().sequence == last["sequence"]
