"""Open external runs with their nodes, ranks, and pages."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.utils import timezone
from rest_framework.test import APIClient

from contracts.names import telemetry_stream
from jobs.models import Job, Member, Status
from jobs.queue.inbound.reconcile import check_external_runs
from tests.jobs.reporting.nodes import CLAIM, Api, Node, fall_silent, get_job, list_changes


def test_nodes_open_one_run_by_key_and_all_end_it(
    owner: User, stranger: User, api: Api, live_redis: redis.Redis
) -> None:
    asked = {"world_size": 4, "nodes": 2, "key": "slurm 17"}
    first = api(owner).post("/api/v1/runs", asked, format="json")
    second = api(owner).post("/api/v1/runs", asked, format="json")
    foreign = api(stranger).post("/api/v1/runs", asked, format="json")
    assert [first.status_code, second.status_code, foreign.status_code] == [201, 200, 201]
    run = first.json()["run"]
    assert second.json()["run"] == run
    assert second.json()["token"] != first.json()["token"]
    assert foreign.json()["run"] != run
    assert api(owner).post("/api/v1/runs", {**asked, "nodes": 4}, format="json").status_code == 422
    nodes = [Node(run, first.json()["token"]), Node(run, second.json()["token"], node=1, claim=CLAIM * 2)]
    assert [each.join().json()["first_rank"] for each in nodes] == [0, 2]
    assert nodes[1].join("gpu-0").status_code == 409, "names differ"
    assert nodes[0].batch(rank=2).status_code == 403
    assert nodes[1].batch(rank=2).status_code == 200
    assert live_redis.exists(telemetry_stream(run, 1, 1)) == 1
    nodes[0].report()
    assert nodes[0].report("exited", "succeeded").json()["status"] == "running"
    assert nodes[1].report("exited", "succeeded").json()["status"] == "succeeded"
    again = api(owner).post("/api/v1/runs", asked, format="json")
    assert again.status_code == 201, "a key is a run's as long as it lasts"


def test_node_that_never_joined_is_lost_after_the_others_end(open_run: Callable[..., Any]) -> None:
    told = open_run(world_size=2, nodes=2)
    first = Node(told["run"], told["token"])
    first.join()
    first.report()
    first.report("exited", "succeeded")
    check_external_runs()
    assert get_job(first).status == Status.RUNNING
    long_ago = timezone.now() - timedelta(minutes=6)
    Member.objects.filter(attempt__job_id=first.run, node=0).update(ended=long_ago)
    get_job(first).attempts.update(created=long_ago)
    check_external_runs()
    assert list_changes(first)[-1] == ("lost", "node node 1 never joined the run")


@pytest.mark.parametrize("ranks", [1, 7, 65536])
def test_accepts_any_number_of_ranks(open_run: Callable[..., Any], ranks: int) -> None:
    assert Job.objects.get(id=open_run(world_size=ranks)["run"]).world_size == ranks


SPEC = {"model": {"preset": "gpt-tiny"}, "layout": {"dp": 2}, "train": {"global_batch": 4}}


def test_spec_adds_a_prediction(open_run: Callable[..., Any]) -> None:
    job = Job.objects.get(id=open_run(spec=SPEC, name="with a plan")["run"])
    assert (job.kind, job.name, job.engine) == ("train", "with a plan", "elsewhere")
    assert job.estimate["exact_traffic"]


WRONG_RUNS: list[tuple[dict[str, Any], str]] = [
    ({"world_size": 0}, "world_size"),
    ({"world_size": "2"}, "world_size"),
    ({"world_size": True}, "world_size"),
    ({"world_size": 2**64}, "world_size"),
    ({"world_size": 5, "nodes": 2}, "nodes"),
    ({"nodes": 0}, "nodes"),
    ({"name": "a\nb"}, "name"),
    ({"name": ""}, "name"),
    ({"tags": [""]}, "tags.0"),
    ({"tags": ["x"] * 21}, "tags"),
    ({"command": ["\0"]}, "command.0"),
    ({"key": ""}, "key"),
    ({"slots": 3}, "slots"),
    ({"spec": {**SPEC, "layout": {"dp": 4}}}, "spec.layout"),
    ({"spec": {"kind": "script", "script": {"path": "a.py"}, "layout": {"dp": 2}}}, "spec.kind"),
    ({"spec": {"model": {"preset": "no such"}, "layout": {"dp": 2}}}, "model.preset"),
]


@pytest.mark.parametrize(("wrong", "field"), WRONG_RUNS)
def test_rejects_invalid_run_by_field(owner: User, api: Api, wrong: dict[str, Any], field: str) -> None:
    answer = api(owner).post("/api/v1/runs", {"world_size": 2, **wrong}, format="json")
    assert answer.status_code == 422, answer.json()
    assert [error["field"] for error in answer.json()["errors"]] == [field]
    assert not Job.objects.exists()


@pytest.mark.parametrize(
    ("wrong", "status"),
    [({"node": 1}, 422), ({"node": -1}, 422), ({"name": "a b"}, 422), ({"claim": "short"}, 422), ({"ranks": 2}, 422)],
)
def test_rejects_invalid_node(open_run: Callable[..., Any], wrong: dict[str, Any], status: int) -> None:
    told = open_run()
    body = {"node": 0, "name": "gpu-7", "claim": CLAIM, **wrong}
    path = f"/api/v1/runs/{told['run']}/1/members"
    answer = APIClient().post(path, body, format="json", HTTP_AUTHORIZATION=f"Run {told['token']}")
    assert answer.status_code == status


@pytest.mark.parametrize(
    ("way", "status"),
    [
        ({}, 200),
        ({"REMOTE_ADDR": "192.0.2.7"}, 403),
        ({"REMOTE_ADDR": "192.0.2.7", "secure": True}, 200),
        ({"HTTP_X_FORWARDED_FOR": "192.0.2.7"}, 403),
        ({"HTTP_X_FORWARDED_PROTO": "http"}, 403),
    ],
)
def test_http_is_allowed_on_loopback_only(node: Node, owner: User, api: Api, way: dict[str, Any], status: int) -> None:
    assert node.join("gpu-7", **way).status_code == status
    opened = api(owner).post("/api/v1/runs", {"world_size": 1}, format="json", **way)
    assert opened.status_code == (201 if status == 200 else 403)
    if status == 403:
        assert "HTTPS" in opened.json()["errors"][0]["message"]


def test_page_of_an_external_run_has_no_actions_of_launched_jobs(
    node: Node, owner: User, stranger: User, client: Any
) -> None:
    client.force_login(owner)
    text = client.get(f"/jobs/{node.run}/").content.decode()
    assert 'External run on <span id="where">gpu-7</span>' in text
    assert "Copy job" not in text
    forms = {line.split('id="')[1].split('"')[0]: line for line in text.splitlines() if "<form id=" in line}
    assert "hidden" in forms["requeue-form"]
    assert "data-may-not" in forms["requeue-form"]
    assert "data-may-not" not in forms["give-up-form"]
    for panel in ("traffic-title", "collectives-title", "proof-title", "log-title"):
        assert panel in text
    for panel in ("advice-title", "checkpoints-title", "fidelity-title"):
        assert panel not in text
    client.force_login(stranger)
    assert client.get(f"/jobs/{node.run}/").status_code == 404
    assert client.post(f"/jobs/{node.run}/give-up/").status_code == 404


def test_page_compares_a_run_with_its_spec(open_run: Callable[..., Any], owner: User, client: Any) -> None:
    client.force_login(owner)
    text = client.get(f"/jobs/{open_run(spec=SPEC)['run']}/").content.decode()
    assert "fidelity-title" in text
    assert "Meshboard's trainer" in text


def test_silent_run_is_marked_as_lost_on_its_page(node: Node, owner: User, client: Any) -> None:
    client.force_login(owner)
    node.report()
    client.post(f"/jobs/{node.run}/give-up/")
    assert get_job(node).status == Status.RUNNING, "it speaks"
    fall_silent(node)
    check_external_runs()
    assert client.post(f"/jobs/{node.run}/give-up/").status_code == 302
    assert get_job(node).status == Status.LOST
