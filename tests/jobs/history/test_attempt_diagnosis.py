"""Diagnose attempts during the recording, also after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User

from jobs.core.job_details import serialize_job
from jobs.models import Attempt, StateChange, Status
from jobs.queue import lifecycle
from jobs.runs.diagnosis import Diagnosis
from jobs.runs.history.recording import attempt_recorder
from jobs.runs.history.recording import recorder as recorder_module
from jobs.runs.history.recording.recorder import HistoryRecorder
from tests.jobs.history.conftest import end
from tests.jobs.history.sample_telemetry import Sender, generate_run, rows
from tests.jobs.history.test_recorder import expected, totals


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(lifecycle, "announce", found.append)
    monkeypatch.setattr(recorder_module, "DIAGNOSIS_INTERVAL_S", 0.0)
    return found


def test_stores_changed_verdicts_and_a_final_one(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder, announced: list[str], owner: User
) -> None:
    sender, batches = Sender(live_redis, attempt.job_id), list(generate_run(2, 12))
    for some in batches[:6]:
        sender.send(some)
    recorder.run_once()
    detail: Any = serialize_job(attempt.job)
    assert detail["diagnosis"]["step"] == 6
    assert not detail["diagnosis"]["over"]
    assert announced == [attempt.job_id]
    recorder.run_once()
    assert announced == [attempt.job_id], "nothing new, nothing said"
    for some in batches[6:]:
        sender.send(some)
    end(attempt, "failed")
    recorder.run_once()
    attempt.refresh_from_db()
    assert attempt.diagnosis["step"] == 12
    assert attempt.diagnosis["over"]
    assert attempt.diagnosis["state"] == "failed"


@pytest.mark.parametrize(
    ("outcome", "status", "reason", "sentence"),
    [
        (
            None,
            Status.CANCELLED,
            "host small no longer knows this attempt",
            "Not checked: the job was cancelled after 6 steps.",
        ),
        ("failed", Status.CANCELLED, "cancelled on request", "Not checked: the job was cancelled after 6 steps."),
        ("cancelled", Status.FAILED, "it ran for its 60 s", "Failed: it ran for its 60 s."),
        (None, Status.LOST, "host small was rebooted", "Lost: host small was rebooted."),
    ],
)
def test_verdict_uses_the_outcome_of_the_queue(
    attempt: Attempt,
    root: Path,
    live_redis: redis.Redis,
    recorder: HistoryRecorder,
    announced: list[str],
    outcome: str | None,
    status: Status,
    reason: str,
    sentence: str,
) -> None:
    """The page of a cancelled job reported a lost host."""
    sender = Sender(live_redis, attempt.job_id)
    for some in list(generate_run(2, 6)):
        sender.send(some)
    StateChange.objects.create(job=attempt.job, attempt=1, status=status, reason=reason)
    end(attempt, outcome or "lost")
    if outcome is None:
        Attempt.objects.update(exit=None)
    recorder.run_once()
    attempt.refresh_from_db()
    assert attempt.diagnosis["sentence"] == sentence
    assert reason[1:] in (attempt.diagnosis["reason"] or attempt.diagnosis["sentence"])
    assert (attempt.diagnosis["state"] == "failed") == (status != Status.CANCELLED)
    (mark,) = [mark for mark in rows(root, attempt.job_id, "marks") if mark["kind"] in ("end", "fault")]
    assert mark["text"] == f"{status}: {reason}"


def test_silent_host_makes_the_run_not_checked(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder, announced: list[str]
) -> None:
    sender = Sender(live_redis, attempt.job_id)
    for some in generate_run(2, 12):
        sender.send(some)

    def read_verdict() -> dict[str, str]:
        recorder.run_once()
        attempt.refresh_from_db()
        return {name: attempt.diagnosis[name] for name in ("state", "sentence", "reason")}

    before = read_verdict()
    since = "no contact with host host-a since 2026-11-26 13:40:10 UTC"
    assert lifecycle.change_status(attempt.job_id, 1, Status.UNREACHABLE, since)
    last = f"Last verdict: {before['sentence']}"
    assert read_verdict() == {"state": "notice", "sentence": f"Not checked: {since}.", "reason": last}
    assert lifecycle.change_status(attempt.job_id, 1, Status.RUNNING, "host host-a is back")
    assert read_verdict() == before
    assert lifecycle.change_status(attempt.job_id, 1, Status.UNREACHABLE, since)
    end(attempt, "failed")
    assert read_verdict()["state"] == "failed", "its end is known"


def test_new_recorder_diagnoses_the_whole_run(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder, announced: list[str]
) -> None:
    sender = Sender(live_redis, attempt.job_id)
    for some in generate_run(2, 12):
        sender.send(some)
    recorder.run_once()
    attempt.refresh_from_db()
    before = attempt.diagnosis
    recorder.close()
    Attempt.objects.update(diagnosis=None)
    other = HistoryRecorder()
    other.run_once()
    other.close()
    attempt.refresh_from_db()
    assert {**attempt.diagnosis, "time": 0} == {**before, "time": 0}
    assert totals(root, attempt.job_id) == expected(2, 12), "repeated batches reach only the diagnosis"


@pytest.mark.parametrize("broken", ["add", "make_verdict"])
def test_failing_diagnosis_does_not_stop_the_recording(
    attempt: Attempt,
    root: Path,
    live_redis: redis.Redis,
    recorder: HistoryRecorder,
    announced: list[str],
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a defect of ours")

    monkeypatch.setattr(Diagnosis, broken, fail)
    sender = Sender(live_redis, attempt.job_id)
    for some in generate_run(2, 6):
        sender.send(some)
        recorder.run_once()
    end(attempt)
    recorder.run_once()
    attempt.refresh_from_db()
    assert attempt.recorded is not None
    assert attempt.diagnosis is None
    assert totals(root, attempt.job_id) == expected(2, 6)


def test_too_large_diagnosis_is_not_stored(
    attempt: Attempt,
    root: Path,
    live_redis: redis.Redis,
    recorder: HistoryRecorder,
    announced: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempt_recorder, "MAX_VERDICT_BYTES", 100)
    for some in generate_run(1, 2):
        Sender(live_redis, attempt.job_id).send(some)
    recorder.run_once()
    attempt.refresh_from_db()
    assert attempt.diagnosis is None
