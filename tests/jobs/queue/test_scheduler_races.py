"""The scheduler against others that write at the same time, on a real PostgreSQL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.utils import timezone

from jobs.models import (
    Attempt,
    Host,
    Job,
    Member,
    Membership,
    Outbox,
    Project,
    Role,
    SlotAllocation,
    StateChange,
    Status,
)
from jobs.people import projects
from jobs.queue import actions, lifecycle
from jobs.queue.scheduling.scheduler import schedule
from tests.jobs.queue.test_lifecycle import run_together
from tests.jobs.queue.test_scheduler import busy, queued
from tests.support.postgres import postgres_server, use_database
from tests.support.processes import scale_timeout

ROUNDS = 8
STATEMENTS = 24  # at most of a pass that starts one job


@pytest.fixture(scope="module")
def postgres(django_db_blocker: Any) -> Iterator[None]:
    with django_db_blocker.unblock(), postgres_server() as url, use_database(url):
        yield


@pytest.fixture
def owner(postgres: None) -> Iterator[User]:
    user = User.objects.create_user("owner")
    yield user
    Outbox.objects.all().delete()
    user.delete()
    Host.objects.all().delete()
    Project.objects.filter(name="team").delete()


def make_host(name: str, slots: int) -> Host:
    told = {"device": "cpu", "device_name": "cpu", "memory_bytes": 1, "boot_id": "b"}
    heard = timezone.now() + timedelta(hours=1)  # it stays connected, however long the machine takes
    return Host.objects.create(name=name, slots=slots, last_seen=heard, **told)


def test_concurrent_schedulers_start_each_job_once(owner: User, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(4):
        make_host(f"host-{number}", 4)
    for _ in range(ROUNDS):
        jobs = queued(owner, 2, count=5) + queued(owner, 4, count=2)  # the last does not fit any more
        run_together([schedule, schedule])
        schedule()
        assert Attempt.objects.filter(job__in=jobs).count() == 6
        assert Outbox.objects.count() == 6
        assert SlotAllocation.objects.count() == 5 * 2 + 4
        Outbox.objects.all().delete()
        Job.objects.all().delete()
    assert not [record for record in caplog.records if "duplicate key" in record.getMessage()]


def test_job_cancelled_during_placement_gets_no_slots(owner: User) -> None:
    """Cancel the job at each statement of the scheduling pass."""
    make_host("host-a", 4)
    ends = {"cancelled": 0, "cancelling": 0}
    for at in range(STATEMENTS):
        job = queued(owner, 4)[0]
        go = threading.Event()

        def scheduling(at: int = at, go: threading.Event = go) -> None:
            sent = 0

            def count(execute: Any, *statement: Any) -> Any:
                nonlocal sent
                if sent == at:
                    go.set()
                sent += 1
                return execute(*statement)

            try:
                with connection.execute_wrapper(count):
                    schedule()
            finally:
                go.set()

        def cancelling(job: Job = job, go: threading.Event = go) -> None:
            go.wait()
            assert actions.cancel(job, "tester")

        run_together([scheduling, cancelling])
        job.refresh_from_db()
        ends[job.status] += 1
        on_a_host = job.status == "cancelling"
        assert Attempt.objects.filter(job=job).count() == on_a_host
        assert Outbox.objects.count() == on_a_host
        assert SlotAllocation.objects.count() == 4 * on_a_host
        history = list(StateChange.objects.filter(job=job).values_list("status", flat=True))
        assert history == (["starting", "cancelling"] if on_a_host else ["cancelling", "cancelled"])
        Outbox.objects.all().delete()
        Job.objects.all().delete()
    assert min(ends.values()) > 0, f"only one side ever won: {ends}"


ENDS: dict[str, Callable[[User, Project], Any]] = {
    "disabled": lambda user, _team: User.objects.filter(pk=user.pk).update(is_active=False),
    "removed": lambda user, team: projects.remove_member(team, user.username, user),
    "viewer": lambda user, team: projects.set_role(team, user.username, Role.VIEWER, user),
}


@pytest.mark.parametrize("end", ENDS)
def test_lost_rights_during_placement_prevent_the_start(end: str, owner: User) -> None:
    """Remove the rights at each statement of the pass. Jobs that are still queued then stay queued."""
    make_host("host-a", 4)
    ends = {"queued": 0, "starting": 0}
    for at in range(STATEMENTS):
        User.objects.filter(pk=owner.pk).update(is_active=True)
        team = Project.objects.create(name="team")
        Membership.objects.create(project=team, user=owner, role=Role.SUBMITTER)
        job = queued(owner, 4, project="team")[0]
        seen = _raced(at, job, partial(ENDS[end], owner, team))
        schedule()
        job.refresh_from_db()
        assert seen == job.status, "it started after all"
        assert Attempt.objects.filter(job=job).count() == (job.status == "starting")
        ends[job.status] += 1
        Outbox.objects.all().delete()
        Job.objects.all().delete()
        team.delete()
    assert min(ends.values()) > 0, f"only one side ever won: {ends}"


def _raced(at: int, job: Job, change: Callable[[], Any]) -> str:
    """Return the status of a job after a change that starts at the given statement of a pass."""
    go, over = threading.Event(), threading.Event()
    sent: list[Any] = []
    seen: list[str] = []

    def count(execute: Any, *statement: Any) -> Any:
        if len(sent) == at:
            go.set()
            over.wait(0.05)  # not for longer: it may have to wait for this pass
        sent.append(statement)
        return execute(*statement)

    def scheduling() -> None:
        try:
            with connection.execute_wrapper(count):
                schedule()
        finally:
            go.set()

    def changing() -> None:
        go.wait()
        change()
        over.set()
        seen.append(Job.objects.values_list("status", flat=True).get(id=job.id))

    run_together([scheduling, changing])
    return seen[0]


def test_slot_conflict_leaves_no_partial_placement(owner: User) -> None:
    host = make_host("host-a", 4)
    job = queued(owner, 2)[0]

    def take_slot_0() -> None:
        busy(host, owner, 0)
        connection.close()

    def interfere(execute: Any, sql: str, *rest: Any) -> Any:
        if sql.startswith('INSERT INTO "jobs_attempt"'):
            thief = threading.Thread(target=take_slot_0)
            thief.start()
            thief.join()
        return execute(sql, *rest)

    with connection.execute_wrapper(interfere):
        assert schedule() == 0
    job.refresh_from_db()
    assert job.status == Status.QUEUED
    assert not Attempt.objects.filter(job=job).exists()
    assert not Outbox.objects.exists()
    assert not StateChange.objects.filter(job=job).exists()
    assert schedule() == 1
    assert sorted(SlotAllocation.objects.filter(member__attempt__job=job).values_list("slot", flat=True)) == [1, 2]


def test_outdated_decision_is_dropped(owner: User) -> None:
    """Another pass placed a later job between the read and the write, which changes the order but not the slots."""
    make_host("host-a", 8)
    old = queued(owner, 2)[0]

    def another_pass() -> None:
        queued(owner, 2, priority=9)
        assert schedule() == 2
        lifecycle.release_member(Member.objects.get(attempt__job=old))
        Job.objects.filter(id=old.id).update(status=Status.QUEUED, attempt=1)
        Attempt.objects.filter(job=old).delete()
        connection.close()

    def interfere(execute: Any, sql: str, *rest: Any) -> Any:
        if 'FROM "jobs_cursor"' in sql and "FOR UPDATE" in sql and not interfered:
            interfered.append(True)
            between = threading.Thread(target=another_pass)
            between.start()
            between.join()
        return execute(sql, *rest)

    interfered: list[bool] = []
    with connection.execute_wrapper(interfere):
        assert schedule() == 0
    assert schedule() == 1


def test_read_between_two_writes_is_outdated(owner: User, caplog: pytest.LogCaptureFixture) -> None:
    """Another pass reads the hosts between the two writes of a pass, and the queue after them."""
    make_host("host-a", 4)
    busy(make_host("host-b", 8), owner, 0)
    queued(owner, 8, priority=9)
    small, _next = queued(owner, 4, count=2)
    has_read, may_go_on = threading.Event(), threading.Event()
    turns: list[str] = []

    def hold_back(execute: Any, sql: str, *rest: Any) -> Any:
        if 'FROM "jobs_job"' in sql and not has_read.is_set():
            has_read.set()
            may_go_on.wait()
        return execute(sql, *rest)

    def other_pass() -> None:
        with connection.execute_wrapper(hold_back):
            assert schedule() == 0
        connection.close()

    other = threading.Thread(target=other_pass)

    def let_it_read(execute: Any, sql: str, *rest: Any) -> Any:
        if 'FROM "jobs_cursor"' in sql and "FOR UPDATE" in sql:
            turns.append(sql)
            if len(turns) == 2:
                other.start()
                assert has_read.wait(scale_timeout(30))
        return execute(sql, *rest)

    with connection.execute_wrapper(let_it_read):
        assert schedule() == 1
    may_go_on.set()
    other.join()
    assert len(turns) == 2
    assert Attempt.objects.filter(job=small).count() == 1
    assert not [record for record in caplog.records if "duplicate key" in record.getMessage()]


@pytest.mark.parametrize("changed", [{"held": True}, {"num_slots": 2}], ids=["held", "smaller"])
def test_job_changed_during_placement_does_not_start(owner: User, changed: dict[str, Any]) -> None:
    make_host("host-a", 4)
    (job,) = queued(owner, 4)
    assert not lifecycle.start_jobs({job.id: (1, "placed")}, {job.id: 3})
    Job.objects.filter(pk=job.pk).update(**changed)
    assert not lifecycle.start_jobs({job.id: (1, "placed")}, {job.id: 4})
    job.refresh_from_db()
    assert job.status == Status.QUEUED
