"""Who may still see which job, asked once for all sockets that wonder at about the same time."""

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
from jobs.runs.live import details, looks
from jobs.runs.live.looks import Looks, Wish, looked_up
from tests.planner.wrong_specs import GOOD

pytestmark = pytest.mark.django_db(transaction=True)


def session_of(user: User) -> str:
    client = Client()
    client.force_login(user)
    return str(client.session.session_key)


def submitted(user: User, count: int) -> list[Job]:
    return [actions.submit(user, {**GOOD, "name": f"job {n}"})[0] for n in range(count)]


@pytest.fixture
def owner() -> User:
    return User.objects.create_user("owner")


def test_many_sockets_ask_as_much_as_one(
    owner: User, monkeypatch: pytest.MonkeyPatch, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    """Session, user, projects, jobs: 200 sockets of 20 jobs asked 800 questions every 5 seconds."""
    session, jobs = session_of(owner), submitted(owner, 20)
    looked_up({Wish(session, job.id): time.monotonic() for job in jobs})  # their details are made
    questions: list[dict[Wish, float]] = []

    def counted(wanted: dict[Wish, float]) -> dict[Wish, Any]:
        questions.append(wanted)
        return looked_up(wanted)

    async def all_at_once() -> list[Any]:
        together = Looks()
        return await asyncio.gather(*(together.at(Wish(session, job.id), 0.0) for job in jobs * 10))

    monkeypatch.setattr(looks, "looked_up", counted)
    with django_assert_num_queries(4):
        found = async_to_sync(all_at_once)()
    assert len(questions) == 1
    assert [job["id"] for job in found] == [job.id for job in jobs * 10]


def test_each_sees_their_own_and_nothing_once_the_session_is_over(owner: User) -> None:
    other = User.objects.create_user("other")
    (mine,), (theirs,) = submitted(owner, 1), submitted(other, 1)
    session, foreign = session_of(owner), session_of(other)
    wishes = [Wish(session, mine.id), Wish(session, theirs.id), Wish(foreign, theirs.id), Wish("none", mine.id)]
    wishes += [Wish(session, "gone"), Wish(session, "a\x00b")]
    found = looked_up(dict.fromkeys(wishes, 0.0))
    assert [isinstance(found[wish], dict) for wish in wishes] == [True, False, True, False, False, False]
    User.objects.filter(id=owner.id).update(is_active=False)
    assert looked_up({wishes[0]: 0.0}) == {wishes[0]: None}


def test_a_job_that_cannot_be_shown_is_no_other_s_trouble(owner: User, monkeypatch: pytest.MonkeyPatch) -> None:
    session, (good, bad) = session_of(owner), submitted(owner, 2)
    real = details.job_detail

    def detail(job: Job) -> Any:
        if job.id == bad.id:
            raise DatabaseError("its row is damaged")
        return real(job)

    monkeypatch.setattr(details, "job_detail", detail)

    async def both() -> list[Any]:
        together = Looks()
        asked = (together.at(Wish(session, job.id), time.monotonic()) for job in (good, bad))
        return await asyncio.gather(*asked, return_exceptions=True)

    shown, error = async_to_sync(both)()
    assert shown["id"] == good.id
    assert isinstance(error, DatabaseError)
