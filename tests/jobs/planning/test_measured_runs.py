"""Measurements of ended runs, which correct later plans for their host."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.core.cache import cache
from django.test import Client
from django.utils import timezone
from rest_framework.test import APIClient

from jobs.models import Attempt, DeadLetter, Host, HostRun, Job, Status
from jobs.planning import measured_runs
from jobs.queue import actions
from jobs.queue.inbound.event_handlers import handle_event
from jobs.queue.inbound.streams import read_events
from jobs.queue.scheduling.scheduler import schedule
from jobs.templatetags.meshboard import link_speeds
from planner.cost.timing import get_step_timing
from planner.facts.parse_spec import parse_spec
from planner.hardware.catalog import CLUSTERS
from tests.jobs.conftest import attempt_event, run_together, send_event
from tests.jobs.planning.test_calibration import PROFILE
from tests.planner.wrong_specs import GOOD

Api = Callable[[User | None], APIClient]
MakeHost = Callable[..., Host]
_entries = itertools.count(1)


@pytest.fixture(autouse=True)
def _fresh_throttle() -> None:
    cache.clear()


@pytest.fixture
def host(make_host: MakeHost) -> Host:
    return make_host()


def make_summary(step_s: float, steps: int = 20, **more: Any) -> dict[str, Any]:
    """Return the summary of a run with two tp all-reduces per step, in which rank 1 waits less."""
    cell = {"phase": "step", "op": "all_reduce", "axis": "tp", "group_size": 2, "count": 40, "completed": 40}
    cell |= {"payload_bytes": 40 * 2**20, "algorithmic_bytes": 40 * 2**20}
    cells = {"0": [{**cell, "busy_s": 4.0}], "1": [{**cell, "busy_s": 0.4}]}
    measured = {"steps": steps, "step_s": step_s}
    fields = {
        "steps": 23,
        "tokens_per_s": 1.0,
        "losses": [],
        "eval_losses": [],
        "verdict": {},
        "peak_bytes": {"0": 2**19, "1": 2**20, "2": 2**19, "3": 2**19},
    }
    return {**fields, "cells": cells, "measured": measured, **more}


def start_run(owner: User, **changes: Any) -> Attempt:
    job, _ = actions.submit(owner, {**GOOD, **changes})
    Host.objects.update(last_seen=timezone.now())  # The host would count as silent after a long test.
    schedule()
    return Attempt.objects.get(job=job)


def make_failed_proof() -> dict[str, Any]:
    """Return the proof of a run whose weight replicas differ."""
    difference = {"what": "weight", "name": "w", "axis": "dp", "ranks": [1, 0], "apart": 0.5, "limit": 1e-6}
    replicas = {"steps": [1], "parts": 1, "copied": 1, "apart": 0.5}
    reference = {
        "state": "not checked",
        "why": "verify is off",
        "steps": 0,
        "tensors": 0,
        "limit": 1e-5,
        "seconds": 0.0,
    }
    reference |= dict.fromkeys(("gradient", "update", "loss", "norm"), 0.0)
    return {
        "kind": "proof",
        "rank": 0,
        "time": 1.0,
        "replicas": replicas,
        "one_process": reference,
        "wrong": [difference],
    }


def make_exit_event(attempt: Attempt, run_summary: dict[str, Any] | None, outcome: str = "succeeded") -> dict[str, Any]:
    event = attempt_event(attempt.job_id, attempt.number, "exited", outcome, attempt.format_hosts())
    event["report"]["exit"]["summary"] = run_summary
    return event


def end_run(owner: User, run_summary: dict[str, Any] | None, outcome: str = "succeeded", **changes: Any) -> Attempt:
    attempt = start_run(owner, **changes)
    event: Any = make_exit_event(attempt, run_summary, outcome)
    handle_event(event, f"0-{next(_entries)}")
    return attempt


def get_estimate(client: APIClient, **changes: Any) -> Any:
    return client.post("/api/v1/plan", {**GOOD, **changes}, format="json").json()["estimate"]


def test_three_runs_correct_the_next_plan_with_an_interval(owner: User, host: Host, api: Api) -> None:
    client = api(owner)
    for number in range(2):
        end_run(owner, make_summary(2.0 + 0.1 * number))
    uncorrected = get_estimate(client)
    assert uncorrected["cluster"]["name"] == host.name
    assert (uncorrected["time"]["interval"]["basis"], uncorrected["time"]["interval"]["runs"]) == ("data sheet", 0)
    assert (
        uncorrected["time"]["interval"]["words"] == "an uncalibrated CPU, links from 2 runs here, within a factor of 10"
    )
    end_run(owner, make_summary(2.05))
    corrected = get_estimate(client)
    assert corrected["time"]["step_s"] == pytest.approx(2.05)
    assert corrected["time"]["step_s"] == pytest.approx(sum(part["seconds"] for part in corrected["time"]["parts"]))
    tokens = GOOD["train"]["global_batch"] * GOOD["train"]["seq_len"]
    assert corrected["time"]["tokens_per_s"] == pytest.approx(tokens / 2.05)
    # The mean of 2.0 and 2.05 differs from 2.1 by 3.7%, the largest error, and three runs double it.
    assert corrected["time"]["interval"]["words"] == "from 3 runs here, ±8%"
    assert corrected["time"]["interval"]["share"] == pytest.approx(2.1 * 0.075 / 2.025)
    # The correction applies to other layouts with 4 ranks, but not to other numbers of ranks.
    other = get_estimate(client, layout={"dp": 4})
    assert other["time"]["interval"]["runs"] == 3
    one_rank = get_estimate(client, layout={"dp": 1})
    assert one_rank["time"]["interval"]["basis"] == "data sheet"


def test_stored_run_has_its_host_copies(owner: User, host: Host) -> None:
    end_run(owner, make_summary(2.0), train={**GOOD["train"], "checkpoint_every": 10, "document_end": 3})
    run = HostRun.objects.get().run
    assert run["tells_copies"]
    assert (run["spec"]["train"]["checkpoint_every"], run["spec"]["train"]["document_end"]) == (10, 3)


def test_job_page_shows_link_speeds_of_a_run(owner: User, host: Host, client: Client) -> None:
    end_run(owner, make_summary(2.0))
    job, _ = actions.submit(owner, GOOD)
    speeds = link_speeds(job)
    assert speeds is not None
    assert (speeds["basis"], speeds["link_runs"]) == ("data sheet", 1)
    client.force_login(owner)
    page = client.get(f"/jobs/{job.id}/").content.decode()
    assert "links from 1 run here" in page


def test_planner_page_lists_the_device_of_each_cluster(owner: User, host: Host, client: Client) -> None:
    """Opening a layout as a job keeps the device for which it was planned."""
    end_run(owner, make_summary(2.0))
    client.force_login(owner)
    page = client.get("/planner/").content.decode()
    devices = dict(re.findall(r'<option value="([^"]+)" data-device="([^"]+)"', page))
    listed = {name: cluster.device for name, cluster in CLUSTERS.items()}
    assert devices == {f"host:{host.name}": "cpu", **listed, "own:": "cuda"}


def test_link_speeds_come_from_the_rank_that_waited_least(owner: User, host: Host, api: Api) -> None:
    end_run(owner, make_summary(2.0))
    (cluster,) = [c for c in api(owner).get("/api/v1/clusters").json() if c["id"] == f"host:{host.name}"]
    call_s = cluster["base_s"] + 2 * cluster["node"]["latency_s"] + 2**20 / cluster["node"]["bytes_per_s"]
    assert call_s == pytest.approx(0.01), "one call with 1 MiB takes 10 ms"
    assert cluster["accelerator"]["memory_bytes"] == host.memory_bytes
    assert cluster["per_node"] == host.slots
    assert "runs" not in cluster


@pytest.mark.parametrize(
    ("run_summary", "outcome"),
    [
        (make_summary(2.0), "failed"),
        (make_summary(2.0), "lost"),
        (make_summary(2.0, steps=4), "cancelled"),
        (make_summary(2.0, steps=4), "succeeded"),
        (make_summary(0.0), "succeeded"),
        ({key: value for key, value in make_summary(2.0).items() if key != "measured"}, "succeeded"),
        (None, "succeeded"),
    ],
    ids=["failed", "lost", "cancelled early", "too few steps", "no time", "not measured", "no summary"],
)
def test_ignores_runs_without_a_valid_measurement(owner: User, host: Host, run_summary: Any, outcome: str) -> None:
    attempt = end_run(owner, run_summary, outcome)
    assert Attempt.objects.get(pk=attempt.pk).exit["outcome"] == outcome
    assert HostRun.objects.count() == 0


def test_stores_a_cancelled_run_with_many_steps(owner: User, host: Host) -> None:
    attempt = start_run(owner)
    actions.cancel(Job.objects.get(id=attempt.job_id), "owner")
    event: Any = make_exit_event(attempt, make_summary(2.0), "cancelled")
    handle_event(event, "0-1")
    assert Job.objects.get(id=attempt.job_id).status == Status.CANCELLED
    assert HostRun.objects.count() == 1


def test_repeated_exit_event_stores_one_run(owner: User, host: Host) -> None:
    attempt = end_run(owner, make_summary(2.0))
    event: Any = make_exit_event(attempt, make_summary(2.0))
    handle_event(event, f"0-{next(_entries)}")
    assert HostRun.objects.get().attempt == attempt


def test_ignores_runs_that_shared_their_host(owner: User, host: Host) -> None:
    small: dict[str, Any] = {"layout": {"dp": 2}}
    first, second = start_run(owner, **small), start_run(owner, **small)
    for attempt in (first, second):
        event: Any = make_exit_event(attempt, make_summary(2.0))
        handle_event(event, f"0-{next(_entries)}")
    assert HostRun.objects.count() == 0


def test_stored_run_has_no_private_data(owner: User, host: Host) -> None:
    secret = {**GOOD["train"], "data": "secret/corpus.txt", "seed": 987654, "tokenizer": "secret.json"}
    attempt = end_run(owner, make_summary(2.0), name="secret-project", train=secret)
    stored = json.dumps(HostRun.objects.get().run)
    for word in ("secret", "987654", "owner", attempt.job_id):
        assert word not in stored
    Job.objects.all().delete()
    assert HostRun.objects.get().attempt is None


def test_new_device_of_a_host_ignores_older_runs(owner: User, host: Host, api: Api) -> None:
    for _ in range(3):
        end_run(owner, make_summary(2.0))
    assert get_estimate(api(owner))["time"]["interval"]["basis"] == "runs"
    Host.objects.update(device_name="another CPU")
    assert get_estimate(api(owner))["cluster"]["name"] == CLUSTERS["cpu"].name


def test_stores_only_the_newest_runs(owner: User, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_runs, "MAX_RUNS_PER_HOST", 2)
    for seconds in (1.0, 2.0, 3.0):
        end_run(owner, make_summary(seconds))
    assert [run.step_s for run in measured_runs.load_measured_runs(host)] == [3.0, 2.0]
    assert HostRun.objects.count() == 2


@pytest.fixture
def gpu_host(each_database: str) -> Host:
    return Host.objects.create(
        name="host-a",
        slots=8,
        device="cuda",
        device_name="H100",
        memory_bytes=80 * 2**30,
        boot_id="b",
        last_seen=timezone.now(),
    )


def test_concurrent_exit_events_store_each_run_once(
    gpu_host: Host, live_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two controllers read the same two exit events, as during a takeover."""
    monkeypatch.setattr(measured_runs, "MAX_RUNS_PER_HOST", 5)
    racer = User.objects.create_user("racer")
    for _ in range(6):
        before = set(HostRun.objects.values_list("pk", flat=True))
        attempts = [start_run(racer, resources={"device": "cuda"}) for _ in range(2)]
        for attempt in attempts:
            send_event(live_redis, make_exit_event(attempt, make_summary(2.0)))
        run_together([lambda: read_events(live_redis)] * 2)
        new = HostRun.objects.exclude(pk__in=before)
        assert sorted(new.values_list("attempt_id", flat=True)) == sorted(a.pk for a in attempts)
        assert HostRun.objects.count() <= 5
    assert HostRun.objects.count() == 5
    assert DeadLetter.objects.count() == 0


