"""Concurrent changes on both databases leave a legal history and no slot with two members."""

from __future__ import annotations

import itertools

import pytest
import redis
from django.contrib.admin.sites import site
from django.contrib.auth.models import User
from django.test import RequestFactory
from django.utils import timezone

from contracts.names import TASK_ACKNOWLEDGE, TASK_LAUNCH
from jobs.models import TERMINAL, Attempt, Host, Job, Outbox, SlotAllocation, StateChange, Status
from jobs.queue import actions
from jobs.queue.inbound.streams import read_events
from jobs.queue.lifecycle import TRANSITIONS
from jobs.queue.scheduling.scheduler import schedule
from jobs.queue.work_lease import WorkLease
from tests.jobs.conftest import attempt_event, host_event, report, run_together, send_event
from tests.planner.wrong_specs import GOOD

ROUNDS = 6
pytestmark = pytest.mark.usefixtures("each_database")


@pytest.fixture
def racer(each_database: str) -> User:
    Host.objects.create(
        name="host-a",
        slots=4,
        device="cpu",
        device_name="test",
        memory_bytes=2**30,
        boot_id="b",
        last_seen=timezone.now(),
    )
    return User.objects.create_user("racer")


def placed(racer: User) -> Job:
    job, _ = actions.submit(racer, GOOD)
    schedule()
    job.refresh_from_db()
    assert job.status == Status.STARTING
    return job


def assert_legal(job: Job) -> None:
    for number in range(1, Job.objects.get(id=job.id).attempt + 1):
        told = StateChange.objects.filter(job=job, attempt=number).values_list("status", flat=True)
        history = [Status(status) for status in told]
        assert history[0] == Status.QUEUED
        assert all(after in TRANSITIONS[before] for before, after in itertools.pairwise(history)), history
        assert sum(status in TERMINAL for status in history) <= 1, history


def test_concurrent_cancel_and_exit(racer: User, live_redis: redis.Redis) -> None:
    for _ in range(ROUNDS):
        job = placed(racer)
        send_event(live_redis, attempt_event(job.id, 1, "exited", "succeeded"))
        run_together([lambda job=job: actions.cancel(job, "racer"), lambda: read_events(live_redis)])
        job.refresh_from_db()
        assert job.status in (Status.SUCCEEDED, Status.CANCELLED)
        assert_legal(job)
        assert SlotAllocation.objects.count() == 0


def test_two_controllers_read_the_same_events(racer: User, live_redis: redis.Redis) -> None:
    for _ in range(ROUNDS):
        job = placed(racer)
        send_event(live_redis, host_event(attempts=[report(job.id, 1, "running")]))
        send_event(live_redis, host_event())
        send_event(live_redis, attempt_event(job.id, 1, "exited", "failed"))
        run_together([lambda: read_events(live_redis)] * 2 + [schedule] * 2)
        attempt = Attempt.objects.get(job=job)
        assert (attempt.members.get().missed, attempt.exit["outcome"]) == (1, "failed"), "a heartbeat counts once"
        assert StateChange.objects.filter(job=job, status=Status.FAILED).count() == 1
        assert_legal(job)
        assert SlotAllocation.objects.count() == 0
        assert Outbox.objects.filter(task=TASK_LAUNCH).count() == 1
        Outbox.objects.all().delete()


def test_concurrent_requeues_and_exit(racer: User, live_redis: redis.Redis) -> None:
    for _ in range(ROUNDS):
        job = placed(racer)
        send_event(live_redis, attempt_event(job.id, 1, "exited", "failed"))
        again = [lambda job=job: actions.requeue(job, "racer")] * 2
        run_together([*again, lambda: read_events(live_redis), schedule])
        job.refresh_from_db()
        assert job.attempt <= 2
        assert_legal(job)
        current = Attempt.objects.filter(job=job, number=2, ended__isnull=True).count()
        assert SlotAllocation.objects.count() == 4 * current
        actions.cancel(job, "racer")
        send_event(live_redis, attempt_event(job.id, 2, "exited", "cancelled"))
        read_events(live_redis)
        job.refresh_from_db()
        assert job.status in TERMINAL
        assert SlotAllocation.objects.count() == 0


def test_old_page_does_not_overwrite_a_placement(racer: User) -> None:
    job, _ = actions.submit(racer, GOOD)
    page = Job.objects.get(id=job.id)  # as the form was shown
    schedule()
    page.priority = 7
    request = RequestFactory().post("/")
    request.user = racer
    site.get_model_admin(Job).save_model(request, page, None, True)
    job.refresh_from_db()
    assert (job.status, job.priority) == (Status.STARTING, 7)
    schedule()
    host = Host.objects.get()
    Host.objects.update(sequence=9, drained=False)
    host.drained = True
    site.get_model_admin(Host).save_model(request, host, None, True)
    host.refresh_from_db()
    assert (host.sequence, host.drained) == (9, True)


def test_second_controller_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = WorkLease(), WorkLease()
    for _ in range(ROUNDS):
        held: list[bool] = []
        run_together([lambda lease=lease, held=held: held.append(lease.hold()) for lease in (first, second)])
        assert held.count(True) <= 1
    first.hold()
    first.hold()
    assert first.hold() is not second.hold()
    working, waiting = (first, second) if first.hold() else (second, first)
    assert not waiting.hold()
    monkeypatch.setattr("jobs.queue.work_lease.TAKEOVER_AFTER_S", 0.0)
    assert waiting.hold(), "the one that stood still has lost it"
    monkeypatch.undo()
    assert not working.hold()
    waiting.release()
    assert working.hold(), "one that ended in order leaves it free"


def test_concurrent_host_loss_and_exits(racer: User, live_redis: redis.Redis) -> None:
    host = Host.objects.get()
    for _ in range(ROUNDS):
        Host.objects.update(last_seen=timezone.now())
        job = placed(racer)
        Host.objects.update(last_seen=timezone.now() - actions.HOST_SILENT_AFTER * 2)
        send_event(live_redis, attempt_event(job.id, 1, "exited", "succeeded"))
        run_together([lambda: actions.mark_host_lost(host, "racer"), lambda: read_events(live_redis)])
        job.refresh_from_db()
        assert job.status in (Status.SUCCEEDED, Status.LOST)
        assert_legal(job)
        assert SlotAllocation.objects.count() == 0
        assert Outbox.objects.filter(task=TASK_ACKNOWLEDGE, arguments=[job.id, 1]).count() == 1
