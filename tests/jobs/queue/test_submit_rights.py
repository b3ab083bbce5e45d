"""Jobs of disabled accounts and former submitters do not start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User

from jobs.models import Dependency, Host, Job, Membership, Project, Role, Status
from jobs.queue import actions, lifecycle, termination
from jobs.queue import staff_actions as staff
from jobs.queue.scheduling.scheduler import schedule
from jobs.queue.scheduling.snapshot import OWNER_DISABLED, OWNER_NOT_SUBMITTER
from jobs.queue.termination import apply_rules
from tests.jobs.queue.test_policy import status
from tests.jobs.queue.test_scheduler import busy, queued, reason, statements
from tests.planner.wrong_specs import GOOD

MakeHost = Callable[..., Host]
GONE = OWNER_NOT_SUBMITTER.format("team")


def enabled(user: User, enabled: bool) -> None:
    User.objects.filter(pk=user.pk).update(is_active=enabled)


def test_jobs_of_a_disabled_account_do_not_start(owner: User, stranger: User, make_host: MakeHost) -> None:
    make_host()
    theirs, other = queued(owner, 4)[0], queued(stranger, 4)[0]
    staff.pause_queue(True, "boss")
    schedule()
    enabled(owner, False)
    staff.pause_queue(False, "boss")
    assert schedule() == 1
    assert (status(theirs), status(other)) == (Status.QUEUED, Status.STARTING), "it holds up nobody"
    assert reason(theirs) == OWNER_DISABLED
    busy_one = Job.objects.get(id=other.id).attempts.get().members.get()
    lifecycle.release_member(busy_one)
    assert schedule() == 0
    enabled(owner, True)
    assert schedule() == 1
    assert status(theirs) == Status.STARTING


def test_disabled_account_has_no_retries_or_dependent_starts(owner: User, stranger: User, make_host: MakeHost) -> None:
    """The board itself requeues retries, preempted jobs, and dependent jobs."""
    host = make_host()
    retried, gave_way = (busy(host, owner, slot).job for slot in range(2))
    for job in (retried, gave_way):
        Job.objects.filter(id=job.id).update(preemptible=True)
    lifecycle.change_status(retried.id, 1, Status.FAILED, "it failed")
    for job in (retried, gave_way):
        for member in job.attempts.get().members.all():
            lifecycle.release_member(member)
    assert termination.preempt(gave_way.id, "other", "other")
    lifecycle.change_status(gave_way.id, 1, Status.CANCELLED, "it gave way")
    enabled(owner, False)
    for job in (retried, gave_way):
        assert lifecycle.requeue(job.id, "again")
    first, later = queued(stranger, 1, status=Status.SUCCEEDED)[0], queued(owner, 1)[0]
    Dependency.objects.create(job=later, needs=first.id)
    apply_rules()
    assert schedule() == 0
    assert {reason(job) for job in (retried, gave_way, later)} == {OWNER_DISABLED}
    enabled(owner, True)
    assert schedule() == 3


def test_job_of_a_disabled_account_preempts_no_job(owner: User, stranger: User, make_host: MakeHost) -> None:
    running = busy(make_host(), stranger, 0, 1, 2, 3).job
    Job.objects.filter(id=running.id).update(preemptible=True)
    urgent = queued(owner, 4, priority=9)[0]
    enabled(owner, False)
    schedule()
    assert status(running) == Status.RUNNING
    enabled(owner, True)
    schedule()
    assert status(running) == Status.CANCELLING, reason(urgent)


@pytest.mark.parametrize("end", ["removed", "viewer"])
def test_jobs_of_former_submitters_do_not_start(end: str, owner: User, make_host: MakeHost) -> None:
    make_host()
    team = Project.objects.create(name="team")
    membership = Membership.objects.create(project=team, user=owner, role=Role.SUBMITTER)
    there, elsewhere = queued(owner, 1, project="team")[0], queued(owner, 1)[0]
    if end == "removed":
        membership.delete()
    else:
        Membership.objects.filter(pk=membership.pk).update(role=Role.VIEWER)
    assert schedule() == 1
    assert (status(there), status(elsewhere)) == (Status.QUEUED, Status.STARTING)
    assert reason(there) == GONE
    Membership.objects.update_or_create(project=team, user=owner, defaults={"role": Role.SUBMITTER})
    assert schedule() == 1


@pytest.mark.parametrize(
    ("rights", "starts"), [((), 0), (("view_job",), 0), (("change_job",), 1), (("change_project",), 1)]
)
def test_jobs_of_staff_start_in_any_project(
    rights: tuple[str, ...], starts: int, owner: User, make_host: MakeHost
) -> None:
    make_host()
    Project.objects.create(name="team")
    job = queued(owner, 1, project="team")[0]
    User.objects.filter(pk=owner.pk).update(is_staff=True)
    owner.user_permissions.set(Permission.objects.filter(codename__in=rights))
    assert schedule() == starts
    assert reason(job) == ("" if starts else GONE)


def test_owner_rights_need_one_query_per_pass(owner: User, stranger: User, make_host: MakeHost) -> None:
    def passed() -> int:
        schedule()
        with statements() as sent:
            schedule()
        return len(sent)

    team = Project.objects.create(name="team")
    Membership.objects.create(project=team, user=owner, role=Role.SUBMITTER)
    busy(make_host(), owner, 0, 1, 2, 3)
    queued(owner, 1, count=3)
    few = passed()
    queued(stranger, 1, count=3)
    enabled(stranger, False)
    assert passed() == few
    queued(owner, 1, count=3, project="team")
    queued(stranger, 1, count=3, project="team")
    assert passed() == few + 1


def test_list_shows_missing_rights_of_the_owner(owner: User, staff: User, api: Any) -> None:
    job, _ = actions.submit(owner, GOOD)
    enabled(owner, False)
    told = {row["id"]: row["reason"] for row in api(staff).get("/api/v1/queue").json()["jobs"]}
    assert told[job.id] == OWNER_DISABLED
