"""A run that somebody launched elsewhere, as the board takes it in over REST."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import msgpack
import pytest
import redis
from django.contrib.auth.models import User
from django.core.cache import cache
from django.utils import timezone
from rest_framework.test import APIClient

from contracts.codec import BATCH_BYTES, REPORT_BYTES, decode_batch
from contracts.names import telemetry_stream
from jobs.models import Job, Member, RunToken, Status
from jobs.queue import actions
from jobs.queue.heard.silence import tell_of_silence
from jobs.queue.scheduling.scheduler import schedule
from jobs.reporting import inflow
from tests.jobs.conftest import report
from tests.planner.wrong_specs import GOOD
from tests.support.processes import RedisServer, redis_server

Api = Callable[[User | None], APIClient]
CLAIM = "the-secret-of-this-process"


@pytest.fixture(scope="module")
def one_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def live_redis(one_redis: RedisServer, settings: Any) -> Iterator[redis.Redis]:
    """Empty, behind the settings."""
    settings.REDIS_URL = one_redis.url
    client = one_redis.client()
    client.flushall()
    yield client
    client.close()


@pytest.fixture(autouse=True)
def _fresh_counts() -> None:
    cache.clear()  # submits of a minute are counted


class Node:
    """What the wrapper on one node of a run may say."""

    def __init__(self, run: str, token: str, node: int = 0, claim: str = CLAIM, attempt: int = 1) -> None:
        self.run, self.node, self.attempt = run, node, attempt
        self.client = APIClient()
        self.headers = {"HTTP_AUTHORIZATION": f"Run {token}", "HTTP_MESHBOARD_CLAIM": claim}
        self.claim = claim

    def join(self, name: str = "", **secure: Any) -> Any:
        body = {"node": self.node, "name": name or f"gpu-{self.node}", "claim": self.claim}
        path = f"/api/v1/runs/{self.run}/{self.attempt}/members"
        return self.client.post(path, body, format="json", **{**self.headers, **secure})

    def batch(self, number: int = 0, rank: int = 0, told: Any = None, **changes: Any) -> Any:
        item = {"kind": "phase", "rank": rank, "time": 1.0, "phase": "step"}
        whole = {"v": 1, "job": self.run, "attempt": self.attempt, "time": 1.0, "items": [item], **changes}
        return self._send(f"batches?n={number}", msgpack.packb(whole) if told is None else told)

    def report(self, state: str = "running", outcome: str | None = None, **changes: Any) -> Any:
        return self.raw_report(report(self.run, self.attempt, state, outcome, slots=[], **changes))

    def raw_report(self, told: Any, **headers: Any) -> Any:
        return self._send("report", told if isinstance(told, bytes) else msgpack.packb(told), **headers)

    def _send(self, path: str, body: bytes, **headers: Any) -> Any:
        address = f"/api/v1/runs/{self.run}/{self.attempt}/members/{self.node}/{path}"
        return self.client.post(address, body, content_type="application/msgpack", **{**self.headers, **headers})


@pytest.fixture
def open_run(owner: User, api: Api, live_redis: redis.Redis) -> Callable[..., Any]:
    def opened(**asked: Any) -> Any:
        answer = api(owner).post("/api/v1/runs", {"world_size": 2, "name": "by hand", **asked}, format="json")
        assert answer.status_code == 201, answer.json()
        return answer.json()

    return opened


@pytest.fixture
def node(open_run: Callable[..., Any]) -> Node:
    """The one node of a run, which has joined."""
    told = open_run()
    made = Node(told["run"], told["token"])
    assert made.join("gpu-7").status_code == 200
    return made


def said(answer: Any) -> Any:
    """What a node was told, but for the board's time."""
    told = answer.json()
    assert abs(told.pop("now") - time.time()) < 60
    return told


def job_of(node: Node) -> Job:
    return Job.objects.get(id=node.run)


