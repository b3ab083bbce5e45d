"""Why jobs wait, written of many at once, on both databases."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import User
from django.utils import timezone

from jobs.models import Job, Status
from jobs.queue.scheduling import scheduler
from jobs.queue.scheduling.snapshot import load_queue
from tests.jobs.queue.test_scheduler import queued

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


def test_each_job_gets_its_own_reason_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "JOBS_PER_TRANSACTION", 3)
    owner = User.objects.create_user("owner")
    jobs = queued(owner, count=len(ODD))
    told = {job.id: text for job, text in zip(jobs, ODD, strict=True)}
    scheduler.store_wait_reasons(load_queue(timezone.now()), told)
    assert dict(Job.objects.values_list("id", "wait_reason")) == told


def test_a_job_that_is_queued_no_more_gets_none() -> None:
    owner = User.objects.create_user("owner")
    gone, waiting = queued(owner, count=2)
    queue = load_queue(timezone.now())
    Job.objects.filter(id=gone.id).update(status=Status.STARTING)
    scheduler.store_wait_reasons(queue, {gone.id: "waits", waiting.id: "waits too"})
    assert dict(Job.objects.values_list("id", "wait_reason")) == {gone.id: "", waiting.id: "waits too"}


def test_what_one_pass_has_no_time_for_the_next_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MAX_REASONS_PER_PASS", 2)
    told = {job.id: f"why {job.id}" for job in queued(User.objects.create_user("owner"), count=3)}
    for written in (2, 3):
        scheduler.store_wait_reasons(load_queue(timezone.now()), told)
        assert Job.objects.exclude(wait_reason="").count() == written
    assert dict(Job.objects.values_list("id", "wait_reason")) == told
