"""A diagnosis goes with the recording: stored while the job runs, whole after a restart, harmless if broken."""

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
from tests.jobs.history.test_recorder import expected, totals
from tests.jobs.history.told import Sender, rows, run


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(lifecycle, "announce", found.append)
    monkeypatch.setattr(recorder_module, "DIAGNOSIS_INTERVAL_S", 0.0)
    return found


def test_it_is_stored_as_it_changes_and_has_a_last_word(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder, announced: list[str], owner: User
) -> None:
    sender, told = Sender(live_redis, attempt.job_id), list(run(2, 12))
    for some in told[:6]:
        sender.send(some)
    recorder.run_once()
    detail: Any = serialize_job(attempt.job)
    assert detail["diagnosis"]["step"] == 6
    assert not detail["diagnosis"]["over"]
    assert announced == [attempt.job_id]
    recorder.run_once()
    assert announced == [attempt.job_id], "nothing new, nothing said"
    for some in told[6:]:
        sender.send(some)
    end(attempt, "failed")
    recorder.run_once()
    attempt.refresh_from_db()
    assert attempt.diagnosis["step"] == 12
    assert attempt.diagnosis["over"]
    assert attempt.diagnosis["state"] == "failed"


@pytest.mark.parametrize(
    ("told", "status", "reason", "sentence"),
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
def test_the_verdict_is_of_the_end_that_the_queue_gave_it(
    attempt: Attempt,
    root: Path,
    live_redis: redis.Redis,
    recorder: HistoryRecorder,
    announced: list[str],
    told: str | None,
    status: Status,
    reason: str,
    sentence: str,
) -> None:
    """Once a cancelled job's page said beside it that its host was lost."""
    sender = Sender(live_redis, attempt.job_id)
    for some in list(run(2, 6)):
        sender.send(some)
    StateChange.objects.create(job=attempt.job, attempt=1, status=status, reason=reason)
    end(attempt, told or "lost")
    if told is None:
        Attempt.objects.update(exit=None)
    recorder.run_once()
    attempt.refresh_from_db()
    assert attempt.diagnosis["sentence"] == sentence
    assert reason[1:] in (attempt.diagnosis["reason"] or attempt.diagnosis["sentence"])
    assert (attempt.diagnosis["state"] == "failed") == (status != Status.CANCELLED)
    (mark,) = [mark for mark in rows(root, attempt.job_id, "marks") if mark["kind"] in ("end", "fault")]
    assert mark["text"] == f"{status}: {reason}"


def test_while_its_host_is_silent_it_is_not_said_to_run(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder, announced: list[str]
) -> None:
    sender = Sender(live_redis, attempt.job_id)
    for some in run(2, 12):
        sender.send(some)

    def told() -> dict[str, str]:
        recorder.run_once()
        attempt.refresh_from_db()
        return {name: attempt.diagnosis[name] for name in ("state", "sentence", "reason")}

    before = told()
    since = "no contact with host host-a since 2026-11-26 13:40:10 UTC"
    assert lifecycle.change_status(attempt.job_id, 1, Status.UNREACHABLE, since)
    last = f"Last verdict: {before['sentence']}"
    assert told() == {"state": "notice", "sentence": f"Not checked: {since}.", "reason": last}
    assert lifecycle.change_status(attempt.job_id, 1, Status.RUNNING, "host host-a is back")
    assert told() == before
    assert lifecycle.change_status(attempt.job_id, 1, Status.UNREACHABLE, since)
    end(attempt, "failed")
    assert told()["state"] == "failed", "its end is known"


def test_a_new_recorder_diagnoses_the_whole_run(
    attempt: Attempt, root: Path, live_redis: redis.Redis, recorder: HistoryRecorder, announced: list[str]
) -> None:
    sender = Sender(live_redis, attempt.job_id)
    for some in run(2, 12):
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
    assert totals(root, attempt.job_id) == expected(2, 12), "told again to the diagnosis alone"


@pytest.mark.parametrize("broken", ["add", "make_verdict"])
def test_one_that_breaks_holds_up_no_recording(
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
    for some in run(2, 6):
        sender.send(some)
        recorder.run_once()
    end(attempt)
    recorder.run_once()
    attempt.refresh_from_db()
    assert attempt.recorded is not None
    assert attempt.diagnosis is None
    assert totals(root, attempt.job_id) == expected(2, 6)


def test_one_that_is_too_large_is_not_stored(
    attempt: Attempt,
    root: Path,
    live_redis: redis.Redis,
    recorder: HistoryRecorder,
    announced: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempt_recorder, "MAX_VERDICT_BYTES", 100)
    for some in run(1, 2):
        Sender(live_redis, attempt.job_id).send(some)
    recorder.run_once()
    attempt.refresh_from_db()
    assert attempt.diagnosis is None
