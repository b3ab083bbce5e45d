"""Calibrations: who may start one, where it runs, what becomes of its result."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.cache import cache
from django.utils import timezone
from rest_framework.test import APIClient

from jobs.models import Attempt, Host, Job, Status
from jobs.queue.inbound.event_handlers import handle_event
from jobs.queue.scheduling import scheduler
from tests.jobs.conftest import attempt_event

Api = Callable[[User | None], APIClient]
MakeHost = Callable[..., Host]

PROFILE: dict[str, Any] = {
    "version": 2,
    "device": "cpu",
    "device_name": "a CPU",
    "torch_version": "2.13.0",
    "cores": 2,
    "slots": 4,
    "memory_bytes": 2**33,
    "measured_at": "2026-11-21T03:00:00+00:00",
    "gemm": [{"ranks": n, "precision": "fp32", "m": 256, "n": 256, "k": 256, "seconds": 0.001 * n} for n in (1, 4)],
    "stream": [{"ranks": n, "num_bytes": 2**20, "seconds": 0.0002 * n} for n in (1, 4)],
    "layers": [],
    "ends": [],
    "optimizer": [],
    "collectives": [{"ranks": 4, "op": "send", "group_size": 2, "payload_bytes": 1024, "seconds": 0.0001}],
}


@pytest.fixture(autouse=True)
def _fresh_throttle() -> None:
    cache.clear()


@pytest.fixture
def running(staff: User, api: Api, make_host: MakeHost) -> Attempt:
    """A calibration on its host."""
    make_host()
    job = api(staff).post("/api/v1/hosts/host-a/calibrate").json()
    scheduler.schedule()
    assert Job.objects.get(id=job["id"]).status == Status.STARTING
    return Attempt.objects.get(job_id=job["id"])


def ended(attempt: Attempt, profile: object, outcome: str = "succeeded") -> Job:
    summary = {"steps": 0, "tokens_per_s": None, "losses": [], "eval_losses": [], "cells": {}, "verdict": {}}
    if profile is not None:
        summary["profile"] = profile
    event: Any = attempt_event(attempt.job_id, 1, "exited", outcome, attempt.format_hosts())
    event["report"]["exit"] |= {"reason": "measured the host", "summary": summary}
    handle_event(event, "0-1")
    return Job.objects.get(id=attempt.job_id)


def test_only_staff_may_calibrate(owner: User, api: Api, make_host: MakeHost) -> None:
    make_host()
    assert api(owner).post("/api/v1/hosts/host-a/calibrate").status_code == 403
    assert api(None).post("/api/v1/hosts/host-a/calibrate").status_code == 401
    assert Job.objects.count() == 0


CALIBRATION = {
    "kind": "calibrate",
    "model": {"preset": "gpt-tiny"},
    "layout": {"dp": 4},
    "resources": {"host": "host-a"},
}


def test_nobody_calibrates_by_a_spec_what_they_may_not(owner: User, staff: User, api: Api, make_host: MakeHost) -> None:
    """Anybody's job of this kind became the host's profile: one rank, beside a training run."""
    make_host()
    answer = api(owner).post("/api/v1/jobs", CALIBRATION, format="json")
    assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "/kind")
    assert not Job.objects.exists()


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"layout": {"dp": 1}}, "layout", "uses all 4 slots"),
        (
            {"resources": {"host": "host-z"}},
            "resources.host",
            "`resources.host` is 'host-z', but no such cpu host exists.",
        ),
    ],
)
def test_a_calibration_by_spec_takes_all_of_a_host_that_there_is(
    staff: User, api: Api, make_host: MakeHost, change: dict[str, Any], field: str, words: str
) -> None:
    make_host()
    answer = api(staff).post("/api/v1/jobs", {**CALIBRATION, **change}, format="json")
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert error["field"] == field
    assert words in error["message"]


def test_it_takes_every_slot_of_the_host_it_names(running: Attempt) -> None:
    assert running.format_hosts() == "host-a"
    assert running.job.spec["kind"] == "calibrate"
    assert running.members.get().allocations.count() == 4


def test_its_profile_becomes_the_hosts_and_the_planner_uses_it(running: Attempt, staff: User, api: Api) -> None:
    client = api(staff)
    spec = {"model": {"preset": "gpt-tiny"}}
    assert client.get("/api/v1/hosts/host-a/profile").status_code == 404
    assert client.post("/api/v1/plan", spec, format="json").json()["estimate"]["time"]["basis"] == "data sheet"
    assert ended(running, PROFILE).status == Status.SUCCEEDED
    assert client.get("/api/v1/hosts/host-a/profile").json()["gemm"] == PROFILE["gemm"]
    assert client.get("/api/v1/hosts").json()[0]["calibrated"]
    made = client.post("/api/v1/plan", spec, format="json").json()["estimate"]
    assert (made["time"]["basis"], made["cluster"]["name"]) == ("calibrated", "host-a")
    named = client.post("/api/v1/plan?cluster=host:host-a", spec, format="json").json()["estimate"]
    assert named["time"] == made["time"]
    assert "host:host-a" in [c["id"] for c in client.get("/api/v1/clusters").json()]
    assert "profile" not in Attempt.objects.get(pk=running.pk).exit["summary"]


@pytest.mark.parametrize(
    "profile",
    [
        None,
        {},
        [],
        {**PROFILE, "gemm": []},
        {**PROFILE, "version": 1},
        {**PROFILE, "surprise": 1},
        {**PROFILE, "stream": [{"ranks": 1, "num_bytes": 1024, "seconds": -1.0}]},
        {**PROFILE, "slots": "4"},
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_senseless_profile_fails_the_job_and_changes_nothing(running: Attempt, profile: object) -> None:
    job = ended(running, profile)
    assert job.status == Status.FAILED
    assert job.history.get(status=Status.FAILED).reason.startswith("the host sent no valid calibration profile")
    assert Host.objects.get().profile is None


def test_a_failed_calibration_keeps_the_profile_there_was(running: Attempt) -> None:
    Host.objects.update(profile=PROFILE, profiled=timezone.now())
    assert ended(running, None, outcome="failed").status == Status.FAILED
    assert Host.objects.get().profile == PROFILE


def test_a_job_for_one_host_waits_for_that_host_and_says_so(staff: User, api: Api, make_host: MakeHost) -> None:
    make_host("host-a")
    other = make_host("host-b")
    job = api(staff).post("/api/v1/hosts/host-b/calibrate").json()["id"]
    Host.objects.filter(pk=other.pk).update(drained=True)
    scheduler.schedule()
    assert Job.objects.get(id=job).wait_reason == "The required host host-b is drained."
    Host.objects.filter(pk=other.pk).update(drained=False, last_seen=timezone.now() - timedelta(minutes=5))
    scheduler.schedule()
    assert Job.objects.get(id=job).wait_reason == "The required host host-b is not connected."
    Host.objects.filter(pk=other.pk).update(last_seen=timezone.now())
    scheduler.schedule()
    assert Attempt.objects.get(job_id=job).format_hosts() == "host-b"


def test_a_host_is_calibrated_once_at_a_time(staff: User, api: Api, make_host: MakeHost) -> None:
    make_host(name="host-a")
    assert api(staff).post("/api/v1/hosts/host-a/calibrate").status_code == 201
    again = api(staff).post("/api/v1/hosts/host-a/calibrate")
    assert again.status_code == 409
    assert "already queued or running" in again.json()["errors"][0]["message"]


def test_a_drained_or_unknown_host_cannot_be_calibrated(staff: User, api: Api, make_host: MakeHost) -> None:
    host = make_host()
    Host.objects.filter(pk=host.pk).update(drained=True)
    answer = api(staff).post("/api/v1/hosts/host-a/calibrate")
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (409, "host")
    assert api(staff).post("/api/v1/hosts/host-z/calibrate").status_code == 404


@pytest.mark.parametrize(
    ("change", "field"),
    [({"resources": {}}, "resources.host"), ({"layout": {"dp": 2, "tp": 2}}, "layout")],
    ids=["no host", "another axis"],
)
def test_a_calibration_is_plain_ranks_of_a_named_host(
    staff: User, api: Api, change: dict[str, Any], field: str
) -> None:
    spec = {
        "kind": "calibrate",
        "model": {"preset": "gpt-tiny"},
        "layout": {"dp": 2},
        "resources": {"host": "host-a"},
        **change,
    }
    answer = api(staff).post("/api/v1/jobs", spec, format="json")
    assert answer.status_code == 422
    assert field in [e["field"] for e in answer.json()["errors"]]


def test_the_pages_show_hosts_and_what_was_measured(staff: User, owner: User, client: Any, make_host: MakeHost) -> None:
    make_host()
    client.force_login(owner)
    assert "Not calibrated" in client.get("/hosts/").content.decode()
    page = client.get("/hosts/host-a/").content.decode()
    assert "Not calibrated" in page
    assert 'id="calibrate"' not in page
    assert client.post("/hosts/host-a/calibrate/").status_code == 403
    Host.objects.update(profile=PROFILE, profiled=timezone.now())
    client.force_login(staff)
    page = client.get("/hosts/host-a/").content.decode()
    assert "33.6" in page  # 2 x 256^3 / 1 ms in GFLOP/s
    assert client.post("/hosts/host-a/calibrate/").status_code == 302
    assert "Calibration queued" in client.get("/hosts/host-a/").content.decode()
    assert client.get("/hosts/nowhere/").status_code == 404