def reasons(node: Node) -> list[tuple[str, str]]:
    return [(change.status, change.reason) for change in job_of(node).history.all()]


def fall_silent(node: Node, seconds: float = 31.0) -> None:
    Member.objects.filter(attempt__job_id=node.run).update(heard=timezone.now() - timedelta(seconds=seconds))


def test_a_run_begins_without_a_queue_or_a_slot_runs_and_ends_by_its_report(node: Node) -> None:
    job = job_of(node)
    assert (job.status, job.engine, job.kind) == (Status.STARTING, "elsewhere", "script")
    assert schedule() == 0
    assert said(node.report("starting")) == {"cancel": False, "status": "starting"}
    assert said(node.report()) == {"cancel": False, "status": "running"}
    assert said(node.batch()) == {"cancel": False, "status": "running"}
    assert node.report("exited", "succeeded").json()["status"] == "succeeded"
    job.refresh_from_db()
    attempt = job.attempts.get()
    member = attempt.members.get()
    assert attempt.ended is not None
    assert attempt.exit["reason"] == "it succeeded"
    assert (member.host, member.host_name, member.first_rank, member.num_ranks) == (None, "gpu-7", 0, 2)
    assert [status for status, _ in reasons(node)] == ["starting", "running", "succeeded"]


def test_batches_lie_in_the_stream_that_pages_follow_each_number_once(node: Node, live_redis: redis.Redis) -> None:
    for number in (0, 1, 1, 0, 2):
        assert node.batch(number).status_code == 200
    entries: Any = live_redis.xrange(telemetry_stream(node.run, 1))
    assert [fields[b"n"] for _, fields in entries] == [b"0", b"1", b"2"]
    assert decode_batch(entries[0][1][b"b"])["items"][0]["kind"] == "phase"
    assert 0 < live_redis.ttl(telemetry_stream(node.run, 1)) <= inflow.STREAM_KEPT_S


def test_a_node_says_how_it_fares_and_speaks_for_no_other_s_ranks(node: Node) -> None:
    of_the_node = [
        {"kind": "gauge", "rank": -1, "time": 1.0, "cpu": 0.5},
        {"kind": "start", "rank": -1, "time": 1.0, "stage": "spawned"},
    ]
    assert node.batch(0, items=of_the_node).status_code == 200
    for kind in ("gauge", "start"):
        others = [{**item, "rank": 2} for item in of_the_node if item["kind"] == kind]
        assert node.batch(1, items=others).status_code >= 400


def test_a_stream_keeps_its_newest_bytes(node: Node, live_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflow, "STREAM_BYTES", 300)
    for number in range(20):
        assert node.batch(number).status_code == 200
    entries: Any = live_redis.xrange(telemetry_stream(node.run, 1))
    assert 0 < sum(len(fields[b"b"]) for _, fields in entries) <= 300
    assert entries[-1][1][b"n"] == b"19"
    assert entries[0][1][b"n"] != b"0", "so that a page shows the gap"


