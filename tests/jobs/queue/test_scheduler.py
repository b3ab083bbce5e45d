"""Check what a scheduling pass reads and writes. Decisions are tested in test_placement."""

from __future__ import annotations

import gc
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.utils import timezone

from contracts.names import host_queue
from jobs.core.job_details import serialize_job
from jobs.models import Attempt, Host, Job, Member, Outbox, SlotAllocation, StateChange, Status
from jobs.queue import lifecycle
from jobs.queue.scheduling import scheduler
from jobs.queue.scheduling.scheduler import schedule
from jobs.queue.scheduling.snapshot import load_queue
from tests.jobs.conftest import make_member

MakeHost = Callable[..., Host]


def queued(owner: User, num_slots: int = 1, count: int = 1, **fields: Any) -> list[Job]:
    """Create queued jobs without an estimate."""
    told = {"kind": "train", "device": "cpu", "spec": {"name": "x"}, "estimate": {}, "name": "queued", **fields}
    return Job.objects.bulk_create(Job(owner=owner, num_slots=num_slots, **told) for _ in range(count))


def busy(host: Host, owner: User, *slots: int) -> Attempt:
    """Create an attempt with these slots."""
    job = queued(owner, len(slots), status=Status.RUNNING)[0]
    attempt = Attempt.objects.create(job=job, number=1)
    member = make_member(attempt, host)
    SlotAllocation.objects.bulk_create(SlotAllocation(host=host, slot=slot, member=member) for slot in slots)
    return attempt


@contextmanager
def statements() -> Iterator[list[str]]:
    """Record the statements that are sent to the database."""
    sent: list[str] = []

    def note(execute: Any, sql: str, *rest: Any) -> Any:
        sent.append(sql)
        return execute(sql, *rest)

    with connection.execute_wrapper(note):
        yield sent


def reason(job: Job) -> str:
    return Job.objects.values_list("wait_reason", flat=True).get(id=job.id)


def test_long_queue_needs_few_queries(owner: User, make_host: MakeHost) -> None:
    for number in range(50):
        busy(make_host(f"host-{number}"), owner, 0, 1, 2, 3)
    queued(owner, 4, count=400)
    with statements() as first:
        assert schedule() == 0
    assert len(first) < 30
    assert not any('"spec"' in sql for sql in first)
    with statements() as quiet:
        schedule()
    assert len(quiet) == 13, "a pass without changes writes and locks no rows"
    assert all(sql.startswith("SELECT") for sql in quiet)
    SlotAllocation.objects.all().delete()
    with statements() as placing:
        assert schedule() == 50
    assert len(placing) < 40
    assert Attempt.objects.filter(job__status=Status.STARTING).count() == 50
    assert Outbox.objects.count() == 50
    assert StateChange.objects.filter(status=Status.STARTING, reason__startswith="placed on host-").count() == 50


def test_launch_order_contents(owner: User, make_host: MakeHost) -> None:
    busy(make_host(), owner, 1)
    job = queued(owner, 2, attempt=3)[0]
    assert schedule() == 1
    row = Outbox.objects.get()
    assert row.queue == host_queue("host-a")
    told = {name: row.arguments[0][name] for name in ("job", "attempt", "slots", "spec", "owner")}
    assert told == {"job": job.id, "attempt": 3, "slots": [0, 2], "spec": {"name": "x"}, "owner": owner.pk}
    assert sorted(SlotAllocation.objects.filter(member__attempt__job=job).values_list("slot", flat=True)) == [0, 2]


@pytest.mark.parametrize("is_on", [True, False])
def test_pass_restores_the_garbage_collector(owner: User, monkeypatch: pytest.MonkeyPatch, is_on: bool) -> None:
    queued(owner)
    seen: list[bool] = []
    monkeypatch.setattr(scheduler, "store_wait_reasons", lambda *_: seen.append(gc.isenabled()))
    try:
        (gc.enable if is_on else gc.disable)()
        schedule()
        assert (seen, gc.isenabled()) == ([False], is_on)
    finally:
        gc.enable()


