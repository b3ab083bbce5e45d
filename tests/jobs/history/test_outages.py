"""Record attempts through outages of Redis and on a full disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from django.utils import timezone

from jobs.models import Attempt, Lease, Member
from jobs.runs.history.recording import attempt_recorder
from jobs.runs.history.recording import attempt_recorder as recording
from jobs.runs.history.recording import recorder as recorder_module
from jobs.runs.history.recording.attempt_recorder import DiagnosisSet
from jobs.runs.history.recording.recorder import NAME, HistoryRecorder
from tests.jobs.history.conftest import end
from tests.jobs.history.sample_telemetry import Sender, generate_run
from tests.jobs.history.test_recorder import expected, totals
from tests.support.processes import RedisServer, fill_disk, mount_small_disk


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "DIAGNOSIS_INTERVAL_S", 0.0)


def test_outage_of_redis_does_not_end_an_attempt(
    attempt: Attempt,
    root: Path,
    live_redis: redis.Redis,
    redis_service: RedisServer,
    recorder: HistoryRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host sends its delayed telemetry once Redis is back."""
    sender, batches = Sender(live_redis, attempt.job_id), list(generate_run(1, 6))
    for batch in batches[:3]:
        sender.send(batch)
    recorder.run_once()
    end(attempt)
    monkeypatch.setattr(recorder_module, "QUIET_S", 600.0)
    recorder._open[attempt.job_id, 1]._received_at -= 3600
    redis_service.stop()
    recorder.run_once()
    attempt.refresh_from_db()
    assert attempt.recorded is None, "no telemetry arrives"
    redis_service.start()
    recorder.run_once()
    attempt.refresh_from_db()
    assert attempt.recorded is None, "telemetry arrives again only now"
    for batch in batches[3:]:
        sender.send(batch)
    monkeypatch.setattr(recorder_module, "QUIET_S", 0.0)
    recorder.run_once()
    attempt.refresh_from_db()
    assert attempt.recorded is not None
    assert attempt.diagnosis["over"]
    assert totals(root, attempt.job_id) == expected(1, 6)


def test_history_is_complete_once_the_last_verdict_is_stored(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = Sender(live_redis, attempt.job_id)
    for batch in generate_run(1, 6):
        sender.send(batch)
    recorder.run_once()
    end(attempt)
    with monkeypatch.context() as moment:
        moment.setattr(DiagnosisSet, "_get_board_time", _away)
        recorder.run_once()
    recorder.run_once()
    attempt.refresh_from_db()
    assert attempt.recorded is not None
    assert attempt.diagnosis["over"]


def test_run_is_diagnosed_after_an_outage(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, batches = Sender(live_redis, attempt.job_id), list(generate_run(1, 6))

    def turn_without_it() -> None:
        with monkeypatch.context() as moment:
            moment.setattr(attempt_recorder, "read_known_entries", _away)
            recorder.run_once()

    for batch in batches[:3]:
        sender.send(batch)
    turn_without_it()
    recorder.run_once()
    attempt.refresh_from_db()
    assert attempt.diagnosis["step"] == 3
    Member.objects.create(
        attempt=attempt, node=1, host_name="host-b", first_rank=1, num_ranks=1, ordered=timezone.now()
    )
    turn_without_it()
    for batch in batches[3:]:
        sender.send(batch)
    for _ in range(2):
        recorder.run_once()
    attempt.refresh_from_db()
    assert attempt.diagnosis["step"] == 6
    assert recorder._diagnoses._diagnoses[attempt.job_id, 1].nodes == 2


def _away(*_: Any) -> Iterator[bytes]:
    raise redis.ConnectionError("away for a moment")


def test_full_disk_makes_the_recorder_unhealthy_until_space_is_free(
    attempt: Attempt,
    tmp_path: Path,
    settings: Any,
    live_redis: redis.Redis,
    without_intervals: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def is_well() -> bool:
        Lease.objects.filter(name=NAME).update(ticked=None)
        recorder.run_once()
        return Lease.objects.get(name=NAME).ticked is not None

    with mount_small_disk(tmp_path / "disk") as disk:
        settings.HISTORY_DIR = disk / "history"
        settings.HISTORY_DIR.mkdir()
        fill_disk(disk)
        recorder = HistoryRecorder()
        sender = Sender(live_redis, attempt.job_id)
        for batch in generate_run(2, 5):
            sender.send(batch)
        assert not is_well(), "the commit failed"
        monkeypatch.setattr(recording, "COMMIT_INTERVAL_S", 600.0)
        assert not is_well(), "no commit is due, and new entries are on no disk"
        assert [one.exc_info for one in caplog.records if "The disk of the board is full." in one.message] == [None]
        monkeypatch.setattr(recording, "COMMIT_INTERVAL_S", 0.0)
        (disk / "filling").unlink()
        assert is_well()
        recorder.close()
        assert totals(settings.HISTORY_DIR, attempt.job_id) == expected(2, 5)
