"""Report external runs over REST."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import redis
from django.contrib.auth.models import User

from contracts.codec import MAX_BATCH_BYTES, MAX_REPORT_BYTES, decode_batch
from contracts.names import telemetry_stream
from jobs.core.job_details import serialize_job
from jobs.models import RunToken, Status
from jobs.queue import actions
from jobs.queue.inbound.reconcile import check_external_runs
from jobs.queue.scheduling.scheduler import schedule
from jobs.runs.reporting import telemetry_inflow
from tests.jobs.conftest import report
from tests.jobs.reporting.nodes import Api, Node, drop_time, fall_silent, get_job, list_changes
from tests.planner.wrong_specs import GOOD


def test_run_starts_without_a_slot_and_ends_by_report(node: Node) -> None:
    job = get_job(node)
    assert (job.status, job.engine, job.kind) == (Status.STARTING, "elsewhere", "script")
    assert schedule() == 0
    assert drop_time(node.report("starting")) == {"cancel": False, "status": "starting"}
    assert drop_time(node.report()) == {"cancel": False, "status": "running"}
    assert drop_time(node.batch()) == {"cancel": False, "status": "running"}
    assert node.report("exited", "succeeded").json()["status"] == "succeeded"
    job.refresh_from_db()
    attempt = job.attempts.get()
    member = attempt.members.get()
    assert attempt.ended is not None
    assert attempt.exit["reason"] == "it succeeded"
    assert (member.host, member.host_name, member.first_rank, member.num_ranks) == (None, "gpu-7", 0, 2)
    assert [status for status, _ in list_changes(node)] == ["starting", "running", "succeeded"]


def test_each_batch_is_in_the_stream_once(node: Node, live_redis: redis.Redis) -> None:
    for number in (0, 1, 1, 0, 2):
        assert node.batch(number).status_code == 200
    entries: Any = live_redis.xrange(telemetry_stream(node.run, 1))
    assert [fields[b"n"] for _, fields in entries] == [b"0", b"1", b"2"]
    assert decode_batch(entries[0][1][b"b"])["items"][0]["kind"] == "phase"
    assert 0 < live_redis.ttl(telemetry_stream(node.run, 1)) <= telemetry_inflow.STREAM_LIFETIME_S


def test_node_reports_only_its_own_ranks(node: Node) -> None:
    of_the_node = [
        {"kind": "gauge", "rank": -1, "time": 1.0, "cpu": 0.5},
        {"kind": "start", "rank": -1, "time": 1.0, "stage": "spawned"},
    ]
    assert node.batch(0, items=of_the_node).status_code == 200
    for kind in ("gauge", "start"):
        others = [{**item, "rank": 2} for item in of_the_node if item["kind"] == kind]
        assert node.batch(1, items=others).status_code >= 400


def test_stream_keeps_the_newest_bytes(node: Node, live_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_inflow, "MAX_STREAM_BYTES", 300)
    for number in range(20):
        assert node.batch(number).status_code == 200
    entries: Any = live_redis.xrange(telemetry_stream(node.run, 1))
    assert 0 < sum(len(fields[b"b"]) for _, fields in entries) <= 300
    assert entries[-1][1][b"n"] == b"19"
    assert entries[0][1][b"n"] != b"0", "so that a page shows the gap"


def test_members_share_the_bytes_of_a_run() -> None:
    place = telemetry_inflow.NodeStream("a", 1, 0)
    assert place.get_max_bytes(1) == place.get_max_bytes(8) == telemetry_inflow.MAX_STREAM_BYTES
    assert place.get_max_bytes(64) == telemetry_inflow.MAX_RUN_BYTES // 64
    assert place.get_max_bytes(4096) == telemetry_inflow.MIN_STREAM_BYTES >= 2 * MAX_BATCH_BYTES


def test_batch_waits_while_redis_is_nearly_full(node: Node, live_redis: redis.Redis) -> None:
    """Telemetry of external runs would displace the data of hosts, jobs, and pages."""
    used = live_redis.info("memory")["used_memory"]
    try:
        live_redis.config_set("maxmemory", int(used / telemetry_inflow.MAX_REDIS_USE) - 2**16)
        telemetry_inflow._is_full.cache_clear()
        refused = node.batch(0)
        assert (refused.status_code, int(refused["Retry-After"])) == (429, telemetry_inflow.FULL_RETRY_AFTER_S)
    finally:
        live_redis.config_set("maxmemory", 0)
        telemetry_inflow._is_full.cache_clear()
    assert node.batch(0).status_code == 200


def test_fast_sender_waits_and_loses_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_inflow, "BURST_BYTES", 2 * telemetry_inflow.BATCH_COST_BYTES + 1000)
    monkeypatch.setattr(telemetry_inflow, "BYTES_PER_S", 100)
    answers = [node.batch(number) for number in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert int(answers[2]["Retry-After"]) > 1
    monkeypatch.setattr(telemetry_inflow, "BURST_BYTES", 2**30)
    monkeypatch.setattr(telemetry_inflow, "BYTES_PER_S", 2**30)
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
    ({"told": b"x" * (MAX_BATCH_BYTES + 1)}, 413),
]


@pytest.mark.parametrize(("wrong", "status"), WRONG_BATCHES)
def test_rejects_foreign_or_invalid_batch(
    node: Node, live_redis: redis.Redis, wrong: dict[str, Any], status: int
) -> None:
    assert node.batch(**wrong).status_code == status
    assert live_redis.exists(telemetry_stream(node.run, 1)) == 0


@pytest.mark.parametrize("number", ["-1", "x", "", str(2**53), "1" * 400, "²"])
def test_rejects_invalid_batch_number(node: Node, number: Any) -> None:
    assert node.batch(number).status_code == 400


WRONG_REPORTS: list[tuple[Any, int]] = [
    ({"job": "anotherjob"}, 403),
    ({"attempt": 2}, 403),
    ({"state": "asleep"}, 422),
    (b"", 422),
    (b"x" * (2**20 + 1), 422),
]


@pytest.mark.parametrize(("wrong", "status"), WRONG_REPORTS)
def test_rejects_foreign_or_invalid_report(node: Node, wrong: Any, status: int) -> None:
    told = wrong if isinstance(wrong, bytes) else {**report(node.run, 1, "running", slots=[]), **wrong}
    assert node.raw_report(told).status_code == status
    assert get_job(node).status == Status.STARTING


def test_rejects_exit_of_another_run(node: Node) -> None:
    told = report(node.run, 1, "exited", "succeeded", slots=[])
    told["exit"]["job"] = "anotherjob"
    assert node.raw_report(told).status_code == 403
    assert get_job(node).status == Status.STARTING


def test_accepts_bounded_deflated_report(node: Node) -> None:
    whole = msgpack.packb(report(node.run, 1, "running", slots=[]))
    deflated = {"HTTP_CONTENT_ENCODING": "deflate"}
    assert node.raw_report(zlib.compress(whole), **deflated).json()["status"] == "running"
    assert node.raw_report(whole, **deflated).status_code == 400
    assert node.raw_report(whole, HTTP_CONTENT_ENCODING="br").status_code == 415
    assert node.raw_report(zlib.compress(b"\0" * (50 * MAX_REPORT_BYTES)), **deflated).status_code == 413


def test_requires_the_token_of_the_run(node: Node, open_run: Callable[..., Any], owner: User, api: Api) -> None:
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


def test_run_token_is_valid_for_reports_only(node: Node) -> None:
    for path in ("/api/v1/jobs", f"/api/v1/jobs/{node.run}", "/api/v1/hosts"):
        assert node.client.get(path, **node.headers).status_code == 401


def test_rejects_token_of_a_disabled_owner(node: Node, owner: User) -> None:
    User.objects.filter(pk=owner.pk).update(is_active=False)
    assert node.report().status_code == 401


def test_rejects_a_second_process_of_a_node(node: Node) -> None:
    token = node.headers["HTTP_AUTHORIZATION"][4:]
    second = Node(node.run, token, claim="the-secret-of-another-process")
    assert second.join().status_code == 409
    assert [second.batch().status_code, second.report("exited", "failed").status_code] == [403, 403]
    assert node.join("gpu-7").status_code == 200, "the first says it again"
    assert node.batch().status_code == 200


def test_ended_run_rejects_reports_with_its_outcome(node: Node, live_redis: redis.Redis) -> None:
    node.report()
    node.report("exited", "failed")
    assert node.report("exited", "failed").status_code == 200, "the report is repeated after a lost response"
    for answer in (node.batch(), node.report(), node.join()):
        assert answer.status_code == 410
        assert answer.json()["errors"][0]["message"] == "The run has ended: failed, it failed."
        assert answer.json()["cancel"] is False
    assert live_redis.exists(telemetry_stream(node.run, 1)) == 0


def test_next_response_asks_a_cancelled_run_to_end(node: Node, owner: User, api: Api) -> None:
    node.report()
    assert api(owner).post(f"/api/v1/jobs/{node.run}/cancel").json()["status"] == "cancelling"
    assert drop_time(node.batch()) == {"cancel": True, "status": "cancelling"}
    assert node.report("exited", "cancelled").json()["status"] == "cancelled"


def test_run_ended_at_the_terminal_is_cancelled(node: Node) -> None:
    node.report()
    node.report("exited", "cancelled")
    assert list_changes(node)[-2:] == [("cancelling", "it cancelled"), ("cancelled", "it cancelled")]


def test_silent_run_is_unreachable_until_the_next_contact(node: Node) -> None:
    node.report()
    check_external_runs()
    assert get_job(node).status == Status.RUNNING
    fall_silent(node)
    check_external_runs()
    assert get_job(node).status == Status.UNREACHABLE
    assert [member["silent"] for member in serialize_job(get_job(node))["members"]] == [True]
    assert "no contact with gpu-7 since" in list_changes(node)[-1][1]
    assert node.batch().json()["status"] == "running"
    assert list_changes(node)[-1] == ("running", "gpu-7 has contact again")


def test_exit_report_after_silence_ends_the_run(node: Node) -> None:
    node.report()
    fall_silent(node)
    check_external_runs()
    assert node.report("exited", "succeeded").json()["status"] == "succeeded"


def test_only_owner_and_staff_mark_a_silent_run_as_lost(
    node: Node, owner: User, stranger: User, staff: User, viewer: User, api: Api
) -> None:
    path = f"/api/v1/jobs/{node.run}/give-up"
    node.report()
    assert api(owner).post(path).status_code == 409, "it speaks"
    fall_silent(node)
    check_external_runs()
    assert api(stranger).post(path).status_code == 404
    assert api(viewer).post(path).status_code == 403
    assert api(owner).post(path).json()["status"] == "lost"
    assert list_changes(node)[-1] == ("lost", "marked as lost by owner")
    answer = node.report()
    assert (answer.status_code, answer.json()["cancel"]) == (410, False), "the new attempt is not affected"


def test_job_of_a_host_cannot_be_marked_as_lost(owner: User, api: Api) -> None:
    job, _ = actions.submit(owner, GOOD)
    assert api(owner).post(f"/api/v1/jobs/{job.id}/give-up").status_code == 409


def test_run_is_hidden_from_other_users(node: Node, stranger: User, staff: User, api: Api) -> None:
    assert api(stranger).get(f"/api/v1/jobs/{node.run}").status_code == 404
    assert api(staff).get(f"/api/v1/jobs/{node.run}").status_code == 200


def test_external_run_is_never_requeued(node: Node, owner: User, api: Api) -> None:
    node.report("exited", "failed")
    answer = api(owner).post(f"/api/v1/jobs/{node.run}/requeue")
    assert answer.status_code == 409
    assert get_job(node).status == Status.FAILED