def test_pass_with_many_starts_defers_reasons(
    owner: User, make_host: MakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MAX_STARTS_BEFORE_REASONS", 2)
    make_host()
    queued(owner, 1, count=2)
    waits = queued(owner, 4)[0]
    for placed, told in ((2, ""), (0, "The job needs 4 CPU slots on one host. Host host-a has 2 of 4 slots free.")):
        assert (schedule(), reason(waits)) == (placed, told)


def test_does_not_allocate_slots_that_a_host_still_uses(owner: User, make_host: MakeHost) -> None:
    """The attempt is lost and has no slots, but its ranks still run."""
    host = make_host()
    Host.objects.filter(pk=host.pk).update(holding=[["given-up", 1, [0, 1, 2]]])
    large, small = queued(owner, 2)[0], queued(owner, 1)[0]
    assert schedule() == 0, "the large one is the head and the host is kept for it"
    assert reason(large) == "The job needs 2 CPU slots on one host. Host host-a has 1 of 4 slots free."
    Job.objects.filter(id=large.id).delete()
    assert schedule() == 1
    assert SlotAllocation.objects.get(member__attempt__job=small).slot == 3


def test_reserved_host_of_the_head_does_not_change(owner: User, make_host: MakeHost) -> None:
    first, second = make_host("host-a"), make_host("host-b")
    for slot in range(2):
        busy(first, owner, slot)
        busy(second, owner, slot)
    head = queued(owner, 4)[0]
    assert schedule() == 0
    assert reason(head) == "The job needs 4 CPU slots on one host. Host host-a has 2 of 4 slots free."
    SlotAllocation.objects.filter(host=second, slot=0).delete()
    late = queued(owner, 2)[0]
    assert schedule() == 1
    assert Member.objects.get(attempt__job=late).host == second
    SlotAllocation.objects.filter(host=first).delete()
    assert schedule() == 1
    assert Member.objects.get(attempt__job=head).host == first


def test_short_job_is_backfilled_before_a_head(owner: User, make_host: MakeHost) -> None:
    """A host has two busy slots, and the first job needs all four."""
    running = busy(make_host(), owner, 0, 1).job
    Job.objects.filter(id=running.id).update(time_limit_s=3600)
    StateChange.objects.create(job=running, attempt=1, status=Status.RUNNING)
    head = queued(owner, 4)[0]
    assert schedule() == 0
    assert schedule() == 0  # now it reads the ends of jobs on the reserved host
    assert re.search(r"Host \S+ has 2 of 4 slots free. Expected start: \d\d:\d\d UTC at the latest", reason(head))
    spec = {"name": "x", "layout": {"dp": 1, "pp": 1, "tp": 1, "cp": 1}}
    endless, short = queued(owner, 1)[0], queued(owner, 1, time_limit_s=10, spec=spec)[0]
    assert schedule() == 1
    attempt = Attempt.objects.get(job=short)
    assert attempt.backfilled
    assert serialize_job(short)["backfilled"]
    assert StateChange.objects.get(job=short).reason.endswith(", backfilled before an earlier job")
    assert not Attempt.objects.filter(job__in=[head, endless]).exists()


def test_queued_job_with_old_processes_does_not_block_others(owner: User, make_host: MakeHost) -> None:
    """An invalid row, changed by hand, must not fail every pass."""
    host = make_host()
    broken, sound = queued(owner)[0], queued(owner)[0]
    make_member(Attempt.objects.create(job=broken, number=1), host)
    assert schedule() == 1
    assert Attempt.objects.filter(job=sound).exists()
    assert reason(broken) == "Attempt 1 already started on a host. Cancel the job, then queue it again."


@pytest.mark.django_db(transaction=True)
def test_announcements_do_not_wait_for_an_unreachable_redis(settings: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"redis://127.0.0.1:{mute.getsockname()[1]}/0"
        layer = {"BACKEND": "channels_redis.core.RedisChannelLayer", "CONFIG": {"hosts": [address]}}
        settings.CHANNEL_LAYERS = {"default": layer}
        begin = time.monotonic()
        lifecycle.announce(*(f"job-{number}" for number in range(1000)))
        assert time.monotonic() - begin < 5


ODD = [
    "",
    "needs 2 slots",
    "a \"name\", in 'quotes'",
    r"back\slash \u0041 \n",
    "100% of %s and %(x)s",
    "größer ≥ 日本 🙂",
    "{}[]$.?",
]
pytestmark = pytest.mark.usefixtures("each_database")


def test_each_job_gets_its_own_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "JOBS_PER_TRANSACTION", 3)
    owner = User.objects.create_user("owner")
    jobs = queued(owner, count=len(ODD))
    told = {job.id: text for job, text in zip(jobs, ODD, strict=True)}
    scheduler.store_wait_reasons(load_queue(timezone.now()), told)
    assert dict(Job.objects.values_list("id", "wait_reason")) == told


def test_started_job_gets_no_reason() -> None:
    owner = User.objects.create_user("owner")
    gone, waiting = queued(owner, count=2)
    queue = load_queue(timezone.now())
    Job.objects.filter(id=gone.id).update(status=Status.STARTING)
    scheduler.store_wait_reasons(queue, {gone.id: "waits", waiting.id: "waits too"})
    assert dict(Job.objects.values_list("id", "wait_reason")) == {gone.id: "", waiting.id: "waits too"}


def test_next_pass_writes_deferred_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MAX_REASONS_PER_PASS", 2)
    told = {job.id: f"why {job.id}" for job in queued(User.objects.create_user("owner"), count=3)}
    for written in (2, 3):
        scheduler.store_wait_reasons(load_queue(timezone.now()), told)
        assert Job.objects.exclude(wait_reason="").count() == written
    assert dict(Job.objects.values_list("id", "wait_reason")) == told
