"""Provide an attempt and a recorder without delays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.utils import timezone

from jobs.models import Attempt, Host, Job
from jobs.queue import actions
from jobs.runs.history.recording import attempt_recorder as recording
from jobs.runs.history.recording import recorder as recorder_module
from jobs.runs.history.recording.recorder import HistoryRecorder
from tests.jobs.conftest import make_member
from tests.planner.wrong_specs import GOOD


@pytest.fixture
def root(tmp_path: Path, settings: Any) -> Path:
    settings.HISTORY_DIR = tmp_path / "history"
    return tmp_path / "history"


@pytest.fixture
def attempt(owner: User, make_host: Callable[..., Host]) -> Attempt:
    """Return a running attempt on one host."""
    host = make_host()
    job, _ = actions.submit(owner, {**GOOD, "layout": {"dp": 2}})
    made = Attempt.objects.create(job=job, number=1)
    make_member(made, host)
    Job.objects.filter(id=job.id).update(attempt=1, status="running")
    return made


@pytest.fixture
def without_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SCAN_INTERVAL_S", "QUIET_S", "RESTART_CHECK_INTERVAL_S"):
        monkeypatch.setattr(recorder_module, name, 0.0)
    monkeypatch.setattr(recording, "COMMIT_INTERVAL_S", 0.0)


@pytest.fixture
def recorder(
    root: Path, live_redis: redis.Redis, without_intervals: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[HistoryRecorder]:
    """Provide a recorder that reads all entries in one pass."""
    monkeypatch.setattr("jobs.runs.history.recording.recorder.MAX_READ_S", 600.0)
    made = HistoryRecorder()
    yield made
    made.close()


def end(attempt: Attempt, outcome: str = "succeeded") -> None:
    """Store an exit report as the controller does."""
    attempt.exit = {"outcome": outcome, "reason": f"it {outcome}"}
    attempt.ended = timezone.now()
    attempt.save()
