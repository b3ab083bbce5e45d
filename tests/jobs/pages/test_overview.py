"""The figures of the overview: slots of hosts, and failed attempts."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils import timezone

from jobs.models import Attempt, Host, Job, SlotAllocation, StateChange, Status
from jobs.queue import lifecycle
from tests.jobs.conftest import make_member


def words(client: Any) -> str:
    """Return the text of the page with single spaces."""
    page = client.get("/overview/?part=live").content.decode()
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page))


def fail(job: Job, reason: str) -> None:
    assert lifecycle.start_jobs({job.id: (job.attempt, "placed")})
    assert lifecycle.change_status(job.id, job.attempt, Status.FAILED, reason)


def test_overview_slots_agree_with_the_host_list(make_host: Any, make_jobs: Any, owner: User, client: Any) -> None:
    make_host("speaks", 4)
    silent = make_host("silent", 2)
    (job,) = make_jobs(1)
    member = make_member(Attempt.objects.create(job=job, number=1), silent)
    SlotAllocation.objects.bulk_create([SlotAllocation(host=silent, slot=n, member=member) for n in range(2)])
    client.force_login(owner)
    assert "without contact" not in words(client)
    Host.objects.filter(pk=silent.pk).update(last_seen=timezone.now() - timedelta(minutes=5))
    shown = words(client)
    assert "Slots in use 2 of 6 2 of 6 2 slots on hosts without contact" in shown
    assert "2 of 2 slots in use" in shown
    assert "0 of 4 slots in use" in shown


def test_oldest_wait_starts_at_the_last_requeue(make_jobs: Any, owner: User, client: Any) -> None:
    first, held = make_jobs(2)
    Job.objects.update(created=timezone.now() - timedelta(days=3), changed=timezone.now() - timedelta(days=3))
    Job.objects.filter(pk=first.pk).update(changed=timezone.now() - timedelta(minutes=10))
    Job.objects.filter(pk=held.pk).update(held=True)
    client.force_login(owner)
    assert "10 min" in words(client)
    assert "3 d" not in words(client)
    Job.objects.update(held=True)
    assert "all jobs are held" in words(client)


@pytest.fixture
def retried(make_jobs: Callable[..., list[Job]]) -> Job:
    """Return a queued job whose first attempt failed."""
    (job,) = make_jobs(1)
    fail(job, "rank 1 ran out of memory")
    assert lifecycle.requeue(job.id, "retried")
    return job


def test_shows_failed_attempts_of_retried_jobs(retried: Job, owner: User, client: Any) -> None:
    client.force_login(owner)
    shown = words(client)
    assert "1 attempt failed or lost, in 1 job " in shown
    assert "failed attempt 1, job now queued in attempt 2" in shown
    assert "rank 1 ran out of memory" in shown
    retried.refresh_from_db()
    fail(retried, "again")
    shown = words(client)
    assert "2 attempts failed or lost, in 1 job " in shown
    assert "failed attempt 2 " in shown


def test_failure_shows_its_verdict(retried: Job, owner: User, client: Any) -> None:
    Attempt.objects.create(
        job=retried,
        number=1,
        diagnosis={"over": True, "state": "failed", "sentence": "Failed: rank 1, ValueError: bad shape (train.py:8)."},
    )
    client.force_login(owner)
    shown = words(client)
    assert "Rank 1, ValueError: bad shape (train.py:8)." in shown
    assert "rank 1 ran out of memory" not in shown


def test_excludes_foreign_old_and_archived_failures(retried: Job, owner: User, stranger: User, client: Any) -> None:
    none = "No failures in the last 24 hours."
    client.force_login(stranger)
    assert none in words(client)
    client.force_login(owner)
    assert none not in words(client)
    Job.objects.update(archived=True)
    assert none in words(client)
    Job.objects.update(archived=False)
    StateChange.objects.update(at=timezone.now() - timedelta(hours=25))
    assert none in words(client)
