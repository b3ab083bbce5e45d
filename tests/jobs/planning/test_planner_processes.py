"""Planner processes, which limit the time and number of concurrent plans."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from django.contrib.auth.models import User
from rest_framework.test import APIClient

from jobs.planning import planner_processes
from tests.planner.wrong_specs import GOOD
from tests.support.processes import wait_until
from tests.support.web import Site

Api = Callable[[User | None], APIClient]


def make_pipeline_spec(pp: int, micro_batches: int) -> dict[str, Any]:
    model = {"preset": "llama3-405b", "num_layers": 1024}
    train = {"global_batch": micro_batches, "micro_batches": micro_batches, "seq_len": 128, "precision": "bf16"}
    return {"model": model, "layout": {"pp": pp}, "train": train, "resources": {"device": "cuda"}}


HEAVY = make_pipeline_spec(256, 256)  # Takes seconds of CPU time.


@pytest.fixture
def own_planners(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the test its own process slots, and end their planners afterwards."""
    slots: Any = planner_processes.queue.LifoQueue()
    for _ in range(planner_processes.MAX_PROCESSES):
        slots.put(None)
    monkeypatch.setattr(planner_processes, "_slots", slots)
    yield
    for _ in range(planner_processes.MAX_PROCESSES):
        if planner := slots.get():
            planner.end()


def plan(client: APIClient, spec: dict[str, Any]) -> Any:
    return client.post("/api/v1/plan", spec, format="json")


@pytest.mark.parametrize("path", ["plan", "plan/explain", "jobs"])
def test_rejects_a_pipeline_with_too_many_cells(owner: User, api: Api, path: str) -> None:
    spec = make_pipeline_spec(1024, 100_000)
    response = (
        api(owner).post(f"/api/v1/{path}", {"spec": spec} if path == "plan/explain" else spec, format="json").json()
    )
    errors = [e for e in response.get("errors") or response["problems"] if e["field"] == "train.micro_batches"]
    assert "pp 1024 x micro_batches 100000 x virtual_stages 1 = 102,400,000" in errors[0]["message"]


@pytest.mark.parametrize(
    ("limit", "message"), [("MAX_CPU_S", "used more than 0 s of CPU time"), ("MAX_ELAPSED_S", "took more than 0 s")]
)
def test_ends_a_plan_that_takes_too_long(
    owner: User, api: Api, own_planners: None, monkeypatch: pytest.MonkeyPatch, limit: str, message: str
) -> None:
    client = api(owner)
    assert plan(client, GOOD).status_code == 200
    with monkeypatch.context() as shorter:
        shorter.setattr(planner_processes, limit, 0.1)
        response = plan(client, HEAVY)
    assert response.status_code == 503
    assert int(response.headers["Retry-After"]) > 0
    assert response.json()["errors"][0]["message"].startswith(
        f"The plan was not computed because the planner {message}."
    )
    assert plan(client, GOOD).json()["problems"] == []


def test_waiting_for_a_cpu_does_not_end_a_planner(
    owner: User, api: Api, own_planners: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time in which a planner waits for a CPU does not count against its limit."""
    client = api(owner)
    assert plan(client, GOOD).status_code == 200
    planner = planner_processes._slots.get()
    assert planner is not None
    planner_processes._slots.put(planner)
    process = psutil.Process(planner._process.pid)
    process.suspend()
    monkeypatch.setattr(planner_processes, "MAX_CPU_S", 0.5)
    threading.Timer(1.0, process.resume).start()
    assert "KeyError" in planner.run({"task": "unknown"})["failed"]


def test_busy_planners_return_retry_after(
    owner: User, api: Api, client: Any, own_planners: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner_processes, "MAX_QUEUE_S", 0.05)
    slots = [planner_processes._slots.get() for _ in range(planner_processes.MAX_PROCESSES)]
    assert plan(api(owner), GOOD).status_code == 503
    client.force_login(owner)
    page = client.post("/plan/", GOOD, content_type="application/json")
    assert (page.status_code, page.headers["Retry-After"]) == (503, "5")
    for slot in slots:
        planner_processes._slots.put(slot)
    assert plan(api(owner), GOOD).status_code == 200


def test_replaces_a_dead_planner(owner: User, api: Api, own_planners: None) -> None:
    client = api(owner)
    assert plan(client, GOOD).status_code == 200
    planner = planner_processes._slots.get()
    assert planner is not None
    planner._process.kill()
    wait_until(lambda: planner.has_ended, "the planner has ended")
    planner_processes._slots.put(planner)
    assert plan(client, GOOD).status_code == 200


def test_pages_do_not_queue_behind_heavy_plans(postgres_site: Site) -> None:
    """Send more plans than there are planner processes. In a common queue, each page would wait for a plan."""
    headers, cookies = postgres_site.build_token_header("owner"), postgres_site.build_cookie_header("owner")

    def run_heavy_plan(_turn: int) -> int:
        return postgres_site.call("POST", "/api/v1/plan", HEAVY, headers=headers, timeout_s=60).status

    num_pages = 0
    with ThreadPoolExecutor(8) as pool:
        plans = [pool.submit(run_heavy_plan, turn) for turn in range(8)]
        while num_pages <= len(plans) and not all(plan.done() for plan in plans):
            assert postgres_site.call("GET", "/", headers=cookies).status == 200
            num_pages += 1
    assert {plan.result() for plan in plans} <= {200, 503}
    assert num_pages > len(plans)
