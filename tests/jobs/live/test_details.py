"""A job as its pages show it: made once for many, never older than what a page was told of."""

from __future__ import annotations

import time

import pytest
from django.contrib.auth.models import User
from pytest_django import DjangoAssertNumQueries

from jobs.models import Job
from jobs.queue import actions
from jobs.runs.live.details import FRESH_S, shared_detail
from tests.planner.wrong_specs import GOOD


@pytest.mark.django_db
def test_it_is_made_once_for_who_looks_within_a_second_and_anew_after_a_change(
    django_assert_num_queries: DjangoAssertNumQueries,
) -> None:
    job, _ = actions.submit(User.objects.create_user("owner"), GOOD)
    read = time.monotonic()
    first = shared_detail(job, read, read - FRESH_S)
    with django_assert_num_queries(0):
        assert shared_detail(job, read + 0.5, read + 0.5 - FRESH_S) is first
    Job.objects.filter(id=job.id).update(name="another")
    job.refresh_from_db()
    assert shared_detail(job, read + 0.6, read + 0.55)["name"] == "another", "it was told of a change at 0.55"
    assert shared_detail(job, read + 2, read + 2 - FRESH_S) is not first
