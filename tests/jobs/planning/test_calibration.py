"""Calibration jobs: rights, placement, and the resulting host profile."""

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
    """Return the attempt of a calibration that was placed on its host."""
    make_host()
    job = api(staff).post("/api/v1/hosts/host-a/calibrate").json()
    scheduler.schedule()
    assert Job.objects.get(id=job["id"]).status == Status.STARTING
    return Attempt.objects.get(job_id=job["id"])


def end_calibration(attempt: Attempt, profile: object, outcome: str = "succeeded") -> Job:
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


def test_users_cannot_submit_a_calibration_spec(owner: User, staff: User, api: Api, make_host: MakeHost) -> None:
    """Only staff can submit calibrations, because their result becomes the profile of the host."""
    make_host()
    response = api(owner).post("/api/v1/jobs", CALIBRATION, format="json")
    assert (response.status_code, response.json()["errors"][0]["pointer"]) == (422, "/kind")
    assert not Job.objects.exists()


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"layout": {"dp": 1}}, "layout", "uses all 4 slots"),
        (
            {"resources": {"host": "host-z"}},
            "resources.host",
            "`resources.host` is 'host-z', but no such cpu host exists.",
        ),
    ],
)
def test_calibration_spec_requires_all_slots_of_a_known_host(
    staff: User, api: Api, make_host: MakeHost, change: dict[str, Any], field: str, message: str
) -> None:
    make_host()
    response = api(staff).post("/api/v1/jobs", {**CALIBRATION, **change}, format="json")
    assert response.status_code == 422
    (error,) = response.json()["errors"]
    assert error["field"] == field
    assert message in error["message"]


def test_calibration_allocates_every_slot_of_its_host(running: Attempt) -> None:
    assert running.format_hosts() == "host-a"
    assert running.job.spec["kind"] == "calibrate"
    assert running.members.get().allocations.count() == 4


def test_planner_uses_the_new_profile(running: Attempt, staff: User, api: Api) -> None:
    client = api(staff)
    spec = {"model": {"preset": "gpt-tiny"}}
    assert client.get("/api/v1/hosts/host-a/profile").status_code == 404
    assert client.post("/api/v1/plan", spec, format="json").json()["estimate"]["time"]["basis"] == "data sheet"
    assert end_calibration(running, PROFILE).status == Status.SUCCEEDED
    assert client.get("/api/v1/hosts/host-a/profile").json()["gemm"] == PROFILE["gemm"]
    assert client.get("/api/v1/hosts").json()[0]["calibrated"]
    estimate = client.post("/api/v1/plan", spec, format="json").json()["estimate"]
    assert (estimate["time"]["basis"], estimate["cluster"]["name"]) == ("calibrated", "host-a")
    named_estimate = client.post("/api/v1/plan?cluster=host:host-a", spec, format="json").json()["estimate"]
    assert named_estimate["time"] == estimate["time"]
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
def test_invalid_profile_fails_the_job(running: Attempt, profile: object) -> None:
    job = end_calibration(running, profile)
    assert job.status == Status.FAILED
    assert job.history.get(status=Status.FAILED).reason.startswith("the host sent no valid calibration profile")
    assert Host.objects.get().profile is None


def test_failed_calibration_keeps_the_old_profile(running: Attempt) -> None:
    Host.objects.update(profile=PROFILE, profiled=timezone.now())
    assert end_calibration(running, None, outcome="failed").status == Status.FAILED
    assert Host.objects.get().profile == PROFILE


def test_calibration_waits_for_its_host(staff: User, api: Api, make_host: MakeHost) -> None:
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


def test_rejects_a_second_calibration_of_a_host(staff: User, api: Api, make_host: MakeHost) -> None:
    make_host(name="host-a")
    assert api(staff).post("/api/v1/hosts/host-a/calibrate").status_code == 201
    second = api(staff).post("/api/v1/hosts/host-a/calibrate")
    assert second.status_code == 409
    assert "already queued or running" in second.json()["errors"][0]["message"]


def test_rejects_calibration_of_drained_and_unknown_hosts(staff: User, api: Api, make_host: MakeHost) -> None:
    host = make_host()
    Host.objects.filter(pk=host.pk).update(drained=True)
    response = api(staff).post("/api/v1/hosts/host-a/calibrate")
    assert (response.status_code, response.json()["errors"][0]["field"]) == (409, "host")
    assert api(staff).post("/api/v1/hosts/host-z/calibrate").status_code == 404


@pytest.mark.parametrize(
    ("change", "field"),
    [({"resources": {}}, "resources.host"), ({"layout": {"dp": 2, "tp": 2}}, "layout")],
    ids=["no host", "another axis"],
)
def test_calibration_spec_requires_a_host_and_only_dp(
    staff: User, api: Api, change: dict[str, Any], field: str
) -> None:
    spec = {
        "kind": "calibrate",
        "model": {"preset": "gpt-tiny"},
        "layout": {"dp": 2},
        "resources": {"host": "host-a"},
        **change,
    }
    response = api(staff).post("/api/v1/jobs", spec, format="json")
    assert response.status_code == 422
    assert field in [e["field"] for e in response.json()["errors"]]


def test_host_page_shows_the_profile(staff: User, owner: User, client: Any, make_host: MakeHost) -> None:
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
