"""What runs leave with their host, and what the next plan there makes of it."""

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
from tests.jobs.conftest import attempt_event, run_together, say
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


def summary(step_s: float, steps: int = 20, **more: Any) -> dict[str, Any]:
    """Of a run whose ranks summed over tp in two calls a step, of which rank 1 waited less."""
    cell = {"phase": "step", "op": "all_reduce", "axis": "tp", "group_size": 2, "count": 40, "completed": 40}
    cell |= {"payload_bytes": 40 * 2**20, "algorithmic_bytes": 40 * 2**20}
    cells = {"0": [{**cell, "busy_s": 4.0}], "1": [{**cell, "busy_s": 0.4}]}
    measured = {"steps": steps, "step_s": step_s}
    told = {
        "steps": 23,
        "tokens_per_s": 1.0,
        "losses": [],
        "eval_losses": [],
        "verdict": {},
        "peak_bytes": {"0": 2**19, "1": 2**20, "2": 2**19, "3": 2**19},
    }
    return {**told, "cells": cells, "measured": measured, **more}


def placed(owner: User, **changes: Any) -> Attempt:
    job, _ = actions.submit(owner, {**GOOD, **changes})
    Host.objects.update(last_seen=timezone.now())  # a host that was heard as a long test began has no room by now
    schedule()
    return Attempt.objects.get(job=job)


def disproved() -> dict[str, Any]:
    """The proof of a run whose copies of a weight have come apart."""
    apart = {"what": "weight", "name": "w", "axis": "dp", "ranks": [1, 0], "apart": 0.5, "limit": 1e-6}
    same = {"steps": [1], "parts": 1, "copied": 1, "apart": 0.5}
    one = {"state": "not checked", "why": "verify is off", "steps": 0, "tensors": 0, "limit": 1e-5, "seconds": 0.0}
    one |= dict.fromkeys(("gradient", "update", "loss", "norm"), 0.0)
    return {"kind": "proof", "rank": 0, "time": 1.0, "replicas": same, "one_process": one, "wrong": [apart]}


def exit_event(attempt: Attempt, told: dict[str, Any] | None, outcome: str = "succeeded") -> dict[str, Any]:
    event = attempt_event(attempt.job_id, attempt.number, "exited", outcome, attempt.format_hosts())
    event["report"]["exit"]["summary"] = told
    return event


def ended(owner: User, told: dict[str, Any] | None, outcome: str = "succeeded", **changes: Any) -> Attempt:
    attempt = placed(owner, **changes)
    event: Any = exit_event(attempt, told, outcome)
    handle_event(event, f"0-{next(_entries)}")
    return attempt


def planned(client: APIClient, **changes: Any) -> Any:
    return client.post("/api/v1/plan", {**GOOD, **changes}, format="json").json()["estimate"]


def test_three_runs_correct_the_next_plan_on_their_host_and_say_how_surely(owner: User, host: Host, api: Api) -> None:
    client = api(owner)
    for number in range(2):
        ended(owner, summary(2.0 + 0.1 * number))
    few = planned(client)
    assert few["cluster"]["name"] == host.name
    assert (few["time"]["interval"]["basis"], few["time"]["interval"]["runs"]) == ("data sheet", 0)
    assert few["time"]["interval"]["words"] == "an uncalibrated CPU, links from 2 runs here, within a factor of 10"
    ended(owner, summary(2.05))
    made = planned(client)
    assert made["time"]["step_s"] == pytest.approx(2.05)
    assert made["time"]["step_s"] == pytest.approx(sum(part["seconds"] for part in made["time"]["parts"]))
    tokens = GOOD["train"]["global_batch"] * GOOD["train"]["seq_len"]
    assert made["time"]["tokens_per_s"] == pytest.approx(tokens / 2.05)
    # 2.1 told by 2.0 and 2.05 would be 2.025, of which it is 3.7% off: the worst of the three, and three are few
    assert made["time"]["interval"]["words"] == "from 3 runs here, ±8%"
    assert made["time"]["interval"]["share"] == pytest.approx(2.1 * 0.075 / 2.025)
    # Of other layouts on as many ranks the ratio holds, with other numbers of ranks none was seen.
    other = planned(client, layout={"dp": 4})
    assert other["time"]["interval"]["runs"] == 3
    alone = planned(client, layout={"dp": 1})
    assert alone["time"]["interval"]["basis"] == "data sheet"


def test_a_run_is_kept_with_what_copies_it_made(owner: User, host: Host) -> None:
    ended(owner, summary(2.0), train={**GOOD["train"], "checkpoint_every": 10, "document_end": 3})
    run = HostRun.objects.get().run
    assert run["tells_copies"]
    assert (run["spec"]["train"]["checkpoint_every"], run["spec"]["train"]["document_end"]) == (10, 3)


