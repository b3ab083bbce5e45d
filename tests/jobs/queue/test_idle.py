"""`run.idle_limit_s`: a run that takes no step ends, and one whose steps are long does not."""

from __future__ import annotations

import pytest
import redis
from django.contrib.auth.models import User

from contracts.names import telemetry_stream
from jobs.models import Job, StateChange
from jobs.queue import termination
from tests.jobs.metrics.board import board, go_on, tell


def test_a_step_that_is_told_between_two_looks_is_one(
    owner: User, live_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(termination.time, "monotonic", lambda: now)
    job = board(owner)
    Job.objects.filter(id=job.id).update(idle_limit_s=12)
    looking = termination.IdleWatch()
    for step in (1, 2, 3):
        tell(live_redis, job.id, step)
        go_on(live_redis, job.id)
        assert looking.stop_idle_runs(live_redis) == 0, f"step {step} was taken {now - 990:.0f} s after the run began"
        now += 10
    live_redis.delete(telemetry_stream(job.id, 1))
    assert looking.stop_idle_runs(live_redis) == 0
    now += 10
    assert looking.stop_idle_runs(live_redis) == 1
    assert "after step 3" in StateChange.objects.filter(job=job).latest("id").reason
