"""Benchmarks of collectives: submit, check the result, and show captured tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.cache import cache
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from rest_framework.test import APIClient

from jobs.models import Attempt, Host, Job, Status
from jobs.queue.inbound.event_handlers import handle_event
from jobs.queue.scheduling import scheduler
from jobs.runs.collectives import picture
from jobs.runs.collectives.descriptions import PRIMITIVES
from planner.facts.collectives import LabResult
from planner.facts.spec import LAB_PRIMITIVES
from tests.jobs.conftest import attempt_event

Api = Callable[[User | None], APIClient]
MakeHost = Callable[..., Host]

SPEC: dict[str, Any] = {
    "kind": "lab",
    "name": "lab",
    "layout": {"dp": 4},
    "lab": {"ranks": [1, 3], "primitives": ["all_reduce", "broadcast", "barrier"]},
}
OWN = [[200.0, 201.0], [400.0, 401.0]]


def step(primitive: str, before: list[Any], after: list[Any]) -> dict[str, Any]:
    held = zip((1, 3), before, after, strict=True)
    return {"primitive": primitive, "holdings": [{"rank": r, "before": b, "after": a} for r, b, a in held]}


POINT = {
    "primitive": "all_reduce",
    "num_bytes": 1024,
    "seconds": 0.001,
    "algbw": 1024000.0,
    "busbw": 1024000.0,
    "checked": 512,
    "wrong": 0,
    "payload_bytes": 1024,
    "algorithmic_bytes": 1024,
}
RESULT: dict[str, Any] = {
    "version": 1,
    "device": "cpu",
    "device_name": "a CPU",
    "backend": "gloo",
    "torch_version": "2.13.0",
    "world_size": 4,
    "ranks": [1, 3],
    "root": 1,
    "dtype": "float32",
    "reduce_op": "sum",
    "iterations": 20,
    "points": [POINT],
    "steps": [
        step("all_reduce", OWN, [[600.0, 602.0]] * 2),
        step("broadcast", OWN, [OWN[0]] * 2),
        step("barrier", [[0.0], [12.5]], [[40.0], [42.0]]),
    ],
}


@pytest.fixture(autouse=True)
def _fresh_throttle() -> None:
    cache.clear()


def start_attempt(user: User, api: Api) -> Attempt:
    job = api(user).post("/api/v1/jobs", SPEC, format="json").json()
    scheduler.schedule()
    return Attempt.objects.get(job_id=job["id"])


@pytest.fixture
def running(owner: User, api: Api, make_host: MakeHost) -> Attempt:
    make_host()
    return start_attempt(owner, api)


def end_job(attempt: Attempt, result: object, outcome: str = "succeeded") -> Job:
    summary: dict[str, Any] = {"steps": 0, "tokens_per_s": None, "losses": [], "eval_losses": []}
    summary |= {"cells": {}, "verdict": {}}
    if result is not None:
        summary["lab"] = result
    event: Any = attempt_event(attempt.job_id, 1, "exited", outcome, attempt.format_hosts())
    event["report"]["exit"] |= {"summary": summary}
    handle_event(event, "0-1")
    return Job.objects.get(id=attempt.job_id)


def test_rest_accepts_a_benchmark_without_a_model(running: Attempt, owner: User, api: Api) -> None:
    assert running.members.get().allocations.count() == 4
    assert running.job.spec["lab"]["ranks"] == [1, 3]
    assert end_job(running, RESULT).status == Status.SUCCEEDED
    told = api(owner).get(f"/api/v1/jobs/{running.job_id}").json()
    assert told["exit"]["summary"]["lab"] == RESULT


def test_rest_rejects_invalid_benchmark_by_field(owner: User, api: Api) -> None:
    wrong = {**SPEC, "lab": {"ranks": [1, 9], "root": 2}}
    answer = api(owner).post("/api/v1/jobs", wrong, format="json")
    assert answer.status_code == 422
    assert [e["field"] for e in answer.json()["errors"]] == ["lab.ranks", "lab.root"]


@pytest.mark.parametrize(
    "result",
    [
        None,
        [],
        {},
        {**RESULT, "points": []},
        {**RESULT, "version": 2},
        {**RESULT, "points": [{**POINT, "seconds": float("nan")}]},
        {**RESULT, "points": [POINT] * 400},
        {**RESULT, "steps": [step("broadcast", [[1.0] * 65] * 2, OWN)]},
        {**RESULT, "device_name": b"bytes"},
    ],
    ids=["none", "list", "empty", "no point", "version", "nan", "many", "wide", "bytes"],
)
def test_invalid_result_fails_the_job(running: Attempt, result: object) -> None:
    job = end_job(running, result)
    assert job.status == Status.FAILED
    assert job.history.get(status=Status.FAILED).reason == "the host sent no valid benchmark result"
    assert "lab" not in Attempt.objects.get(pk=running.pk).exit["summary"]


def test_wrong_element_fails_the_job(
    running: Attempt,
) -> None:
    job = end_job(running, {**RESULT, "points": [{**POINT, "wrong": 3}]})
    assert job.status == Status.FAILED
    assert job.history.get(status=Status.FAILED).reason == "3 elements are wrong"
    assert Attempt.objects.get(pk=running.pk).exit["summary"]["lab"]["points"][0]["wrong"] == 3


def test_page_queries_hosts_once(owner: User, client: Any, make_host: Any) -> None:
    make_host("b")
    make_host("a")
    Host.objects.create(
        name="gpu", slots=2, device="cuda", device_name="g", memory_bytes=1, boot_id="g", last_seen=timezone.now()
    )
    make_host("drained")
    Host.objects.filter(name="drained").update(drained=True)
    client.force_login(owner)
    for path in ("/collectives/", "/collectives/all-reduce/"):
        with CaptureQueriesContext(connection) as asked:
            page = client.get(path)
        assert len([one for one in asked if 'FROM "jobs_host"' in one["sql"]]) == 1, path
    assert page.context["host"].name == "gpu"
    assert [host.name for host in client.get("/collectives/").context["hosts"]] == ["gpu", "a", "b"]


def test_page_of_each_collective_shows_an_example(owner: User, client: Any) -> None:
    assert client.get("/collectives/").status_code == client.get("/collectives/barrier/").status_code == 302
    client.force_login(owner)
    index = client.get("/collectives/").content.decode()
    assert tuple(words.name for words in PRIMITIVES) == LAB_PRIMITIVES
    for words in PRIMITIVES:
        assert f'href="/collectives/{words.slug}/"' in index
        page = client.get(f"/collectives/{words.slug}/").content.decode()
        assert "No run has captured this collective yet." in page
        assert '<svg class="boxes"' in page
        assert "A benchmark needs a host with two or more slots" in page
        assert ('"agrees": true' in page) == (words.name != "barrier")
    assert index.count('<svg class="mini"') == len(PRIMITIVES)
    assert client.get("/collectives/shout/").status_code == client.get("/collectives/all_reduce/").status_code == 404


def test_old_addresses_redirect(owner: User, client: Any) -> None:
    client.force_login(owner)
    for old, new in (("/lab/?from=a", "/collectives/?from=a"), ("/lab/all-reduce/", "/collectives/all-reduce/")):
        answer = client.get(old)
        assert (answer.status_code, answer["Location"]) == (301, new)


def test_page_draws_the_newest_captured_tensors(running: Attempt, owner: User, client: Any) -> None:
    client.force_login(owner)
    assert "lab is starting" in client.get("/collectives/broadcast/").content.decode()
    end_job(running, RESULT)
    page = client.get("/collectives/all-reduce/").content.decode()
    assert f"/jobs/{running.job_id}/" in page
    assert "<td>400, 401</td><td>600, 602</td>" in page
    assert page.count('<g class="from-combined">') == 4
    assert "1,572,864" in page  # 2 x 3/4 of 1 MiB
    broadcast = client.get("/collectives/broadcast/").content.decode()
    assert broadcast.count('<g class="from-0">') == 6
    assert broadcast.count('<g class="from-1">') == 2
    barrier = client.get("/collectives/barrier/").content.decode()
    assert "12.5 µs" in barrier
    assert "No run has captured this collective yet." in client.get("/collectives/gather/").content.decode()


def test_run_is_hidden_from_other_users(running: Attempt, stranger: User, staff: User, client: Any) -> None:
    end_job(running, RESULT)
    client.force_login(stranger)
    assert "No run has captured this collective yet." in client.get("/collectives/broadcast/").content.decode()
    assert running.job_id not in client.get("/collectives/").content.decode()
    client.force_login(staff)
    assert "Captured by" in client.get("/collectives/broadcast/").content.decode()


def test_failed_run_is_not_drawn(running: Attempt, owner: User, client: Any) -> None:
    end_job(running, RESULT, outcome="failed")
    client.force_login(owner)
    assert "No run has captured this collective yet." in client.get("/collectives/broadcast/").content.decode()


def end_another_benchmark(
    owner: User, api: Api, result: dict[str, Any], outcome: str = "succeeded", **lab: Any
) -> Attempt:
    """Return another ended benchmark of the collectives in `result`."""
    names = sorted({one["primitive"] for one in (*result["points"], *result["steps"])})
    job = api(owner).post("/api/v1/jobs", {**SPEC, "lab": {"primitives": names, **lab}}, format="json").json()
    scheduler.schedule()
    attempt = Attempt.objects.get(job_id=job["id"])
    end_job(attempt, result, outcome)
    return attempt


def get_page_context(client: Any, name: str) -> dict[str, Any]:
    answer: dict[str, Any] = client.get(f"/api/v1/lab/primitives/{name}").json()
    return answer


def test_benchmark_of_another_collective_hides_nothing(running: Attempt, owner: User, api: Api, client: Any) -> None:
    end_job(running, RESULT)
    other = {**RESULT, "points": [{**POINT, "primitive": "reduce"}], "steps": [step("reduce", OWN, OWN)]}
    for _ in range(21):
        end_another_benchmark(owner, api, other)
    client.force_login(owner)
    assert get_page_context(client, "all_reduce")["job"] == running.job_id
    assert "Captured by" in client.get("/collectives/all-reduce/").content.decode()


def test_benchmark_of_all_collectives_counts_for_each(running: Attempt, owner: User, client: Any) -> None:
    Job.objects.filter(pk=running.job_id).update(spec={**running.job.spec, "lab": None})
    end_job(running, RESULT)
    client.force_login(owner)
    assert get_page_context(client, "all_reduce")["job"] == running.job_id


def test_large_group_is_measured_but_not_drawn(running: Attempt, owner: User, api: Api, client: Any) -> None:
    """The figures come from the newest run, and the picture from the newest run with tensors."""
    client.force_login(owner)
    end_job(running, None)
    large = end_another_benchmark(owner, api, {**RESULT, "steps": [], "ranks": [0, 1, 2, 3]})
    assert (get_page_context(client, "all_reduce")["job"], len(get_page_context(client, "all_reduce")["points"])) == (
        large.job_id,
        1,
    )
    page = client.get("/collectives/all-reduce/").content.decode()
    assert ("No run has captured this collective yet." in page, "Benchmark results" in page) == (True, True)
    assert "groups with up to 16 ranks" in page
    drawn = end_another_benchmark(owner, api, RESULT)
    newer = end_another_benchmark(owner, api, {**RESULT, "steps": [], "ranks": [0, 1, 2, 3]})
    assert get_page_context(client, "all_reduce")["job"] == newer.job_id
    shown, measured = client.get("/collectives/all-reduce/").content.decode().split("Benchmark results")
    assert drawn.job_id in shown
    assert newer.job_id in measured


def test_reports_a_newer_run_with_wrong_elements(running: Attempt, owner: User, api: Api, client: Any) -> None:
    client.force_login(owner)
    end_job(running, RESULT)
    assert get_page_context(client, "all_reduce")["failed"] is None
    wrong = end_another_benchmark(owner, api, {**RESULT, "points": [{**POINT, "wrong": 3}]}, "failed")
    told = get_page_context(client, "all_reduce")
    assert (told["job"], told["failed"]) == (running.job_id, {"job": wrong.job_id, "wrong": 3, "checked": 512})
    page = client.get("/collectives/all-reduce/").content.decode()
    assert "3 of 512 elements" in page
    assert f"/jobs/{wrong.job_id}/" in page
    assert "Wrong results" not in client.get("/collectives/broadcast/").content.decode(), "its own elements were right"
    mended = end_another_benchmark(owner, api, RESULT)
    assert (get_page_context(client, "all_reduce")["job"], get_page_context(client, "all_reduce")["failed"]) == (
        mended.job_id,
        None,
    )


FORM = {
    "resources.host": "host-a",
    "layout.dp": "4",
    "lab.ranks": "3, 1",
    "lab.root": "1",
    "lab.primitives": ["broadcast", "barrier"],
    "lab.min_bytes": "64",
    "lab.max_bytes": "256",
    "lab.factor": "2",
    "lab.iterations": "3",
    "lab.warmup": "1",
    "lab.dtype": "int32",
    "lab.reduce_op": "max",
}


def test_form_submits_its_values(owner: User, client: Any, make_host: MakeHost) -> None:
    make_host()
    client.force_login(owner)
    answer = client.post("/collectives/", FORM)
    job = Job.objects.get()
    assert answer["Location"] == f"/jobs/{job.id}/"
    assert job.spec["lab"] == {
        "primitives": ["broadcast", "barrier"],
        "min_bytes": 64,
        "max_bytes": 256,
        "factor": 2,
        "iterations": 3,
        "warmup": 1,
        "dtype": "int32",
        "ranks": [3, 1],
        "root": 1,
        "reduce_op": "max",
    }
    told = {name: job.spec["resources"][name] for name in ("device", "stack", "host")}
    assert (job.name, told) == ("collectives on host-a", {"device": "cpu", "stack": "ours", "host": "host-a"})
    page = client.get(answer["Location"]).content.decode()
    assert "Benchmark results" in page
    again = client.get(f"/collectives/?from={job.id}")
    assert again.context["values"]["lab.ranks"] == "3, 1"
    assert again.context["values"]["lab.primitives"] == ["broadcast", "barrier"]


def test_button_of_an_empty_page_runs_all_collectives(owner: User, client: Any, make_host: MakeHost) -> None:
    make_host(slots=2)
    client.force_login(owner)
    page = client.get("/collectives/gather/").content.decode()
    assert "Run benchmark on host-a" in page
    assert '<input type="hidden" name="layout.dp" value="2">' in page
    assert client.post("/collectives/", {"resources.host": "host-a", "layout.dp": "2"}).status_code == 302
    assert Job.objects.get().spec["lab"]["primitives"] == list(LAB_PRIMITIVES)


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"lab.ranks": "1, x"}, "lab.ranks", "whole number"),
        ({"lab.ranks": "1"}, "lab.ranks", "a group of 1 rank"),
        ({"lab.min_bytes": "much"}, "lab.min_bytes", "whole number"),
        ({"lab.primitives": []}, "lab.primitives", "1 or more"),
        ({"layout.dp": "5"}, "layout.dp", "the largest CPU host has 4 slots"),
        ({"layout.dp": ""}, "layout.dp", "whole number"),
        ({"lab.dtype": "fp4"}, "lab.dtype", "float32"),
        ({"resources.host": "nowhere"}, "resources.host", "connected host"),
        ({"resources.host": "a\x00b"}, "resources.host", "connected host"),
    ],
    ids=str,
)
def test_form_shows_errors_at_their_fields(
    owner: User, client: Any, make_host: MakeHost, change: dict[str, Any], field: str, words: str
) -> None:
    make_host()
    client.force_login(owner)
    answer = client.post("/collectives/", {**FORM, **change})
    assert answer.status_code == 422
    assert words in answer.context["errors"][field]
    assert answer.context["values"]["lab.iterations"] == "3"
    assert Job.objects.count() == 0


def test_benchmark_has_no_steps_in_the_list(running: Attempt, owner: User, client: Any) -> None:
    client.force_login(owner)
    assert "of 50" not in client.get("/").content.decode()


def test_unchanged_element_of_a_sum_keeps_its_color() -> None:
    reduce = step("reduce", OWN, [[600.0, 602.0], [600.0, 401.0]])
    result = LabResult.model_validate_json(json.dumps({**RESULT, "steps": [reduce]}))
    rows = picture.make_picture(result, result.steps[0]).rows
    assert [[box.origin for box in row.after] for row in rows] == [["combined"] * 2, ["combined", "1"]]
