"""Planning is bounded work, in processes of its own."""

from __future__ import annotations

import threading
import time
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


def pipe(pp: int, micro_batches: int) -> dict[str, Any]:
    model = {"preset": "llama3-405b", "num_layers": 1024}
    train = {"global_batch": micro_batches, "micro_batches": micro_batches, "seq_len": 128, "precision": "bf16"}
    return {"model": model, "layout": {"pp": pp}, "train": train, "resources": {"device": "cuda"}}


HEAVY = pipe(256, 256)  # seconds of a processor


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Places of this test's own, whose planners end with it."""
    places: Any = planner_processes.queue.LifoQueue()
    for _ in range(planner_processes.MAX_PROCESSES):
        places.put(None)
    monkeypatch.setattr(planner_processes, "_slots", places)
    yield
    for _ in range(planner_processes.MAX_PROCESSES):
        if planner := places.get():
            planner.end()


def plan(client: APIClient, spec: dict[str, Any]) -> Any:
    return client.post("/api/v1/plan", spec, format="json")


@pytest.mark.parametrize("path", ["plan", "plan/explain", "jobs"])
def test_too_many_parts_are_refused_with_the_arithmetic(owner: User, api: Api, path: str) -> None:
    spec = pipe(1024, 100_000)
    answer = (
        api(owner).post(f"/api/v1/{path}", {"spec": spec} if path == "plan/explain" else spec, format="json").json()
    )
    told = [e for e in answer.get("errors") or answer["problems"] if e["field"] == "train.micro_batches"]
    assert "pp 1024 x micro_batches 100000 x virtual_stages 1 = 102,400,000" in told[0]["message"]


@pytest.mark.parametrize(
    ("limit", "words"), [("MAX_CPU_S", "used more than 0 s of CPU time"), ("MAX_ELAPSED_S", "took more than 0 s")]
)
def test_a_plan_that_takes_too_long_is_ended_and_the_next_one_is_answered(
    owner: User, api: Api, fresh: None, monkeypatch: pytest.MonkeyPatch, limit: str, words: str
) -> None:
    client = api(owner)
    assert plan(client, GOOD).status_code == 200
    with monkeypatch.context() as shorter:
        shorter.setattr(planner_processes, limit, 0.1)
        answer = plan(client, HEAVY)
    assert answer.status_code == 503
    assert int(answer.headers["Retry-After"]) > 0
    assert answer.json()["errors"][0]["message"].startswith(f"The plan was not computed because the planner {words}.")
    assert plan(client, GOOD).json()["problems"] == []


def test_a_planner_that_waits_for_a_processor_is_waited_for(
    owner: User, api: Api, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A niced one, on a machine whose tests kept both processors busy, was ended four times and its page gave up."""
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


def test_when_all_are_busy_one_is_told_when_to_come_back(
    owner: User, api: Api, client: Any, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner_processes, "MAX_QUEUE_S", 0.05)
    taken = [planner_processes._slots.get() for _ in range(planner_processes.MAX_PROCESSES)]
    assert plan(api(owner), GOOD).status_code == 503
    client.force_login(owner)
    page = client.post("/plan/", GOOD, content_type="application/json")
    assert (page.status_code, page.headers["Retry-After"]) == (503, "5")
    for place in taken:
        planner_processes._slots.put(place)
    assert plan(api(owner), GOOD).status_code == 200


def test_a_planner_that_died_is_replaced(owner: User, api: Api, fresh: None) -> None:
    client = api(owner)
    assert plan(client, GOOD).status_code == 200
    planner = planner_processes._slots.get()
    assert planner is not None
    planner._process.kill()
    wait_until(lambda: planner.has_ended, "it is dead")
    planner_processes._slots.put(planner)
    assert plan(client, GOOD).status_code == 200


def test_pages_are_served_while_eight_heavy_plans_run(postgres_site: Site) -> None:
    headers = postgres_site.build_token_header("owner")

    def heavy(_turn: int) -> int:
        return postgres_site.call("POST", "/api/v1/plan", HEAVY, headers=headers, timeout_s=60).status

    with ThreadPoolExecutor(8) as pool:
        plans = [pool.submit(heavy, turn) for turn in range(8)]
        waits = []
        while not all(p.done() for p in plans) and len(waits) < 10:
            began = time.monotonic()
            assert postgres_site.call("GET", "/", headers=postgres_site.build_cookie_header("owner")).status == 200
            waits.append(time.monotonic() - began)
    assert {p.result() for p in plans} <= {200, 503}
    assert waits, "the plans were heavy"
    assert sorted(waits)[len(waits) // 2] < 1.0, waits
