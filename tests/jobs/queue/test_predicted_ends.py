"""Predicted ends of runs and queued jobs, from the measured step time and the checkpoint."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils import timezone

from jobs.models import Attempt, Host, Job, StateChange, Status
from jobs.queue.scheduling.predicted_ends import load_running_attempts, predict_durations
from tests.jobs.conftest import make_member

NOW = timezone.now()


@pytest.fixture
def attempt(each_database: str) -> Attempt:
    """Start a run of 1,000 steps with an estimate of 6 s per step, a minute ago."""
    job = Job.objects.create(
        owner=User.objects.create_user("owner"), name="runs", kind="train", device="cpu", num_slots=1,
        spec={"train": {"steps": 1000}}, estimate={"time": {"step_s": 6.0}}, status=Status.RUNNING, attempt=2,
    )  # fmt: skip
    StateChange.objects.create(job=job, attempt=2, status=Status.RUNNING)
    StateChange.objects.update(at=NOW - timedelta(seconds=60))
    return Attempt.objects.create(job=job, number=2)


def diagnosed(attempt: Attempt, *, step: int, step_s: float | None, steps: int = 10, ago_s: float = 0.0) -> None:
    measured = None if step_s is None else {"step_s": step_s, "sure": 0.0, "steps": steps, "parts": []}
    told = {"time": NOW.timestamp() - ago_s, "step": step, "measured": measured}
    Attempt.objects.filter(pk=attempt.pk).update(diagnosis=told)


def left() -> float | None:
    (found,) = load_running_attempts(NOW)
    return None if found.left_s is None else round(found.left_s)


def test_predicted_end_uses_the_step_time(attempt: Attempt) -> None:
    assert left() == 6000 - 60, "by its estimate"
    diagnosed(attempt, step=100, step_s=None)
    assert left() == 6000 - 60
    diagnosed(attempt, step=100, step_s=2.0, steps=2)
    assert left() == 6000 - 60, "two steps are no pace"
    diagnosed(attempt, step=100, step_s=2.0)
    assert left() == 1800
    diagnosed(attempt, step=100, step_s=2.0, ago_s=30)
    assert left() == 1770
    diagnosed(attempt, step=1000, step_s=2.0, ago_s=30)
    assert left() == 0
    diagnosed(attempt, step=100, step_s=2.0)
    Job.objects.update(time_limit_s=600)
    assert left() == 540


def test_ending_job_frees_slots_unless_its_host_is_silent(attempt: Attempt) -> None:
    told = {"device_name": "test", "memory_bytes": 2**30, "boot_id": "b", "last_seen": timezone.now()}
    make_member(attempt, Host.objects.create(name="anna", device="cpu", slots=1, **told))
    Job.objects.update(status=Status.CANCELLING)
    assert left() == 0
    Host.objects.update(last_seen=timezone.now() - timedelta(minutes=5))
    assert left() is None


def test_reconnected_host_does_not_restart_the_run_time(attempt: Attempt) -> None:
    StateChange.objects.create(job=attempt.job, attempt=2, status=Status.RUNNING)
    StateChange.objects.filter(pk=StateChange.objects.latest("id").pk).update(at=NOW)
    Job.objects.update(time_limit_s=600)
    assert left() == 540


@pytest.mark.parametrize(("number", "seconds"), [(1, 3000.0), (2, 6000.0)])
def test_predicted_end_of_a_resumed_run(attempt: Attempt, number: int, seconds: float) -> None:
    """Ignore checkpoints that the attempt wrote itself."""
    told: dict[str, Any] = {"number": number, "checkpoint": f"{attempt.job_id}/{number}/step-00000500"}
    Attempt.objects.update_or_create(job=attempt.job, number=number, defaults=told)
    assert predict_durations(Job.objects.all()) == {attempt.job_id: seconds}
