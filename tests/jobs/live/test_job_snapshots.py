"""Load jobs for many sockets with one query, and never show a job to the wrong user."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import User
from django.db import DatabaseError
from django.test import Client
from pytest_django import DjangoAssertNumQueries

from jobs.models import Job
from jobs.queue import actions
from jobs.runs.live import consumers
from jobs.runs.live.consumers import MAX_AGE_S, SnapshotLoader, SnapshotRequest, get_shared_detail, load_snapshots
from tests.planner.wrong_specs import GOOD

pytestmark = pytest.mark.django_db(transaction=True)


def log_in(user: User) -> str:
    client = Client()
    client.force_login(user)
    return str(client.session.session_key)


def submit_jobs(user: User, count: int) -> list[Job]:
    return [actions.submit(user, {**GOOD, "name": f"job {n}"})[0] for n in range(count)]


@pytest.fixture
def owner() -> User:
    return User.objects.create_user("owner")


def test_many_sockets_share_one_query(
    owner: User, monkeypatch: pytest.MonkeyPatch, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    """Four queries: session, user, projects, jobs. Without sharing, 200 sockets need 800 queries every 5 seconds."""
    session, jobs = log_in(owner), submit_jobs(owner, 20)
    load_snapshots({SnapshotRequest(session, job.id): time.monotonic() for job in jobs})  # fill the cache
    calls: list[dict[SnapshotRequest, float]] = []

    def count_calls(requests: dict[SnapshotRequest, float]) -> dict[SnapshotRequest, Any]:
        calls.append(requests)
        return load_snapshots(requests)

    async def load_all() -> list[Any]:
        loader = SnapshotLoader()
        return await asyncio.gather(*(loader.load(SnapshotRequest(session, job.id), 0.0) for job in jobs * 10))

    monkeypatch.setattr(consumers, "load_snapshots", count_calls)
    with django_assert_num_queries(4):
        found = async_to_sync(load_all)()
    assert len(calls) == 1
    assert [job["id"] for job in found] == [job.id for job in jobs * 10]


def test_shows_each_user_their_own_jobs_until_the_session_ends(owner: User) -> None:
    other = User.objects.create_user("other")
    (mine,), (theirs,) = submit_jobs(owner, 1), submit_jobs(other, 1)
    session, foreign = log_in(owner), log_in(other)
    requests = [
        SnapshotRequest(session, mine.id),
        SnapshotRequest(session, theirs.id),
        SnapshotRequest(foreign, theirs.id),
        SnapshotRequest("none", mine.id),
    ]
    requests += [SnapshotRequest(session, "gone"), SnapshotRequest(session, "a\x00b")]
    found = load_snapshots(dict.fromkeys(requests, 0.0))
    assert [isinstance(found[request], dict) for request in requests] == [True, False, True, False, False, False]
    User.objects.filter(id=owner.id).update(is_active=False)
    assert load_snapshots({requests[0]: 0.0}) == {requests[0]: None}


def test_error_in_one_job_does_not_affect_another(owner: User, monkeypatch: pytest.MonkeyPatch) -> None:
    session, (good, bad) = log_in(owner), submit_jobs(owner, 2)
    real = consumers.serialize_job

    def detail(job: Job) -> Any:
        if job.id == bad.id:
            raise DatabaseError("its row is damaged")
        return real(job)

    monkeypatch.setattr(consumers, "serialize_job", detail)

    async def load_both() -> list[Any]:
        loader = SnapshotLoader()
        requests = (loader.load(SnapshotRequest(session, job.id), time.monotonic()) for job in (good, bad))
        return await asyncio.gather(*requests, return_exceptions=True)

    shown, error = async_to_sync(load_both)()
    assert shown["id"] == good.id
    assert isinstance(error, DatabaseError)


def test_detail_is_shared_until_the_job_changes(
    django_assert_num_queries: DjangoAssertNumQueries,
) -> None:
    job, _ = actions.submit(User.objects.create_user("owner"), GOOD)
    read = time.monotonic()
    first = get_shared_detail(job, read, read - MAX_AGE_S)
    with django_assert_num_queries(0):
        assert get_shared_detail(job, read + 0.5, read + 0.5 - MAX_AGE_S) is first
    Job.objects.filter(id=job.id).update(name="another")
    job.refresh_from_db()
    assert get_shared_detail(job, read + 0.6, read + 0.55)["name"] == "another", "the job changed at 0.55"
    assert get_shared_detail(job, read + 2, read + 2 - MAX_AGE_S) is not first