def test_a_job_s_page_tells_of_links_from_a_run(owner: User, host: Host, client: Client) -> None:
    ended(owner, summary(2.0))
    job, _ = actions.submit(owner, GOOD)
    told = link_speeds(job)
    assert told is not None
    assert (told["basis"], told["link_runs"]) == ("data sheet", 1)
    client.force_login(owner)
    page = client.get(f"/jobs/{job.id}/").content.decode()
    assert "links from 1 run here" in page


def test_the_planner_asks_for_the_device_of_its_hardware(owner: User, host: Host, client: Client) -> None:
    """A layout planned for a CPU host was opened as a job that asks for GPUs."""
    ended(owner, summary(2.0))
    client.force_login(owner)
    page = client.get("/planner/").content.decode()
    devices = dict(re.findall(r'<option value="([^"]+)" data-device="([^"]+)"', page))
    assert devices == {f"host:{host.name}": "cpu", **{name: cluster.device for name, cluster in CLUSTERS.items()}}


def test_links_are_those_of_the_rank_that_waited_least(owner: User, host: Host, api: Api) -> None:
    ended(owner, summary(2.0))
    (named,) = [c for c in api(owner).get("/api/v1/clusters").json() if c["id"] == f"host:{host.name}"]
    told = named["base_s"] + 2 * named["node"]["latency_s"] + 2**20 / named["node"]["bytes_per_s"]
    assert told == pytest.approx(0.01), "half of twice 1 MiB in 10 ms a call"
    assert named["accelerator"]["memory_bytes"] == host.memory_bytes
    assert named["per_node"] == host.slots
    assert "runs" not in named


@pytest.mark.parametrize(
    ("told", "outcome"),
    [
        (summary(2.0), "failed"),
        (summary(2.0), "lost"),
        (summary(2.0, steps=4), "cancelled"),
        (summary(2.0, steps=4), "succeeded"),
        (summary(0.0), "succeeded"),
        ({key: value for key, value in summary(2.0).items() if key != "measured"}, "succeeded"),
        (None, "succeeded"),
    ],
    ids=["failed", "lost", "cancelled early", "too few steps", "no time", "not measured", "no summary"],
)
def test_what_says_nothing_is_not_kept(owner: User, host: Host, told: Any, outcome: str) -> None:
    attempt = ended(owner, told, outcome)
    assert Attempt.objects.get(pk=attempt.pk).exit["outcome"] == outcome
    assert HostRun.objects.count() == 0


def test_a_run_cancelled_after_many_steps_is_kept(owner: User, host: Host) -> None:
    attempt = placed(owner)
    actions.cancel(Job.objects.get(id=attempt.job_id), "owner")
    event: Any = exit_event(attempt, summary(2.0), "cancelled")
    handle_event(event, "0-1")
    assert Job.objects.get(id=attempt.job_id).status == Status.CANCELLED
    assert HostRun.objects.count() == 1


def test_an_end_told_twice_is_kept_once(owner: User, host: Host) -> None:
    attempt = ended(owner, summary(2.0))
    event: Any = exit_event(attempt, summary(2.0))
    handle_event(event, f"0-{next(_entries)}")
    assert HostRun.objects.get().attempt == attempt


def test_ranks_that_shared_the_cores_with_another_run_are_no_measure(owner: User, host: Host) -> None:
    small: dict[str, Any] = {"layout": {"dp": 2}}
    first, second = placed(owner, **small), placed(owner, **small)
    for attempt in (first, second):
        event: Any = exit_event(attempt, summary(2.0))
        handle_event(event, f"0-{next(_entries)}")
    assert HostRun.objects.count() == 0


def test_nothing_kept_names_the_job_its_owner_or_its_data(owner: User, host: Host) -> None:
    secret = {**GOOD["train"], "data": "secret/corpus.txt", "seed": 987654, "tokenizer": "secret.json"}
    attempt = ended(owner, summary(2.0), name="secret-project", train=secret)
    kept = json.dumps(HostRun.objects.get().run)
    for word in ("secret", "987654", "owner", attempt.job_id):
        assert word not in kept
    Job.objects.all().delete()
    assert HostRun.objects.get().attempt is None


def test_another_device_in_the_host_makes_what_ran_on_the_old_one_old_news(owner: User, host: Host, api: Api) -> None:
    for _ in range(3):
        ended(owner, summary(2.0))
    assert planned(api(owner))["time"]["interval"]["basis"] == "runs"
    Host.objects.update(device_name="another CPU")
    assert planned(api(owner))["cluster"]["name"] == CLUSTERS["cpu"].name


def test_the_newest_are_kept_and_no_more(owner: User, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_runs, "MAX_RUNS_PER_HOST", 2)
    for seconds in (1.0, 2.0, 3.0):
        ended(owner, summary(seconds))
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


