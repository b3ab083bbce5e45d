"""Duration, step time, loss, and reason in the list of jobs."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta
from html import unescape
from typing import Any

import msgpack
import pytest
import redis
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone

from contracts.names import telemetry_stream
from jobs.models import Attempt, Job, StateChange, Status
from jobs.pages.jobs import live_figures
from jobs.pages.jobs.live_figures import LatestStep, find_progress
from jobs.templatetags.meshboard import loss_value, span
from tests.jobs.api.job_events import make_step_item

Make = Callable[..., list[Job]]
LOSSES = [{"step": at, "loss": 5.0 - at / 10, "time": float(at)} for at in (1, 2, 3)]
SUMMARY = {"steps": 3, "tokens_per_s": 1e3, "losses": LOSSES, "measured": {"steps": 2, "step_s": 0.01234}}
FAILED = {"over": True, "state": "failed", "sentence": "Failed: rank 1 on a, ValueError: no (x.py, line 3)."}
NOTHING = "\N{EN DASH}"


@pytest.fixture(autouse=True)
def _nothing_read_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    live_figures.progress_cache.clear()


def changes(job: Job, begin: datetime, **after_s: float) -> None:
    """Record the changes of the current attempt: the status, and its seconds after `begin`."""
    for status, seconds in after_s.items():
        reason = f"{status} for a reason"
        change = StateChange.objects.create(job=job, attempt=job.attempt, status=status, reason=reason)
        StateChange.objects.filter(pk=change.pk).update(at=begin + timedelta(seconds=seconds))


def shown(client: Client, owner: User, query: str = "") -> dict[str, str]:
    """Return the cells of the only row, by the name of their columns."""
    client.force_login(owner)
    page = client.get(f"/{query}").content.decode()
    (row,) = re.findall(r"<tr data-job.*?</tr>", page, re.DOTALL)
    cells = re.findall(r'data-label="([^"]+)"[^>]*>(.*?)</td>', row, re.DOTALL)
    return {name: " ".join(unescape(re.sub("<[^>]+>", " ", cell)).split()) for name, cell in cells}


def test_ended_run_shows_duration_step_time_and_loss(make_jobs: Make, owner: User, client: Client) -> None:
    (job,) = make_jobs(1, status=Status.SUCCEEDED)
    Attempt.objects.create(job=job, number=1, exit={"summary": SUMMARY}, ended=timezone.now())
    changes(job, timezone.now() - timedelta(days=1), queued=0, starting=100, running=110, succeeded=165)
    row = shown(client, owner)
    assert row["Steps"].startswith("3 of 20")
    assert (row["Duration"], row["Step time"], row["Loss"]) == ("1 min 05 s", "12.3 ms", "4.7000")
    assert row["Reason"] == NOTHING


def test_shows_the_current_attempt_only(make_jobs: Make, owner: User, client: Client) -> None:
    (job,) = make_jobs(1, status=Status.SUCCEEDED, attempt=2)
    now = timezone.now()
    for number, step_s in ((1, 9.0), (2, 0.5)):
        exit = {"summary": {**SUMMARY, "measured": {"steps": 2, "step_s": step_s}}}
        Attempt.objects.create(job=job, number=number, exit=exit, ended=now)
    changes(job, now - timedelta(days=1), starting=100, succeeded=110)
    job.attempt = 1
    changes(job, now - timedelta(days=2), starting=0, failed=3000)
    row = shown(client, owner)
    assert (row["Duration"], row["Step time"]) == ("10.0 s", "500 ms")


def test_nan_loss_is_not_replaced_by_an_older_loss(make_jobs: Make, owner: User, client: Client) -> None:
    (job,) = make_jobs(1, status=Status.SUCCEEDED)
    Attempt.objects.create(job=job, number=1, exit={"summary": {**SUMMARY, "steps": 4}})
    assert shown(client, owner)["Loss"] == NOTHING


def test_running_job_shows_live_loss_step_time_and_duration(
    make_jobs: Make, owner: User, live_redis: redis.Redis, client: Client
) -> None:
    (job,) = make_jobs(1, status=Status.RUNNING)
    diagnosis = {"over": False, "state": "well", "sentence": "On plan.", "measured": {"step_s": 0.25, "steps": 9}}
    Attempt.objects.create(job=job, number=1, diagnosis=diagnosis)
    changes(job, timezone.now() - timedelta(hours=2, minutes=3), starting=0, running=5)
    items = [make_step_item(7, 3.5), make_step_item(8, 3.25), make_step_item(8, None, rank=1)]
    live_redis.xadd(telemetry_stream(job.id, 1), {"b": msgpack.packb({"items": items})})
    row = shown(client, owner)
    assert (row["Duration"], row["Step time"], row["Loss"]) == ("2 h 03 min", "250 ms", "3.2500")
    assert row["Reason"] == NOTHING


@pytest.mark.parametrize("status", ["running", "succeeded", "failed"])
@pytest.mark.parametrize(
    ("reported", "cell"),
    [
        ({"step": 1250, "loss": 2.5, "not_finite": "", "source": "log line"}, "2.5000 log lines"),
        ({"step": 3, "loss": None, "not_finite": "nan", "source": "event file"}, "NaN metric files"),
        (None, NOTHING),
    ],
)
def test_script_shows_the_loss_that_it_reported_and_its_source(
    make_jobs: Make, owner: User, client: Client, status: str, reported: dict[str, Any] | None, cell: str
) -> None:
    (job,) = make_jobs(1, status=status)
    exit = {"summary": {**SUMMARY, "steps": 1300}}
    Attempt.objects.create(job=job, number=1, exit=exit, diagnosis={"over": False, "sentence": "", "loss": reported})
    changes(job, timezone.now(), **{status: 0})
    assert shown(client, owner)["Loss"] == cell


@pytest.mark.parametrize(
    ("status", "diagnosis", "reason"),
    [
        ("queued", None, "Needs 4 slots."),
        ("failed", FAILED, "Rank 1 on a, ValueError: no (x.py, line 3)."),
        ("failed", {**FAILED, "over": False}, "failed for a reason"),
        ("lost", None, "lost for a reason"),
        ("cancelled", {"over": True, "state": "well", "sentence": "On plan."}, "cancelled for a reason"),
        ("unreachable", None, "unreachable for a reason"),
        ("running", {"over": False, "state": "hung", "sentence": "Stalled: rank 3."}, "Stalled: rank 3."),
        ("running", {"over": False, "state": "well", "sentence": "On plan."}, NOTHING),
        ("succeeded", {"over": True, "state": "slow", "sentence": "Slower than planned."}, NOTHING),
    ],
)
def test_reason_of_waiting_failed_and_stalled_jobs(
    make_jobs: Make, owner: User, client: Client, status: str, diagnosis: dict[str, Any] | None, reason: str
) -> None:
    (job,) = make_jobs(1, status=status, wait_reason="Needs 4 slots.")
    Attempt.objects.create(job=job, number=1, diagnosis=diagnosis)
    changes(job, timezone.now(), **{status: 0})
    assert shown(client, owner)["Reason"] == reason
    title = f'title="{reason}"' if reason != NOTHING else "data-none"
    assert title in client.get("/").content.decode()


@pytest.mark.parametrize(
    ("status", "state", "over", "stalled"),
    [
        ("running", "hung", False, True),
        ("running", "slow", False, False),
        ("unreachable", "hung", False, False),
        ("failed", "hung", True, False),
    ],
)
@pytest.mark.parametrize("path", ["/?columns=status", "/overview/"])
def test_running_job_without_progress_is_stalled(
    make_jobs: Make, owner: User, client: Client, path: str, status: str, state: str, over: bool, stalled: bool
) -> None:
    (job,) = make_jobs(1, status=status)
    Attempt.objects.create(job=job, number=1, diagnosis={"over": over, "state": state, "sentence": "Stalled: x."})
    client.force_login(owner)
    assert (">stalled</span>" in client.get(path).content.decode()) == stalled


def test_job_that_did_not_start_has_no_measures(make_jobs: Make, owner: User, client: Client) -> None:
    (job,) = make_jobs(1, status=Status.CANCELLED)
    changes(job, timezone.now(), queued=0, cancelled=50)
    row = shown(client, owner)
    assert [row[name] for name in ("Duration", "Step time", "Loss")] == [NOTHING] * 3
    assert "Loss" not in shown(client, owner, "?col=status&col=duration")


def test_newest_loss_is_of_the_newest_step() -> None:
    assert find_progress([]) is None
    assert find_progress([make_step_item(3, 2.0), make_step_item(5, None), make_step_item(4, 1.5)]) == LatestStep(
        5, 1.5
    )
    assert find_progress([make_step_item(3, None)]) == LatestStep(3, None)
    result = find_progress(
        [make_step_item(3, 2.0), {**make_step_item(4, None), "not_finite": "loss is nan and gradient norm is nan"}]
    )
    assert result is not None
    assert loss_value(result.loss) == "NaN"
    assert find_progress(
        [make_step_item(3, 2.0), {**make_step_item(4, 1.0), "not_finite": "gradient norm is inf"}]
    ) == LatestStep(4, 1.0)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        *((None, NOTHING), (-1, NOTHING), (0, "0 µs"), (12.3e-6, "12.3 µs"), (0.0123, "12.3 ms"), (0.9996, "1.00 s")),
        *((59.96, "60.0 s"), (65, "1 min 05 s"), (3599.6, "1 h 00 min"), (7443, "2 h 04 min"), (1998720, "23 d 3 h")),
    ],
)
def test_formats_durations_like_the_job_page(seconds: float | None, words: str) -> None:
    assert span(seconds) == words


@pytest.mark.parametrize(
    ("loss", "words"), [(None, NOTHING), (2.49312, "2.4931"), (12345.0, "1.23e+4"), (float("inf"), "infinite")]
)
def test_formats_losses_like_the_job_page(loss: float | None, words: str) -> None:
    assert loss_value(loss) == words
