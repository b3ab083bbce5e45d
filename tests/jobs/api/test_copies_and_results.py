"""Copies and resumed jobs, metrics, traffic, and results of runs, over REST."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from django.contrib.auth.models import User
from django.core.cache import cache
from rest_framework.test import APIClient

from jobs.models import Attempt, Host, Job
from jobs.queue import actions
from planner.facts.spec import TrainSpec
from tests.jobs.history.sample_telemetry import generate_run, record_batches
from tests.jobs.planning.test_measured_runs import end_run, make_summary
from tests.planner.wrong_specs import GOOD

Api = Callable[[User | None], APIClient]


@pytest.fixture(autouse=True)
def _fresh_throttle() -> None:
    cache.clear()


def post(client: APIClient, path: str, body: Any = None, **headers: str) -> Any:
    return client.post(f"/api/v1/{path}", body, format="json", headers=headers or None)


def test_copy_applies_changes_to_the_spec(owner: User, api: Api) -> None:
    job, _ = actions.submit(owner, GOOD)
    same = post(api(owner), f"jobs/{job.id}/copy").json()
    assert same["id"] != job.id
    assert same["spec"] == job.spec
    changed = post(api(owner), f"jobs/{job.id}/copy", {"name": "wide", "layout": {"dp": 1, "tp": 4}}).json()
    assert (changed["name"], changed["layout"]["tp"], changed["layout"]["dp"]) == ("wide", 4, 1)
    assert changed["spec"]["train"] == job.spec["train"]


def test_copy_with_another_preset_replaces_the_model(owner: User, api: Api) -> None:
    job, _ = actions.submit(owner, {**GOOD, "model": {"preset": "gpt-tiny"}, "train": {**GOOD["train"], "steps": 7}})
    made = post(api(owner), f"jobs/{job.id}/copy", {"model": {"preset": "llama-tiny"}})
    assert made.status_code == 201, made.content
    fresh, _ = actions.submit(owner, {**GOOD, "model": {"preset": "llama-tiny"}})
    assert made.json()["spec"]["model"] == fresh.spec["model"]
    back = post(api(owner), f"jobs/{job.id}/copy", {"train": {"steps": None}}).json()
    assert back["spec"]["train"]["steps"] == TrainSpec().steps, "null is the default"


@pytest.mark.parametrize(
    ("train", "change", "warmup"),
    [
        ({"steps": 50}, {"steps": 5}, 5),
        ({"steps": 5}, {"steps": 50}, 5),
        ({"steps": 50, "warmup_steps": 4}, {"steps": 5}, 4),
        ({"steps": 50}, {"steps": 40, "warmup_steps": 20}, 20),
        ({"steps": 50}, {"seq_len": 32}, 10),
    ],
)
def test_copy_with_fewer_steps_shortens_a_default_warmup(
    owner: User, api: Api, train: dict[str, int], change: dict[str, int], warmup: int
) -> None:
    job, _ = actions.submit(owner, {**GOOD, "train": {**GOOD["train"], **train}})
    made = post(api(owner), f"jobs/{job.id}/copy", {"train": change})
    assert made.status_code == 201, made.content
    assert made.json()["spec"]["train"] == {**job.spec["train"], **change, "warmup_steps": warmup}


def test_copy_keeps_an_explicit_warmup(owner: User, api: Api) -> None:
    chosen, _ = actions.submit(owner, {**GOOD, "train": {**GOOD["train"], "steps": 50, "warmup_steps": 20}})
    usual, _ = actions.submit(owner, {**GOOD, "train": {**GOOD["train"], "steps": 50}})
    for job, change in ((chosen, {"steps": 15}), (usual, {"steps": 5, "warmup_steps": 10})):
        refused = post(api(owner), f"jobs/{job.id}/copy", {"train": change})
        assert refused.status_code == 422
        assert f"Use at most {change['steps']}." in refused.content.decode()


def test_copy_is_idempotent_and_validated(owner: User, stranger: User, api: Api) -> None:
    job, _ = actions.submit(owner, GOOD)
    path = f"jobs/{job.id}/copy"
    first, second = (post(api(owner), path, {}, **{"Idempotency-Key": "k"}) for _ in range(2))
    assert (first.status_code, second.status_code, first.json()["id"]) == (201, 200, second.json()["id"])
    wrong = post(api(owner), path, {"train": {"steps": 0}})
    assert (wrong.status_code, wrong.json()["errors"][0]["pointer"]) == (422, "/train/steps")
    assert post(api(owner), path, []).status_code == 422
    assert post(api(stranger), path).status_code == 404
    assert Job.objects.count() == 2


def test_resumes_a_checkpoint_with_another_layout(
    owner: User, stranger: User, api: Api, make_host: Callable[..., Host]
) -> None:
    make_host()
    saves = {"train": {**GOOD["train"], "steps": 30, "checkpoint_every": 10}, "layout": {"tp": 2}}
    run = end_run(owner, make_summary(0.3), outcome="failed", **saves).job_id
    none = post(api(owner), f"jobs/{run}/resume")
    assert (none.status_code, none.json()["errors"][0]["field"]) == (409, "checkpoint")
    newest = f"{run}/1/step-00000020"
    Attempt.objects.filter(job_id=run).update(checkpoint=newest)
    made = post(api(owner), f"jobs/{run}/resume", {"change": {"layout": {"tp": 4}}})
    assert made.status_code == 201, made.content
    assert (made.json()["spec"]["train"]["resume"], made.json()["layout"]["tp"]) == (newest, 4)
    older = post(api(owner), f"jobs/{run}/resume", {"checkpoint": f"{run}/1/step-00000010"}).json()
    assert older["spec"]["train"]["resume"] == f"{run}/1/step-00000010"
    foreign_job, _ = actions.submit(stranger, GOOD)
    foreign = post(api(owner), f"jobs/{run}/resume", {"checkpoint": f"{foreign_job.id}/1/step-00000010"})
    assert (foreign.status_code, foreign.json()["errors"][0]["pointer"]) == (422, "/checkpoint")


def test_key_is_valid_after_the_source_changed(owner: User, api: Api, make_host: Callable[..., Host]) -> None:
    """A client repeats a request after the source run has a newer checkpoint or was deleted."""
    make_host()
    saves = {"train": {**GOOD["train"], "steps": 30, "checkpoint_every": 10}, "layout": {"tp": 2}}
    run = end_run(owner, make_summary(0.3), outcome="failed", **saves).job_id
    Attempt.objects.filter(job_id=run).update(checkpoint=f"{run}/1/step-00000010")
    requests = [(f"jobs/{run}/resume", {"checkpoint": None}), (f"jobs/{run}/copy", {"name": "again"})]
    made = [post(api(owner), path, body, **{"Idempotency-Key": path}) for path, body in requests]
    assert [response.status_code for response in made] == [201, 201]
    Attempt.objects.filter(job_id=run).update(checkpoint=f"{run}/1/step-00000020")
    Job.objects.filter(id=run).update(spec=Job.objects.get(id=made[0].json()["id"]).spec)
    for gone in (False, True):
        if gone:
            Job.objects.filter(id=run).delete()
        again = [post(api(owner), path, body, **{"Idempotency-Key": path}) for path, body in requests]
        assert [response.status_code for response in again] == [200, 200]
        assert [response.json()["id"] for response in again] == [response.json()["id"] for response in made]
    other = post(
        api(owner), requests[0][0], {"checkpoint": f"{run}/1/step-00000010"}, **{"Idempotency-Key": requests[0][0]}
    )
    assert other.status_code == 422


@pytest.fixture
def recorded_run(owner: User, tmp_path: Path, settings: Any, make_host: Callable[..., Host]) -> str:
    make_host()
    settings.HISTORY_DIR = tmp_path
    run = end_run(owner, make_summary(0.3)).job_id
    record_batches(tmp_path, list(generate_run(2, 4)), run)
    return run


def test_traffic_total_does_not_depend_on_grouping(owner: User, api: Api, recorded_run: str) -> None:
    client = api(owner)

    def total(**query: Any) -> int:
        response = client.get(f"/api/v1/jobs/{recorded_run}/traffic", query).json()
        return sum(response["columns"]["payload_bytes"])

    whole = total(points=1)
    assert whole > 0
    for by in ("job", "rank", "axis", "collective"):
        for points in (1, 7, 2000):
            assert total(by=by, points=points) == whole
    every = client.get(f"/api/v1/jobs/{recorded_run}/history/traffic").json()["columns"]["payload_bytes"]
    assert sum(every) == whole


def test_metrics_as_csv_and_parquet(owner: User, api: Api, recorded_run: str) -> None:
    client, path = api(owner), f"/api/v1/jobs/{recorded_run}/metrics"
    columns = client.get(path, {"by": "rank", "points": 5}).json()["columns"]
    text = b"".join(client.get(path, {"by": "rank", "points": 5, "format": "csv"}).streaming_content).decode()  # type: ignore[attr-defined]
    table = pq.read_table(
        io.BytesIO(b"".join(client.get(path, {"by": "rank", "points": 5, "format": "parquet"}).streaming_content))  # type: ignore[attr-defined]
    )
    assert len(text.splitlines()) - 1 == len(columns["time"]) == table.num_rows > 0
    assert text.splitlines()[0].split(",") == list(columns) == table.column_names
    assert set(columns["rank"]) == {0, 1}


@pytest.mark.parametrize(
    ("path", "query", "field"),
    [
        ("metrics", "by=axis", "by"),
        ("traffic", "by=op", "by"),
        ("traffic", "points=0", "points"),
        ("traffic", "points=2001", "points"),
        ("metrics", "from=nan", "from"),
        ("metrics", "format=xml", "format"),
        ("traffic", "bins=2", "bins"),
        ("results", "attempt=0", "attempt"),
    ],
)
def test_rejects_invalid_parameters(owner: User, api: Api, path: str, query: str, field: str) -> None:
    job, _ = actions.submit(owner, GOOD)
    response = api(owner).get(f"/api/v1/jobs/{job.id}/{path}?{query}")
    (error,) = response.json()["errors"]
    assert (response.status_code, error["field"], error["in"]) == (400, field, "query")


def test_rejects_contradictory_parameters(owner: User, api: Api) -> None:
    job, _ = actions.submit(owner, GOOD)
    for path, field in (("metrics?from=9&to=1", "from"), ("logs/0?bytes=5", "file")):
        response = api(owner).get(f"/api/v1/jobs/{job.id}/{path}")
        (error,) = response.json()["errors"]
        assert (response.status_code, error["field"], error["in"]) == (422, field, "query")


def test_run_without_history_is_404(owner: User, stranger: User, api: Api, recorded_run: str) -> None:
    job, _ = actions.submit(owner, GOOD)
    for path in ("metrics", "traffic", "results"):
        assert api(owner).get(f"/api/v1/jobs/{job.id}/{path}").status_code == 404
        assert api(stranger).get(f"/api/v1/jobs/{recorded_run}/{path}").status_code == 404


def test_runs_a_benchmark_on_a_connected_host(owner: User, api: Api, make_host: Callable[..., Host]) -> None:
    client, path = api(owner), "lab/primitives/all_gather"
    assert post(client, path).status_code == 409
    make_host("a-narrow-one", slots=1)
    refused = post(client, path)
    assert (refused.status_code, refused.json()["errors"][0]["message"]) == (
        409,
        "No connected host has two slots. Add a host with two or more slots.",
    )
    make_host(slots=2)
    made = post(client, path, {"lab": {"max_bytes": 4096, "primitives": ["barrier"]}}).json()
    assert made["spec"]["lab"]["primitives"] == ["all_gather"]
    assert (made["spec"]["lab"]["max_bytes"], made["world_size"], made["host"]) == (4096, 2, None)
    gone = post(client, path, {"host": "elsewhere"})
    assert (gone.status_code, gone.json()["errors"][0]["pointer"]) == (422, "/host")
    wide = post(client, path, {"ranks": 8})
    assert (wide.status_code, wide.json()["errors"][0]["pointer"]) == (422, "/ranks")
