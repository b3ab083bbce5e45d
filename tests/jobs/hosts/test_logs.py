"""Read complete logs over REST from a real host worker, or the reason why there is none."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from asgiref.sync import async_to_sync
from django.contrib.auth.models import User
from django.utils import timezone
from rest_framework.test import APIClient

from contracts.codec import encode_log_part
from contracts.logs import VERSION, LogPart
from contracts.names import host_queue, log_key
from contracts.security import prepend_signature
from jobs.core.credentials import derive_signing_keys
from jobs.models import Host, Job, Member
from jobs.runs import logs as log_download
from jobs.runs.logs import NoLogError, locate_log
from tests.jobs.hosts.joined_hosts import Guest, admitted, running_job, worker
from tests.jobs.hosts.test_join import IDENTITIES
from tests.support.host import build_launch_order
from tests.support.processes import wait_until
from tests.workers.host.supervisor.test_log_tail import rank_log
from workers.disk import write_json
from workers.host.attempts import get_attempt_dir

Api = Callable[[User | None], APIClient]


@pytest.fixture
def guest(live_redis: redis.Redis, db: None) -> Guest:
    return admitted("host-a")


def streamed(answer: Any) -> bytes:
    async def all_of() -> bytes:
        return b"".join([part async for part in answer.streaming_content])

    return async_to_sync(all_of)()


def put(live_redis: redis.Redis, host: Host, question: str, **told: Any) -> None:
    """Write a log response as the host does."""
    part = LogPart(v=VERSION, question=question, problem="", data=b"", next=0, size=0, kept=0)
    key = bytes.fromhex(derive_signing_keys(host.name, host.generation)[0])
    live_redis.rpush(log_key(host.name, question), prepend_signature(key, encode_log_part({**part, **told})))  # type: ignore[typeddict-item]


@pytest.mark.django_db(transaction=True)
def test_reads_the_full_log_from_the_host(
    guest: Guest, owner: User, stranger: User, api: Api, live_redis: redis.Redis, tmp_path: Path
) -> None:
    job = running_job(owner, "host-a")
    logs = get_attempt_dir(tmp_path / "state" / "runs", job, 1)
    logs.host_dir.mkdir(parents=True)
    write_json(logs.order_file, build_launch_order(job, slots=[0, 1, 2, 3]))
    said = b"".join(b"%09d\n" % number for number in range(150_000))
    rank_log(logs.logs, 3).write_bytes(said)
    rank_log(logs.logs, 3, "stderr.log").write_bytes(b"a warning\n")
    rank_log(logs.logs, 1).write_bytes(b"only words\n")
    rank_log(logs.logs, 1, "stderr.log").touch()
    rank_log(logs.logs, 2).write_bytes(b"unfinished")
    rank_log(logs.logs, 2, "stderr.log").write_bytes(
        b"".join(b"\r%3d%%" % number for number in range(101)) + b"\nEnd\n"
    )
    with worker(guest, tmp_path):
        answer = api(owner).get(f"/api/v1/jobs/{job}/logs/3")
        assert answer.status_code == 200, answer.content
        assert answer["Content-Type"] == "text/plain; charset=utf-8"
        assert answer["Content-Disposition"] == f'attachment; filename="{job}-1-rank3.log"'
        assert int(answer["Meshboard-Log-Bytes"]) == len(said) + len(b"a warning\n")
        assert streamed(answer) == b"==> stdout <==\n" + said + b"==> stderr <==\na warning\n"
        assert streamed(api(owner).get(f"/api/v1/jobs/{job}/logs/3?file=stderr&attempt=1")) == b"a warning\n"
        assert streamed(api(owner).get(f"/api/v1/jobs/{job}/logs/1")) == b"only words\n"
        shown = streamed(api(owner).get(f"/api/v1/jobs/{job}/logs/2?text=terminal"))
        assert shown == b"==> stdout <==\nunfinished\n==> stderr <==\n100%\nEnd\n"
        assert b" 99%\r100%\nEnd\n" in streamed(api(owner).get(f"/api/v1/jobs/{job}/logs/2"))
        assert streamed(api(owner).get(f"/api/v1/jobs/{job}/logs/3?file=stdout&text=terminal")) == said
        refused = api(owner).get(f"/api/v1/jobs/{job}/logs/2?follow=1&text=terminal")
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "text")
        missing = api(owner).get(f"/api/v1/jobs/{job}/logs/-1")
        assert (missing.status_code, missing.json()["errors"][0]["message"]) == (
            404,
            "Host host-a reports: This host has no readable launcher log of this attempt.",
        )
    assert [key for key in live_redis.scan_iter() if b":log:" in key] == []
    assert api(stranger).get(f"/api/v1/jobs/{job}/logs/3").status_code == 404


@pytest.mark.django_db(transaction=True)
def test_host_ignores_expired_log_requests(
    guest: Guest, owner: User, api: Api, live_redis: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_download, "HOST_TIMEOUT_S", 0.2)
    job = running_job(owner, "host-a")
    answer = api(owner).get(f"/api/v1/jobs/{job}/logs/0")
    assert (answer.status_code, answer.json()["errors"][0]["message"]) == (
        503,
        "Host host-a has the log, but did not answer within 0.2 s.",
    )
    assert answer["Retry-After"]
    assert live_redis.llen(host_queue("host-a")) == 1
    with worker(guest, tmp_path):
        wait_until(lambda: live_redis.llen(host_queue("host-a")) == 0, "the host took the order")
        wait_until(lambda: not live_redis.exists("meshboard:host:host-a:unacked"), "and is done with it")
    assert [key for key in live_redis.scan_iter() if b":log:" in key] == []


@pytest.mark.parametrize(
    ("change", "rank", "status", "words"),
    [
        ({"engine": "elsewhere"}, "0", 409, "The job runs outside Meshboard, on host-a."),
        ({"engine": "slurm"}, "0", 409, "The full log of this job is in the shared folder of the slurm cluster"),
        ({"removed": True}, "0", 409, "The log is on host host-a, which was removed from the board."),
        ({"silent": True}, "0", 503, "The log is on host host-a, which has had no contact for 90 s."),
        ({"queued": True}, "0", 409, "The job has not started, so it has no log."),
        ({}, "4", 404, "Rank 4 does not exist. This attempt has ranks 0 to 3 and the launcher, -1."),
        ({}, "-2", 404, "Rank -2 does not exist. This attempt has ranks 0 to 3"),
        ({}, "..%2f..%2fetc%2fpasswd", 404, ""),
        ({}, "stdout.log", 404, "The job has no rank 'stdout.log'."),
        ({}, "0?attempt=2", 404, "The job has no attempt 2."),
        ({}, "0?attempt=x", 400, "`attempt` is 'x'. Use a whole number from 1 to 2147483647."),
        ({}, "0?file=/etc/passwd", 400, "Use one of stdout, stderr."),
    ],
)
def test_reports_why_a_log_is_unavailable(
    guest: Guest, owner: User, api: Api, change: dict[str, Any], rank: str, status: int, words: str
) -> None:
    job = running_job(owner, "host-a")
    if "engine" in change:
        Job.objects.update(engine=change["engine"])
    if "removed" in change:
        Host.objects.update(removed=timezone.now())
    if "silent" in change:
        Host.objects.update(last_seen=timezone.now() - timedelta(seconds=90))
    if "queued" in change:
        Member.objects.all().delete()
    answer = api(owner).get(f"/api/v1/jobs/{job}/logs/{rank}")
    assert answer.status_code == status
    assert words in answer.json()["errors"][0]["message"]


def test_rejects_log_responses_of_other_hosts(
    guest: Guest, owner: User, live_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda _: "1" * 32)
    host = Host.objects.get()
    place = log_download.LogLocation(running_job(owner, "host-a"), 1, host, 0, ("stdout",))
    forged = encode_log_part(LogPart(v=VERSION, question="1" * 32, problem="", data=b"forged", next=6, size=6, kept=6))
    live_redis.rpush(log_key("host-a", "1" * 32), prepend_signature(b"another", forged), b"short")
    put(live_redis, host, "1" * 32, data=b"true", next=4, size=4, kept=4)
    assert log_download.request_log_part(place, "stdout", 0)["data"] == b"true"


def test_log_ends_with_an_error_if_its_host_is_silent(
    guest: Guest, owner: User, api: Api, live_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_download, "HOST_TIMEOUT_S", 0.2)
    monkeypatch.setattr(secrets, "token_hex", lambda _: "1" * 32)
    job = running_job(owner, "host-a")
    put(live_redis, Host.objects.get(), "1" * 32, data=b"the start\n", next=10, size=1000, kept=1000)
    answer = api(owner).get(f"/api/v1/jobs/{job}/logs/0?file=stdout")
    assert answer.status_code == 200
    told = b""

    async def read() -> None:
        nonlocal told
        async for part in answer.streaming_content:  # type: ignore[attr-defined]
            told += part

    with pytest.raises(Exception, match="did not answer"):
        async_to_sync(read)()
    reason = b"Host host-a has the log, but did not answer within 0.2 s."
    assert told == b"the start\n\n[The rest of the log could not be read: " + reason + b"]\n"


def test_limits_buffered_log_parts(owner: User, guest: Guest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_download, "START_SLOT_TIMEOUT_S", 0.05)
    place = log_download.LogLocation(running_job(owner, "host-a"), 1, Host.objects.get(), 0, ("stdout",))
    for _ in range(log_download.MAX_CONCURRENT_PARTS):
        log_download._slots.acquire()
    try:
        with pytest.raises(log_download.TooManyDownloadsError, match="already has 8 log downloads in progress"):
            log_download.start_download(place, ("stdout",), owner.pk)
    finally:
        for _ in range(log_download.MAX_CONCURRENT_PARTS):
            log_download._slots.release()


@pytest.mark.django_db(transaction=True)
def test_limits_waits_for_logs_of_a_silent_host(
    owner: User, stranger: User, api: Api, guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, all threads of the server could wait for that host."""
    answered = threading.Event()

    def silent(*_: Any) -> LogPart:
        assert answered.wait(30)
        raise NoLogError(503, "it did not answer")

    monkeypatch.setattr(log_download, "request_log_part", silent)
    path = f"/api/v1/jobs/{running_job(owner, 'host-a')}/logs/0"
    with ThreadPoolExecutor(log_download.MAX_STARTS_PER_USER) as threads:
        waiting = [threads.submit(api(owner).get, path) for _ in range(log_download.MAX_STARTS_PER_USER)]
        try:
            wait_until(
                lambda: log_download._beginning[owner.pk] == log_download.MAX_STARTS_PER_USER, "all of them wait"
            )
            refused = api(owner).get(path)
        finally:
            answered.set()
        assert [one.result().status_code for one in waiting] == [503] * len(waiting)
    words = "You already have 4 log downloads in progress, the maximum. Try again later."
    assert (refused.status_code, refused.json()["errors"][0]["message"]) == (503, words)
    assert int(refused["Retry-After"]) > 0
    assert not log_download._beginning, "answered requests are removed"


def test_log_request_goes_to_the_host_of_the_rank(owner: User, guest: Guest) -> None:
    other = admitted("host-b", IDENTITIES[1])
    attempt = Job.objects.get(pk=running_job(owner, "host-a")).attempts.get()
    Member.objects.update(num_ranks=2)
    told = {"host": Host.objects.get(name=other.name), "host_name": other.name, "ordered": timezone.now()}
    Member.objects.create(attempt=attempt, node=1, first_rank=2, num_ranks=2, **told)
    places = {rank: locate_log(attempt, rank) for rank in (0, 1, 2, 3, -1, -2)}
    assert [place.host.name for place in places.values()] == ["host-a"] * 2 + ["host-b"] * 2 + ["host-a", "host-b"]
    assert [place.rank for place in places.values()] == [0, 1, 2, 3, -1, -1]
    assert places[-2].files == ("launcher",)
