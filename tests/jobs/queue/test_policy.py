"""Order, quotas, limits, retries, and dependencies of queued jobs."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st

from jobs.models import (
    AuditEntry,
    Dependency,
    Host,
    Job,
    Membership,
    Pool,
    Project,
    Reservation,
    Role,
    StateChange,
    Status,
)
from jobs.queue import actions, lifecycle, staff_actions, termination
from jobs.queue.inbound.streams import read_events
from jobs.queue.scheduling.placement import sort_queue
from jobs.queue.scheduling.scheduler import schedule
from jobs.queue.scheduling.snapshot import load_queue
from jobs.queue.scheduling.states import (
    PointRates,
    ProjectUse,
    compute_decayed_use,
    compute_points,
    compute_share_factors,
)
from jobs.queue.termination import apply_rules
from planner.facts.validation import SpecError
from tests.jobs.conftest import attempt_event, send_event
from tests.jobs.queue.test_scheduler import busy, queued, reason
from tests.planner.wrong_specs import GOOD

MakeHost = Callable[..., Host]
SMALL = {**GOOD, "layout": {"dp": 1}}


def status(job: Job) -> str:
    job.refresh_from_db()
    return job.status


def last_reason(job: Job) -> str:
    return str(StateChange.objects.filter(job=job).values_list("reason", flat=True).last())


def order() -> list[str]:
    """Return the names of jobs in the order of the queue."""
    return [job.name for job in sort_queue(queued.job for queued in load_queue(timezone.now()))]


def hours_ago(job: Job, hours: float) -> None:
    Job.objects.filter(id=job.id).update(created=timezone.now() - timedelta(hours=hours))


def ends(client: redis.Redis, job: Job, outcome: str) -> None:
    job.refresh_from_db()
    send_event(client, attempt_event(job.id, job.attempt, "exited", outcome))
    read_events(client)


@given(st.floats(0, 1e9), st.integers(0, 1000), st.floats(0, 1e6), st.floats(1, 1e6))
def test_usage_decays_with_its_half_life(used: float, slots: int, seconds: float, half_life_s: float) -> None:
    after = compute_decayed_use(used, slots, seconds, half_life_s)
    assert 0 <= after <= (used + slots * seconds) * (1 + 1e-9)
    assert compute_decayed_use(used, 0, half_life_s, half_life_s) == pytest.approx(used / 2)
    in_two = compute_decayed_use(
        compute_decayed_use(used, slots, seconds / 2, half_life_s), slots, seconds / 2, half_life_s
    )
    assert in_two == pytest.approx(after, rel=1e-6, abs=1e-6), "however often it is counted"


def test_usage_equal_to_the_share_gives_half_of_the_points() -> None:
    assert compute_share_factors({"a": ProjectUse(0, 1), "b": ProjectUse(0, 3)}) == {"a": 1.0, "b": 1.0}
    assert compute_share_factors({"a": ProjectUse(10, 1), "b": ProjectUse(30, 3)}) == {"a": 0.5, "b": 0.5}
    told = compute_share_factors({"a": ProjectUse(40, 1), "b": ProjectUse(0, 3)})
    assert told["a"] < 0.5 < told["b"]


def test_long_wait_exceeds_any_priority() -> None:
    rates = PointRates(per_hour=0.1, share=1.0)
    old, urgent = compute_points(0, 3600 * 31, 0.0, 0, rates), compute_points(2, 0, 1.0, 0, rates)
    assert old.total > urgent.total
    assert compute_points(0, 3600 * 29, 0.0, 0, rates).total < urgent.total


def test_queue_order_by_priority_age_share_and_position(owner: User, make_host: MakeHost) -> None:
    Project.objects.create(name="heavy", used=1e6)
    Project.objects.create(name="light")
    heavy = queued(owner, name="heavy", project="heavy")[0]
    hours_ago(heavy, 2)
    light = queued(owner, name="light", project="light")[0]
    urgent = queued(owner, name="urgent", project="heavy", priority=1)[0]
    assert order() == ["urgent", "light", "heavy"]
    hours_ago(heavy, 40)
    assert order() == ["heavy", "urgent", "light"], "40 hours are 4 points"
    hours_ago(heavy, 2)
    assert staff_actions.move(heavy.id, "top", "boss")
    assert order() == ["urgent", "heavy", "light"], "the top of its priority"
    assert staff_actions.move(heavy.id, "down", "boss")
    assert order() == ["urgent", "light", "heavy"]
    assert not staff_actions.move(heavy.id, "down", "boss"), "it is last already"
    assert not staff_actions.move(urgent.id, "up", "boss")
    assert staff_actions.move_before(heavy.id, light.id, "boss")
    assert order() == ["urgent", "heavy", "light"]
    assert not staff_actions.move_before(heavy.id, urgent.id, "boss"), "another priority"
    assert staff_actions.set_priority([light.id, heavy.id], 1, "boss") == sorted([light.id, heavy.id])
    told = AuditEntry.objects.filter(what="priority").values_list("name", "before", "after", "who")
    assert set(told) == {(light.id, 0, 1, "boss"), (heavy.id, 0, 1, "boss")}


def test_moves_jobs_with_equal_points(owner: User) -> None:
    """Jobs that are submitted together have equal points."""
    names = ["a", "b", "c", "d", "e"]
    jobs = {name: queued(owner, name=name)[0].id for name in names}
    Job.objects.update(created=timezone.now())
    chance = random.Random(7)
    for _ in range(20):
        now = order()
        at, to = chance.sample(range(len(now)), 2)
        wanted = [name for name in now if name != now[at]]
        before = wanted.index(now[to])
        wanted.insert(before, now[at])
        assert staff_actions.move_before(jobs[now[at]], jobs[now[to]], "boss")
        assert order() == wanted
    first = order()
    assert staff_actions.move(jobs[first[3]], "up", "boss")
    assert order() == [first[0], first[1], first[3], first[2], first[4]]


def test_held_job_does_not_block_others(owner: User, make_host: MakeHost) -> None:
    make_host()
    held, free = queued(owner, 4)[0], queued(owner, 1)[0]
    assert staff_actions.hold([held.id, "absent"], "boss") == [held.id]
    assert staff_actions.hold([held.id], "boss") == []
    assert schedule() == 1
    assert reason(held) == "The job is held until staff release it."
    assert status(free) == Status.STARTING
    assert staff_actions.release([held.id], "boss") == [held.id]
    schedule()
    assert "Host host-a has 3 of 4 slots free." in reason(held)
    assert list(AuditEntry.objects.values_list("what", "before", "after")) == [
        ("release", True, False),
        ("hold", False, True),
    ]


def test_paused_queue_or_pool_starts_no_jobs(owner: User, make_host: MakeHost) -> None:
    make_host("host-a")
    Host.objects.create(
        name="host-b", slots=8, device="cpu", device_name="test", memory_bytes=1, boot_id="b",
        last_seen=timezone.now(), labels=["big"],
    )  # fmt: skip
    pool = Pool.objects.create(name="large", labels=["big"])
    job, pooled = queued(owner, 1)[0], queued(owner, 1, pool="large")[0]
    assert staff_actions.pause_queue(True, "boss")
    assert not staff_actions.pause_queue(True, "boss")
    assert schedule() == 0
    assert reason(job) == "The queue is paused, so no job starts."
    staff_actions.pause_queue(False, "boss")
    staff_actions.pause_pool(pool, True, "boss")
    assert schedule() == 1
    assert reason(pooled) == "Every CPU host of pool large is in the paused pool large."
    staff_actions.pause_pool(pool, False, "boss")
    assert schedule() == 1
    assert AuditEntry.objects.count() == 4


def test_reservation_excludes_other_jobs(owner: User, make_host: MakeHost) -> None:
    host, now = make_host(), timezone.now()
    project = Project.objects.create(name="theirs")
    Membership.objects.create(project=project, user=owner, role=Role.SUBMITTER)
    starts, ends = now + timedelta(hours=1), now + timedelta(hours=2)
    Reservation.objects.create(project=project, host=host, starts=starts, ends=ends)
    short, long, theirs = (
        queued(owner, 1, time_limit_s=1800)[0],
        queued(owner, 1, time_limit_s=7200)[0],
        queued(owner, 1, project="theirs")[0],
    )
    assert schedule() == 2
    assert (status(short), status(theirs)) == (Status.STARTING, Status.STARTING)
    assert reason(long) == "Every available CPU host is reserved for another project."


def test_quota_counts_allocated_slots(owner: User, make_host: MakeHost) -> None:
    host = make_host()
    Project.objects.update_or_create(name="default", defaults={"slots": 2})
    busy(host, owner, 0)
    job = queued(owner, 2)[0]
    assert schedule() == 0
    told = (
        "The job needs 2 slots. Project default is limited to 2 slots. Other jobs of the project use or reserve 1 slot."
    )
    assert reason(job) == told
    with pytest.raises(
        SpecError, match=r"layout`?: dp 2 x pp 1 x tp 2 = 4 ranks, but project default is limited to 2 slots"
    ):
        actions.submit(owner, GOOD)


def test_validates_scheduling_fields_of_a_spec(owner: User, stranger: User) -> None:
    theirs, _ = actions.submit(stranger, GOOD)
    wrong = {**GOOD, "project": "none", "resources": {"pool": "none"}, "after": [theirs.id, "absent"]}
    with pytest.raises(SpecError) as told:
        actions.submit(owner, wrong)
    assert [(p.field, p.message) for p in told.value.problems] == [
        ("project", "`project` is 'none', but you are not a member of such a project. Use one of your projects."),
        ("resources.pool", "`resources.pool` is 'none', but this pool does not exist. Omit the field to use any host."),
        *(
            ("after", f"`after` names job {job!r}, but this job does not exist, or you cannot see it.")
            for job in sorted(["absent", theirs.id])
        ),
    ]
    with pytest.raises(SpecError, match=r"a lab job runs on one host"):
        actions.submit(owner, {"kind": "lab", "resources": {"max_hosts": 2}})
    for field, value in (("run", {"time_limit_s": 0}), ("retry", {"max_attempts": 0}), ("after", ["../x"])):
        with pytest.raises(SpecError) as told:
            actions.submit(owner, {**GOOD, field: value})
        assert told.value.problems[0].field.startswith(field)


def test_accepts_jobs_that_fit_all_hosts_together(owner: User, make_host: MakeHost) -> None:
    for number in range(3):
        make_host(f"host-{number}", slots=2)
    job, _ = actions.submit(owner, {**GOOD, "layout": {"dp": 2, "tp": 2}})
    assert (job.unit, job.wide_unit, job.max_hosts, job.num_slots) == (2, 2, 0, 4)
    assert schedule() == 1
    assert job.attempts.get().format_hosts() == "host-0, host-1"
    with pytest.raises(SpecError, match=r"= 8 ranks, but cpu hosts of the same hardware model have 6 slots in total"):
        actions.submit(owner, {**GOOD, "layout": {"dp": 4, "tp": 2}})
    with pytest.raises(SpecError, match=r"a tensor-parallel group of 4 ranks needs to be on one host, and the largest"):
        actions.submit(owner, {**GOOD, "layout": {"tp": 4}})


def test_dependent_job_waits_then_starts_or_is_cancelled(
    owner: User, make_host: MakeHost, live_redis: redis.Redis
) -> None:
    make_host()
    first, _ = actions.submit(owner, SMALL)
    then, _ = actions.submit(owner, {**SMALL, "after": [first.id]})
    anyway, _ = actions.submit(owner, {**SMALL, "after": [first.id], "after_failed": "start"})
    chained, _ = actions.submit(owner, {**SMALL, "after": [then.id]})
    assert schedule() == 1
    assert reason(then) == f"The job waits until job {first.id} has ended."
    ends(live_redis, first, "failed")
    apply_rules()
    apply_rules()
    assert [status(job) for job in (then, anyway, chained)] == ["cancelled", "queued", "cancelled"]
    assert StateChange.objects.filter(job=then).last().reason == f"job {first.id}, a dependency, did not succeed"  # type: ignore[union-attr]
    assert schedule() == 1
    assert status(anyway) == Status.STARTING
    gone, _ = actions.submit(owner, {**SMALL, "after": [anyway.id]})
    Dependency.objects.filter(job=gone).update(needs="deleted")
    apply_rules()
    assert status(gone) == Status.CANCELLED, "a job that was deleted did not succeed"


def running(owner: User, client: redis.Redis, **spec: Any) -> Job:
    job, _ = actions.submit(owner, {**SMALL, **spec})
    assert schedule() == 1
    send_event(client, attempt_event(job.id, 1, "running"))
    read_events(client)
    return job


def test_time_limit_fails_a_job_without_retry(owner: User, make_host: MakeHost, live_redis: redis.Redis) -> None:
    make_host()
    job = running(owner, live_redis, run={"time_limit_s": 60}, retry={"max_attempts": 3})
    apply_rules()
    assert status(job) == Status.RUNNING
    StateChange.objects.filter(job=job, status=Status.RUNNING).update(at=timezone.now() - timedelta(seconds=61))
    apply_rules()
    assert status(job) == Status.CANCELLING
    ends(live_redis, job, "cancelled")
    assert status(job) == Status.FAILED
    assert last_reason(job) == "the time limit of 60 s (run.time_limit_s) is reached"


def test_retries_failures_but_not_cancellations(owner: User, make_host: MakeHost, live_redis: redis.Redis) -> None:
    make_host()
    job, _ = actions.submit(owner, {**SMALL, "retry": {"max_attempts": 3}})
    for number in (1, 2):
        schedule()
        ends(live_redis, job, "failed")
        assert (status(job), job.attempt) == (Status.QUEUED, number + 1)
    schedule()
    ends(live_redis, job, "failed")
    assert (status(job), job.attempt) == (Status.FAILED, 3)
    other, _ = actions.submit(owner, {**SMALL, "retry": {"max_attempts": 3}})
    schedule()
    other.refresh_from_db()
    actions.cancel(other, "owner")
    ends(live_redis, other, "cancelled")
    assert status(other) == Status.CANCELLED


def test_preempted_job_continues_later(owner: User, make_host: MakeHost, live_redis: redis.Redis) -> None:
    make_host(slots=1)
    job = running(owner, live_redis, run={"preemptible": True})
    urgent = queued(owner, 1, priority=5, name="urgent")[0]
    assert schedule() == 0
    assert (status(job), job.stop) == (Status.CANCELLING, "preempted")
    assert "Preemptible jobs with lower priority are ending to free slots." in reason(urgent)
    schedule()
    assert StateChange.objects.filter(job=job, status=Status.CANCELLING).count() == 1
    ends(live_redis, job, "cancelled")
    assert (status(job), job.attempt, job.stop) == (Status.QUEUED, 2, "")
    assert schedule() == 1
    assert (status(urgent), status(job)) == (Status.STARTING, Status.QUEUED)


def test_cancellation_during_preemption_wins(owner: User, make_host: MakeHost, live_redis: redis.Redis) -> None:
    make_host(slots=1)
    job = running(owner, live_redis, run={"preemptible": True})
    assert termination.preempt(job.id, "other", "other")
    assert not termination.preempt(job.id, "other", "other")
    job.refresh_from_db()
    assert actions.cancel(job, "owner")
    ends(live_redis, job, "cancelled")
    assert status(job) == Status.CANCELLED


def test_audit_entry_is_in_the_transaction_of_the_change(owner: User) -> None:
    job, _ = actions.submit(owner, SMALL)
    entry = AuditEntry.objects.get()
    assert (entry.who, entry.what, entry.kind, entry.name) == ("owner", "submit", "job", job.id)
    every = AuditEntry.objects.all()
    for change in (entry.save, entry.delete, every.delete, lambda: every.update(who="x")):
        with pytest.raises(TypeError):
            change()
    assert actions.cancel(job, "owner")
    assert not actions.cancel(job, "owner")
    assert not lifecycle.requeue("absent", "x")
    assert [e.what for e in AuditEntry.objects.all()] == ["cancel", "submit"]


def test_usage_is_updated_once_per_minute(owner: User, make_host: MakeHost) -> None:
    Project.objects.update_or_create(name="default", defaults={"counted": timezone.now()})
    busy(make_host(), owner, 0, 1)
    apply_rules()
    assert Project.objects.get(name="default").used == 0
    counted = timezone.now() - timedelta(seconds=100)
    Project.objects.update(counted=counted)
    apply_rules()
    most = 2 * (timezone.now() - counted).total_seconds()
    assert 199 < Project.objects.get(name="default").used <= most


def test_invalid_weight_does_not_stop_the_queue() -> None:
    found = compute_share_factors({"a": ProjectUse(5, 1e308), "b": ProjectUse(5, 1e308), "c": ProjectUse(0, 0.0)})
    assert found["a"] == found["b"] < found["c"] == 1


def test_admin_rejects_invalid_weights_and_labels(db: None) -> None:
    with pytest.raises(ValidationError, match="weight"):
        Project(name="heavy", weight=1e308).full_clean()
    with pytest.raises(ValidationError, match="Use a list of labels"):
        Pool(name="p", labels=None).full_clean()