def test_runs_correct_the_plan_of_a_calibrated_host(owner: User, host: Host, api: Api) -> None:
    Host.objects.update(profile=PROFILE, profiled=timezone.now())
    raw = get_estimate(api(owner))["time"]
    assert raw["interval"]["words"] == "no fp32 calibration, within a factor of 10"
    for _ in range(3):
        end_run(owner, make_summary(3 * raw["step_s"]))
    corrected = get_estimate(api(owner))["time"]
    assert (corrected["basis"], corrected["interval"]["basis"]) == ("calibrated", "runs")
    assert corrected["step_s"] == pytest.approx(3 * raw["step_s"])
    assert get_step_timing(parse_spec(GOOD), CLUSTERS["cpu"]).step_s != pytest.approx(corrected["step_s"])


def test_advice_separates_measured_and_apportioned_parts(owner: User, stranger: User, host: Host, api: Api) -> None:
    attempt = end_run(
        owner, make_summary(0.3)
    )  # Rank 0 spends 4 s in the tp collectives of 23 steps, and rank 1 0.4 s.
    path = f"/api/v1/jobs/{attempt.job_id}/advice"
    advice = api(owner).get(path).json()
    assert (advice["step_s"], advice["steps"], advice["host"]) == (0.3, 20, host.name)
    parts = {part["part"]: part for part in advice["parts"]}
    assert parts["tp"]["measured_at_most_s"] == pytest.approx((4.0 + 0.4) / 2 / 23)
    assert parts["compute"]["measured_at_most_s"] is None
    assert sum(part["apportioned_s"] for part in advice["parts"]) == pytest.approx(0.3)
    assert sum(part["predicted_s"] for part in advice["parts"]) == pytest.approx(advice["predicted_s"])
    assert advice["predicted_s"] == pytest.approx(attempt.job.estimate["time"]["step_s"])
    assert parts["compute"]["measured_s"] is None
    assert api(stranger).get(path).status_code == 404