def test_who_sends_too_fast_waits_and_loses_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflow, "BURST_BYTES", 2 * inflow.BATCH_COST + 1000)
    monkeypatch.setattr(inflow, "BYTES_PER_S", 100)
    answers = [node.batch(number) for number in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert int(answers[2]["Retry-After"]) > 1
    monkeypatch.setattr(inflow, "BURST_BYTES", 2**30)
    monkeypatch.setattr(inflow, "BYTES_PER_S", 2**30)
    assert node.batch(2).status_code == 200


WRONG_BATCHES: list[tuple[dict[str, Any], int]] = [
    ({"job": "anotherjob"}, 403),
    ({"attempt": 2}, 403),
    ({"rank": 2}, 403),
    ({"v": 2}, 422),
    ({"items": [{"kind": "phase", "rank": 0, "time": float("nan"), "phase": "step"}]}, 422),
    ({"items": [{"kind": "phase", "rank": "0", "time": 1.0, "phase": "step"}]}, 422),
    ({"told": b"\xc1"}, 422),
    ({"told": b"\x91" * 5000}, 422),
    ({"told": b"x" * (BATCH_BYTES + 1)}, 413),
]


@pytest.mark.parametrize(("wrong", "status"), WRONG_BATCHES)
def test_a_batch_that_is_not_its_own_or_makes_no_sense_is_refused_and_leaves_nothing(
    node: Node, live_redis: redis.Redis, wrong: dict[str, Any], status: int
) -> None:
    assert node.batch(**wrong).status_code == status
    assert live_redis.exists(telemetry_stream(node.run, 1)) == 0


@pytest.mark.parametrize("number", ["-1", "x", "", str(2**53), "1" * 400, "²"])
def test_a_number_that_is_none_is_refused(node: Node, number: Any) -> None:
    assert node.batch(number).status_code == 422


WRONG_REPORTS: list[tuple[Any, int]] = [
    ({"job": "anotherjob"}, 403),
    ({"attempt": 2}, 403),
    ({"state": "asleep"}, 422),
    (b"", 422),
    (b"x" * (2**20 + 1), 422),
]


@pytest.mark.parametrize(("wrong", "status"), WRONG_REPORTS)
def test_a_report_that_is_not_its_own_or_makes_no_sense_is_refused(node: Node, wrong: Any, status: int) -> None:
    told = wrong if isinstance(wrong, bytes) else {**report(node.run, 1, "running", slots=[]), **wrong}
    assert node.raw_report(told).status_code == status
    assert job_of(node).status == Status.STARTING


def test_an_exit_of_another_run_is_refused(node: Node) -> None:
    told = report(node.run, 1, "exited", "succeeded", slots=[])
    told["exit"]["job"] = "anotherjob"
    assert node.raw_report(told).status_code == 403
    assert job_of(node).status == Status.STARTING


def test_a_report_may_be_deflated_within_its_bound(node: Node) -> None:
    whole = msgpack.packb(report(node.run, 1, "running", slots=[]))
    deflated = {"HTTP_CONTENT_ENCODING": "deflate"}
    assert node.raw_report(zlib.compress(whole), **deflated).json()["status"] == "running"
    assert node.raw_report(whole, **deflated).status_code == 400
    assert node.raw_report(whole, HTTP_CONTENT_ENCODING="br").status_code == 400
    assert node.raw_report(zlib.compress(b"\0" * (50 * REPORT_BYTES)), **deflated).status_code == 413


def test_only_the_runs_own_token_reports_it(node: Node, open_run: Callable[..., Any], owner: User, api: Api) -> None:
    other = open_run()
    for token, status in ((other["token"], 404), ("x" * 43, 401), ("", 401), ("²", 401)):
        stranger = Node(node.run, token)
        answers = [stranger.join(), stranger.batch(), stranger.report()]
        assert [answer.status_code for answer in answers] == [status] * 3, token
    person = api(owner)
    assert person.post(f"/api/v1/runs/{node.run}/1/members", {}, format="json").status_code == 401
    assert Node(node.run, node.headers["HTTP_AUTHORIZATION"][4:], attempt=2).batch().status_code == 404
    assert Node(node.run, node.headers["HTTP_AUTHORIZATION"][4:], node=1).batch().status_code == 404
    assert not RunToken.objects.filter(digest=other["token"]).exists(), "only its hash is kept"


def test_a_runs_token_opens_no_other_door(node: Node) -> None:
    for path in ("/api/v1/jobs", f"/api/v1/jobs/{node.run}", "/api/v1/hosts"):
        assert node.client.get(path, **node.headers).status_code == 401


def test_the_token_of_an_owner_who_may_not_log_in_is_refused(node: Node, owner: User) -> None:
    User.objects.filter(pk=owner.pk).update(is_active=False)
    assert node.report().status_code == 401


def test_a_second_process_cannot_speak_for_a_node(node: Node) -> None:
    token = node.headers["HTTP_AUTHORIZATION"][4:]
    second = Node(node.run, token, claim="the-secret-of-another-process")
    assert second.join().status_code == 409
    assert [second.batch().status_code, second.report("exited", "failed").status_code] == [403, 403]
    assert node.join("gpu-7").status_code == 200, "the first says it again"
    assert node.batch().status_code == 200


def test_a_run_that_has_ended_takes_no_more_and_says_how_it_ended(node: Node, live_redis: redis.Redis) -> None:
    node.report()
    node.report("exited", "failed")
    assert node.report("exited", "failed").status_code == 200, "the answer was lost: it is told again"
    for answer in (node.batch(), node.report(), node.join()):
        assert answer.status_code == 410
        assert answer.json()["errors"][0]["message"] == "the run has ended: failed, it failed"
        assert answer.json()["cancel"] is False
    assert live_redis.exists(telemetry_stream(node.run, 1)) == 0


def test_a_run_is_told_to_end_in_the_next_answer_and_is_cancelled_by_its_report(
    node: Node, owner: User, api: Api
) -> None:
    node.report()
    assert api(owner).post(f"/api/v1/jobs/{node.run}/cancel").json()["status"] == "cancelling"
    assert said(node.batch()) == {"cancel": True, "status": "cancelling"}
    assert node.report("exited", "cancelled").json()["status"] == "cancelled"


def test_a_run_that_was_ended_at_its_terminal_is_cancelled(node: Node) -> None:
    node.report()
    node.report("exited", "cancelled")
    assert reasons(node)[-2:] == [("cancelling", "it cancelled"), ("cancelled", "it cancelled")]


def test_silence_makes_it_unreachable_and_a_word_running_again(node: Node) -> None:
    node.report()
    tell_of_silence()
    assert job_of(node).status == Status.RUNNING
    fall_silent(node)
    tell_of_silence()
    assert job_of(node).status == Status.UNREACHABLE
    assert "gpu-7 has been silent since" in reasons(node)[-1][1]
    assert node.batch().json()["status"] == "running"
    assert reasons(node)[-1] == ("running", "gpu-7 is heard again")


def test_an_end_told_after_silence_is_an_end(node: Node) -> None:
    node.report()
    fall_silent(node)
    tell_of_silence()
    assert node.report("exited", "succeeded").json()["status"] == "succeeded"


def test_a_silent_run_is_given_up_by_its_owner_or_staff_and_by_nobody_else(
    node: Node, owner: User, stranger: User, staff: User, viewer: User, api: Api
) -> None:
    path = f"/api/v1/jobs/{node.run}/give-up"
    node.report()
    assert api(owner).post(path).status_code == 409, "it speaks"
    fall_silent(node)
    tell_of_silence()
    assert api(stranger).post(path).status_code == 404
    assert api(viewer).post(path).status_code == 403
    assert api(owner).post(path).json()["status"] == "lost"
    assert reasons(node)[-1] == ("lost", "given up by owner")
    answer = node.report()
    assert (answer.status_code, answer.json()["cancel"]) == (410, False), "what lives on is not harmed"


def test_a_job_of_a_host_is_not_given_up_here(owner: User, api: Api) -> None:
    job, _ = actions.submit(owner, GOOD)
    assert api(owner).post(f"/api/v1/jobs/{job.id}/give-up").status_code == 409


def test_nobody_else_sees_a_run(node: Node, stranger: User, staff: User, api: Api) -> None:
    assert api(stranger).get(f"/api/v1/jobs/{node.run}").status_code == 404
    assert api(staff).get(f"/api/v1/jobs/{node.run}").status_code == 200


def test_it_is_never_queued_again(node: Node, owner: User, api: Api) -> None:
    node.report("exited", "failed")
    answer = api(owner).post(f"/api/v1/jobs/{node.run}/requeue")
    assert answer.status_code == 409
    assert job_of(node).status == Status.FAILED


def test_several_nodes_open_one_run_by_its_key_and_it_ends_when_all_have(
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


def test_a_node_that_never_joined_is_lost_once_the_others_have_ended(open_run: Callable[..., Any]) -> None:
    told = open_run(world_size=2, nodes=2)
    first = Node(told["run"], told["token"])
    first.join()
    first.report()
    first.report("exited", "succeeded")
    tell_of_silence()
    assert job_of(first).status == Status.RUNNING
    long_ago = timezone.now() - timedelta(minutes=6)
    Member.objects.filter(attempt__job_id=first.run, node=0).update(ended=long_ago)
    job_of(first).attempts.update(created=long_ago)
    tell_of_silence()
    assert reasons(first)[-1] == ("lost", "node 1 of this run never reported")


@pytest.mark.parametrize("ranks", [1, 7, 65536])
def test_any_number_of_ranks_may_report(open_run: Callable[..., Any], ranks: int) -> None:
    assert Job.objects.get(id=open_run(world_size=ranks)["run"]).world_size == ranks


SPEC = {"model": {"preset": "gpt-tiny"}, "layout": {"dp": 2}, "train": {"global_batch": 4}}


def test_with_a_spec_its_prediction_is_kept_beside_it(open_run: Callable[..., Any]) -> None:
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
def test_a_run_that_makes_no_sense_is_refused_at_its_field_and_leaves_nothing(
    owner: User, api: Api, wrong: dict[str, Any], field: str
) -> None:
    answer = api(owner).post("/api/v1/runs", {"world_size": 2, **wrong}, format="json")
    assert answer.status_code == 422, answer.json()
    assert [error["field"] for error in answer.json()["errors"]] == [field]
    assert not Job.objects.exists()


@pytest.mark.parametrize(
    ("wrong", "status"),
    [({"node": 1}, 422), ({"node": -1}, 422), ({"name": "a b"}, 422), ({"claim": "short"}, 422), ({"ranks": 2}, 422)],
)
def test_a_node_that_makes_no_sense_does_not_join(
    open_run: Callable[..., Any], wrong: dict[str, Any], status: int
) -> None:
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
def test_plain_http_is_for_this_machine_alone(
    node: Node, owner: User, api: Api, way: dict[str, Any], status: int
) -> None:
    assert node.join("gpu-7", **way).status_code == status
    opened = api(owner).post("/api/v1/runs", {"world_size": 1}, format="json", **way)
    assert opened.status_code == (201 if status == 200 else 403)
    if status == 403:
        assert "HTTPS" in opened.json()["errors"][0]["message"]


def test_its_page_says_where_it_runs_and_offers_nothing_that_only_launched_jobs_have(
    node: Node, owner: User, stranger: User, client: Any
) -> None:
    client.force_login(owner)
    text = client.get(f"/jobs/{node.run}/").content.decode()
    assert 'Launched elsewhere on <span id="where">gpu-7</span>' in text
    assert "Run again" not in text
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


def test_with_a_spec_its_page_has_the_difference(open_run: Callable[..., Any], owner: User, client: Any) -> None:
    client.force_login(owner)
    text = client.get(f"/jobs/{open_run(spec=SPEC)['run']}/").content.decode()
    assert "fidelity-title" in text
    assert "Meshboard's own trainer" in text


def test_a_silent_run_is_given_up_on_its_page(node: Node, owner: User, client: Any) -> None:
    client.force_login(owner)
    node.report()
    client.post(f"/jobs/{node.run}/give-up/")
    assert job_of(node).status == Status.RUNNING, "it speaks"
    fall_silent(node)
    tell_of_silence()
    assert client.post(f"/jobs/{node.run}/give-up/").status_code == 302
    assert job_of(node).status == Status.LOST