def test_runs_that_end_at_once_are_each_kept_once(
    gpu_host: Host, live_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two controllers hear two ends, both of each: for a moment there may be two."""
    monkeypatch.setattr(measured_runs, "MAX_RUNS_PER_HOST", 5)
    racer = User.objects.create_user("racer")
    for _ in range(6):
        before = set(HostRun.objects.values_list("pk", flat=True))
        attempts = [placed(racer, resources={"device": "cuda"}) for _ in range(2)]
        for attempt in attempts:
            say(live_redis, exit_event(attempt, summary(2.0)))
        run_together([lambda: read_events(live_redis)] * 2)
        new = HostRun.objects.exclude(pk__in=before)
        assert sorted(new.values_list("attempt_id", flat=True)) == sorted(a.pk for a in attempts)
        assert HostRun.objects.count() <= 5
    assert HostRun.objects.count() == 5
    assert DeadLetter.objects.count() == 0


def test_a_plan_for_a_calibrated_host_is_corrected_on_top_of_it(owner: User, host: Host, api: Api) -> None:
    Host.objects.update(profile=PROFILE, profiled=timezone.now())
    raw = planned(api(owner))["time"]
    assert raw["interval"]["words"] == "no fp32 calibration, within a factor of 10"
    for _ in range(3):
        ended(owner, summary(3 * raw["step_s"]))
    made = planned(api(owner))["time"]
    assert (made["basis"], made["interval"]["basis"]) == ("calibrated", "runs")
    assert made["step_s"] == pytest.approx(3 * raw["step_s"])
    assert get_step_timing(parse_spec(GOOD), CLUSTERS["cpu"]).step_s != pytest.approx(made["step_s"])


def test_advice_calls_measured_only_what_the_meter_measured_and_no_part_exceeds_it(
    owner: User, stranger: User, host: Host, api: Api
) -> None:
    attempt = ended(owner, summary(0.3))  # of which rank 0 was 4 s / 23 steps in tp collectives, rank 1 0.4 s / 23
    path = f"/api/v1/jobs/{attempt.job_id}/advice"
    told = api(owner).get(path).json()
    assert (told["step_s"], told["steps"], told["host"]) == (0.3, 20, host.name)
    parts = {part["part"]: part for part in told["parts"]}
    assert parts["tp"]["measured_at_most_s"] == pytest.approx((4.0 + 0.4) / 2 / 23)
    assert parts["compute"]["measured_at_most_s"] is None
    assert sum(part["apportioned_s"] for part in told["parts"]) == pytest.approx(0.3)
    assert sum(part["predicted_s"] for part in told["parts"]) == pytest.approx(told["predicted_s"])
    assert told["predicted_s"] == pytest.approx(attempt.job.estimate["time"]["step_s"])
    assert parts["compute"]["measured_s"] is None
    assert api(stranger).get(path).status_code == 404


def test_advice_divides_the_step_as_the_diagnosis_told_it_apart(owner: User, host: Host, api: Api) -> None:
    attempt = ended(owner, summary(0.3))
    told = [("compute", "compute", 0.1), ("tp", "exposed", 0.02), ("tp", "hidden", 0.5), ("data", "data", 0.03)]
    parts = [{"name": name, "kind": kind, "seconds": seconds, "waiting_s": 0.0} for name, kind, seconds in told]
    Attempt.objects.filter(pk=attempt.pk).update(diagnosis={"measured": {"step_s": 0.15, "parts": parts}})
    answer = api(owner).get(f"/api/v1/jobs/{attempt.job_id}/advice").json()
    found = {part["part"]: (part["measured_s"], part["apportioned_s"]) for part in answer["parts"]}
    assert (found["compute"], found["tp"]) == (pytest.approx((0.1, 0.2)), pytest.approx((0.02, 0.04)))
    assert found["data"] == pytest.approx((0.03, 0.06))


def test_advice_of_an_ended_job_does_not_move_with_what_runs_or_is_measured_later(
    owner: User, host: Host, api: Api
) -> None:
    path = f"/api/v1/jobs/{ended(owner, summary(0.3)).job_id}/advice"
    before = api(owner).get(path).json()
    for _ in range(3):
        ended(owner, summary(5.0))
    Host.objects.update(profile=PROFILE, profiled=timezone.now())
    assert api(owner).get(path).json() == before


def test_advice_is_refused_where_a_job_says_too_little(owner: User, host: Host, api: Api) -> None:
    client = api(owner)
    short = ended(owner, summary(0.3, steps=4))
    refused = client.get(f"/api/v1/jobs/{short.job_id}/advice")
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (409, "train.steps")
    message = refused.json()["errors"][0]["message"]
    assert message.startswith("The run has 4 timed steps after the first 3 steps, but 5 timed steps are needed.")
    running = placed(owner)
    refused = client.get(f"/api/v1/jobs/{running.job_id}/advice")
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (409, "status")
    script, _ = actions.submit(owner, {"kind": "script", "script": {"path": "a.py"}})
    refused = client.get(f"/api/v1/jobs/{script.id}/advice")
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (409, "kind")