def test_advice_uses_the_parts_of_the_diagnosis(owner: User, host: Host, api: Api) -> None:
    attempt = end_run(owner, make_summary(0.3))
    measured = [("compute", "compute", 0.1), ("tp", "exposed", 0.02), ("tp", "hidden", 0.5), ("data", "data", 0.03)]
    parts = [{"name": name, "kind": kind, "seconds": seconds, "waiting_s": 0.0} for name, kind, seconds in measured]
    Attempt.objects.filter(pk=attempt.pk).update(diagnosis={"measured": {"step_s": 0.15, "parts": parts}})
    response = api(owner).get(f"/api/v1/jobs/{attempt.job_id}/advice").json()
    seconds_by_part = {part["part"]: (part["measured_s"], part["apportioned_s"]) for part in response["parts"]}
    assert (seconds_by_part["compute"], seconds_by_part["tp"]) == (
        pytest.approx((0.1, 0.2)),
        pytest.approx((0.02, 0.04)),
    )
    assert seconds_by_part["data"] == pytest.approx((0.03, 0.06))


def test_later_runs_do_not_change_advice_of_an_ended_job(owner: User, host: Host, api: Api) -> None:
    path = f"/api/v1/jobs/{end_run(owner, make_summary(0.3)).job_id}/advice"
    before = api(owner).get(path).json()
    for _ in range(3):
        end_run(owner, make_summary(5.0))
    Host.objects.update(profile=PROFILE, profiled=timezone.now())
    assert api(owner).get(path).json() == before


def test_rejects_advice_without_enough_steps(owner: User, host: Host, api: Api) -> None:
    client = api(owner)
    short = end_run(owner, make_summary(0.3, steps=4))
    refused = client.get(f"/api/v1/jobs/{short.job_id}/advice")
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (409, "train.steps")
    message = refused.json()["errors"][0]["message"]
    assert message.startswith("The run has 4 timed steps after the first 3 steps, but 5 timed steps are needed.")
    running = start_run(owner)
    refused = client.get(f"/api/v1/jobs/{running.job_id}/advice")
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (409, "status")
    script, _ = actions.submit(owner, {"kind": "script", "script": {"path": "a.py"}})
    refused = client.get(f"/api/v1/jobs/{script.id}/advice")
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (409, "kind")
