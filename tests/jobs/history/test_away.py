"""Redis is away for a moment, just when an attempt begins or ends: it is told whole all the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from django.utils import timezone

from jobs.models import Attempt, Member
from jobs.runs.history.recording import attempt_recorder
from jobs.runs.history.recording import recorder as recorder_module
from jobs.runs.history.recording.attempt_recorder import DiagnosisSet
from jobs.runs.history.recording.recorder import HistoryRecorder
from tests.jobs.history.conftest import end
from tests.jobs.history.test_recorder import expected, totals
from tests.jobs.history.told import Sender, run
from tests.support.processes import RedisServer


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "DIAGNOSIS_INTERVAL_S", 0.0)


def test_its_silence_is_no_attempt_s_end(
    attempt: Attempt,
    root: Path,
    live_redis: redis.Redis,
    redis_service: RedisServer,
    recorder: HistoryRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a host could not send meanwhile comes when Redis is back."""
    sender, told = Sender(live_redis, attempt.job_id), list(run(1, 6))
    for some in told[:3]:
        sender.send(some)
    recorder.run_once()
    end(attempt)
    monkeypatch.setattr(recorder_module, "QUIET_S", 600.0)
    recorder._open[attempt.job_id, 1]._received_at -= 3600
    redis_service.stop()
    recorder.run_once()
    attempt.refresh_from_db()
    assert attempt.recorded is None, "nothing could be heard"
    redis_service.start()
    recorder.run_once()
    attempt.refresh_from_db()
    assert attempt.recorded is None, "it is heard again only now"
    for some in told[3:]:
        sender.send(some)
    monkeypatch.setattr(recorder_module, "QUIET_S", 0.0)
    recorder.run_once()
    attempt.refresh_from_db()
    assert attempt.recorded is not None
    assert attempt.diagnosis["over"]
    assert totals(root, attempt.job_id) == expected(1, 6)


def test_a_history_is_whole_once_the_last_word_is_stored(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = Sender(live_redis, attempt.job_id)
    for some in run(1, 6):
        sender.send(some)
    recorder.run_once()
    end(attempt)
    with monkeypatch.context() as moment:
        moment.setattr(DiagnosisSet, "_get_board_time", _away)
        recorder.run_once()
    recorder.run_once()
    attempt.refresh_from_db()
    assert attempt.recorded is not None
    assert attempt.diagnosis["over"]


def test_a_run_that_it_could_not_be_asked_of_is_diagnosed_the_next_time(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, told = Sender(live_redis, attempt.job_id), list(run(1, 6))

    def turn_without_it() -> None:
        with monkeypatch.context() as moment:
            moment.setattr(attempt_recorder, "read_known_entries", _away)
            recorder.run_once()

    for some in told[:3]:
        sender.send(some)
    turn_without_it()
    recorder.run_once()
    attempt.refresh_from_db()
    assert attempt.diagnosis["step"] == 3
    Member.objects.create(
        attempt=attempt, node=1, host_name="host-b", first_rank=1, num_ranks=1, ordered=timezone.now()
    )
    turn_without_it()
    for some in told[3:]:
        sender.send(some)
    for _ in ("begun anew", "looked at"):
        recorder.run_once()
    attempt.refresh_from_db()
    assert attempt.diagnosis["step"] == 6
    assert recorder._diagnoses._diagnoses[attempt.job_id, 1].nodes == 2


def _away(*_: Any) -> Iterator[bytes]:
    raise redis.ConnectionError("away for a moment")
