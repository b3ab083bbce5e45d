"""Waiting for a job and following its events, with the deployed server."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from channels.db import database_sync_to_async
from django.contrib.auth.models import User
from django.core.asgi import get_asgi_application
from knox.models import AuthToken
from redis import Redis

from contracts.names import telemetry_stream
from jobs.api import held_request_middleware
from jobs.queue import actions
from tests.jobs.api.job_events import (
    PATIENCE_S,
    collect_until,
    count_threads,
    follow_events,
    has_type,
    make_log_item,
    make_step_item,
    open_client,
    send_items,
    set_statuses,
    wait_for_connections,
)
from tests.planner.wrong_specs import GOOD
from tests.support.processes import wait_until
from tests.support.web import Site
from webapp.serving import limits


@pytest.fixture
def job(postgres_site: Site) -> Iterator[str]:
    made = postgres_site.submit_job(GOOD)
    yield made
    postgres_site.call("POST", f"/api/v1/jobs/{made}/cancel", headers=postgres_site.build_token_header("owner"))


def test_wait_ends_when_the_job_reaches_the_state(postgres_site: Site, job: str) -> None:
    async def wait() -> list[dict[str, Any]]:
        async with open_client(postgres_site) as client:
            names = ("started", "running", "failed", "finished")
            tasks = [
                asyncio.create_task(client.get(f"/api/v1/jobs/{job}/wait?for={name}&timeout=30")) for name in names
            ]
            done, _ = await asyncio.wait(tasks, timeout=1.5)
            assert not done, "no wait ends before a change"
            await asyncio.to_thread(set_statuses, postgres_site, job, "starting")
            first = (await tasks[0]).json()
            assert not any(task.done() for task in tasks[1:])
            await asyncio.to_thread(set_statuses, postgres_site, job, "running", "succeeded")
            return [first, *[(await task).json() for task in tasks[1:]]]

    started, running, failed, finished = asyncio.run(wait())
    assert (started["reached"], started["job"]["status"]) == (True, "starting")
    assert (running["reached"], running["job"]["status"]) == (True, "succeeded"), "the job was running for a short time"
    assert (failed["reached"], failed["job"]["finished"]) == (False, True), "a job that succeeded can no longer fail"
    assert (finished["reached"], finished["job"]["status"]) == (True, "succeeded")


def test_wait_ends_at_timeout_or_invalid_parameters(postgres_site: Site, job: str) -> None:
    headers = postgres_site.build_token_header("owner")
    for query in ("?timeout=0", "?timeout=1"):
        response = postgres_site.call("GET", f"/api/v1/jobs/{job}/wait{query}", headers=headers)
        assert (response.status, response.json()["reached"], response.json()["job"]["status"]) == (200, False, "queued")
    for query, field in (("for=done", "for"), ("timeout=301", "timeout"), ("timeout=-1", "timeout"), ("x=1", "x")):
        wrong = postgres_site.call("GET", f"/api/v1/jobs/{job}/wait?{query}", headers=headers)
        assert (wrong.status, wrong.json()["errors"][0]["field"]) == (400, field)
    for path in ("wait", "events"):
        for headers_of_user, status in (({}, 401), (postgres_site.build_token_header("stranger"), 404)):
            assert postgres_site.call("GET", f"/api/v1/jobs/{job}/{path}", headers=headers_of_user).status == status


def test_limits_waiting_requests_without_threads(postgres_site: Site) -> None:
    job = postgres_site.submit_job(GOOD)
    address = f"/api/v1/jobs/{job}/wait?timeout=60"

    async def wait() -> tuple[Any, Any, Any, set[int]]:
        async with open_client(postgres_site) as client, open_client(postgres_site, "staff") as other:
            tasks = [asyncio.create_task(client.get(address)) for _ in range(200)]
            await asyncio.to_thread(wait_for_connections, postgres_site, 200)
            tasks.append(asyncio.create_task(client.get(address)))
            (refused, *more), held = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            assert not more
            response_of_other_user = await other.get(f"/api/v1/jobs/{job}/wait?timeout=1")
            assert count_threads(postgres_site) < limits.MAX_REQUEST_THREADS + 40 < 200
            assert not any(task.done() for task in held)
            held.pop().cancel()
            async with asyncio.timeout(PATIENCE_S):
                while (after := await client.get(f"/api/v1/jobs/{job}/wait?timeout=1")).status_code == 429:
                    pass
            await asyncio.to_thread(set_statuses, postgres_site, job, "starting", "running", "succeeded")
            return refused.result(), response_of_other_user, after, {(await task).status_code for task in held}

    refused, response_of_other_user, after, codes = asyncio.run(wait())
    assert codes == {200}
    assert (response_of_other_user.status_code, after.status_code) == (200, 200)
    assert (refused.status_code, refused.headers["Content-Type"]) == (429, "application/problem+json")
    assert int(refused.headers["Retry-After"]) > 0
    assert (
        refused.json()["errors"][0]["message"] == "You already have 200 waiting requests, the maximum. Try again later."
    )


def test_events_have_history_and_live_changes(postgres_site: Site, job: str) -> None:
    site = postgres_site
    set_statuses(site, job, "starting", "running")
    send_items(site, job, make_log_item(0, "hello"), make_step_item(1, None), make_step_item(1, 4.0, rank=1))

    async def follow() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        async with follow_events(site, f"/api/v1/jobs/{job}/events") as events:
            first = await collect_until(events, has_type("step"))
            nan = {**make_step_item(3, None, rank=1), "not_finite": "loss is nan"}
            await asyncio.to_thread(
                send_items,
                site,
                job,
                make_step_item(2, 3.5),
                make_step_item(3, None),
                nan,
                make_log_item(1, "bye"),
                number=1,
            )
            await asyncio.to_thread(set_statuses, site, job, "succeeded")
            rest = await collect_until(events, has_type("end"))
        after = next(event["id"] for event in reversed(first) if "id" in event)
        async with follow_events(site, f"/api/v1/jobs/{job}/events", after) as events:
            return first + rest, await collect_until(events, has_type("end"))

    everything, resumed = asyncio.run(follow())
    states = [event["data"]["status"] for event in everything if event["event"] == "state"]
    assert states == ["queued", "starting", "running", "succeeded"]
    assert [event["data"]["lines"] for event in everything if event["event"] == "log"] == [["hello"], ["bye"]]
    steps = [(event["data"]["step"], event["data"]["loss"]) for event in everything if event["event"] == "step"]
    assert steps == [(1, 4.0), (2, 3.5), (3, None)], "one event per step, with the loss if a rank reports it"
    assert [event["data"]["step"] for event in everything if "not_finite" in event.get("data", {})] == [3]
    assert everything[-1]["data"] == {"status": "succeeded", "attempt": 1}
    again = [(e["event"], e["data"]) for e in resumed if e["event"] != "verdict"]
    known = [(e["event"], e["data"]) for e in everything if e["event"] != "verdict"]
    assert sorted(map(str, again)) == sorted(map(str, known[-len(again) :])), "sends only later events, once each"
    assert len(again) == 5, "steps 2 and 3, their line, succeeded, end"


def test_events_resume_after_any_id(postgres_site: Site, job: str) -> None:
    site, address = postgres_site, f"/api/v1/jobs/{job}/events"
    set_statuses(site, job, "starting", "running", "lost", "queued")
    set_statuses(site, job, "starting", "running", "cancelling", "cancelled", attempt=2)

    async def follow(after: str | None = None) -> list[dict[str, Any]]:
        async with follow_events(site, address, after) as events:
            return await collect_until(events, has_type("end"))

    async def resume_after_each(whole: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        return await asyncio.gather(*(follow(event["id"]) for event in whole))

    whole = asyncio.run(follow())
    assert [event["event"] for event in whole] == ["state"] * 9 + ["end"]
    remainders = asyncio.run(resume_after_each(whole[:-1]))
    assert remainders == [whole[at + 1 :] for at in range(9)]


def test_live_events_have_traffic_per_axis(postgres_site: Site, job: str) -> None:
    """The first value of a counter is not a rate. No recorder runs in this test."""
    site = postgres_site
    set_statuses(site, job, "starting", "running")
    send_items(site, job, make_log_item(0, "hello"), make_traffic_item(0, tp=1000, dp=7), make_traffic_item(1, tp=50))
    send_items(site, job, make_traffic_item(0, tp=1200), make_traffic_item(1, tp=40), make_step_item(1), number=1)

    async def follow() -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
        async with follow_events(site, f"/api/v1/jobs/{job}/events?live=30") as events:
            first = await collect_until(events, has_traffic)
            await asyncio.to_thread(
                send_items, site, job, make_traffic_item(1, tp=90, dp=5), make_traffic_item(0, dp=9), number=2
            )
            second = await collect_until(events, has_traffic)
            quiet = await collect_until(events, has_type("traffic"))
            await asyncio.to_thread(set_statuses, site, job, "succeeded")
            return first, second, quiet + await collect_until(events, has_type("end"))

    first, second, rest = asyncio.run(follow())
    assert {event["event"] for event in (*first, *second, *rest)} - {"verdict"} == {"state", "step", "traffic", "end"}
    assert sum_bytes(first) == {"tp": 200}, "rank 0 sends 200 more bytes, and an older value of rank 1 is ignored"
    assert sum_bytes(second) == {"tp": 40, "dp": 2}
    assert sum_bytes(rest) == {}
    seconds = [one["second"] for event in (*first, *second) if has_traffic(event) for one in event["data"]["sent"]]
    assert all(abs(second - time.time()) < 2 * PATIENCE_S for second in seconds)
    for wrong in ("0", "61", "x"):
        response = site.call("GET", f"/api/v1/jobs/{job}/events?live={wrong}", headers=site.build_token_header("owner"))
        assert (response.status, response.json()["errors"][0]["field"]) == (400, "live")


def make_traffic_item(rank: int, **sent: int) -> dict[str, Any]:
    """Build a traffic item with the total payload bytes of a rank per axis."""
    counts = {"count": 1, "completed": 1, "algorithmic_bytes": 0, "busy_s": 0.0}
    cell = {"phase": "step", "op": "all_reduce", "group_size": 2, **counts}
    cells = [{**cell, "axis": axis, "payload_bytes": num_bytes} for axis, num_bytes in sent.items()]
    return {"kind": "traffic", "rank": rank, "time": 1.0, "cells": cells, "dropped": 0}


def has_traffic(event: dict[str, Any]) -> bool:
    return bool(event["event"] == "traffic" and event["data"]["sent"])


def sum_bytes(events: list[dict[str, Any]]) -> dict[str, int]:
    received: dict[str, int] = {}
    for one in (one for event in events if event["event"] == "traffic" for one in event["data"]["sent"]):
        received[one["axis"]] = received.get(one["axis"], 0) + one["bytes"]
    return received


def test_rejects_invalid_event_ids(postgres_site: Site, job: str) -> None:
    for text in ("x", "1.1.1", "1.1.1.0:99999999999999999999-0", "-1.0.0.", "1.1.1.a"):
        headers = {**postgres_site.build_token_header("owner"), "Last-Event-ID": text}
        response = postgres_site.call("GET", f"/api/v1/jobs/{job}/events", headers=headers)
        (error,) = response.json()["errors"]
        assert (response.status, error["field"], error["in"]) == (400, "Last-Event-ID", "header")


def test_follows_the_log_of_one_rank(postgres_site: Site, job: str) -> None:
    site = postgres_site
    address = f"/api/v1/jobs/{job}/logs/1?follow=1"
    assert site.call("GET", address, headers=site.build_token_header("owner")).status == 409, "the job has no log yet"
    set_statuses(site, job, "starting", "running")
    with psycopg.connect(site.database_url, autocommit=True) as database:
        attempt: Any = database.execute(
            "INSERT INTO jobs_attempt (job_id, number, created, checkpoint, engine_id, engine_told)"
            " VALUES (%s, 1, now(), '', '', '{}') RETURNING id",
            (job,),
        ).fetchone()
        database.execute(
            "INSERT INTO jobs_member (attempt_id, node, host_name, first_rank, num_ranks, ordered, outcome, reason,"
            " missed, note, claim) VALUES (%s, 0, 'h', 0, 4, now(), '', '', 0, '', '')",
            (attempt[0],),
        )
    send_items(site, job, make_log_item(0, "of rank 0"), make_log_item(0, "of rank 1", rank=1), make_step_item(1))
    assert site.call("GET", address.replace("/1?", "/7?"), headers=site.build_token_header("owner")).status == 404

    async def follow() -> list[dict[str, Any]]:
        async with follow_events(site, address) as events:
            first = await collect_until(events, has_type("log"))
            await asyncio.to_thread(
                send_items, site, job, make_log_item(1, "more", rank=1), make_log_item(1, "not mine"), number=1
            )
            return first + await collect_until(events, has_type("log"))

    log_events = asyncio.run(follow())
    assert [(event["event"], event["data"]["lines"]) for event in log_events] == [
        ("log", ["of rank 1"]),
        ("log", ["more"]),
    ]


def test_trimmed_log_lines_are_a_gap(postgres_site: Site, job: str) -> None:
    set_statuses(postgres_site, job, "starting", "running")
    send_items(postgres_site, job, make_log_item(500, "late"), number=40)

    async def follow() -> list[dict[str, Any]]:
        async with follow_events(postgres_site, f"/api/v1/jobs/{job}/events") as events:
            return await collect_until(events, has_type("log"))

    types = [event["event"] for event in asyncio.run(follow())]
    assert types[-2:] == ["gap", "log"]


def test_deletion_ends_waits_and_events(postgres_site: Site) -> None:
    job = postgres_site.submit_job(GOOD)

    async def both() -> tuple[int, dict[str, Any]]:
        async with (
            open_client(postgres_site) as client,
            follow_events(postgres_site, f"/api/v1/jobs/{job}/events") as events,
        ):
            waiting = asyncio.create_task(client.get(f"/api/v1/jobs/{job}/wait?timeout=60"))
            await collect_until(events, has_type("state"))
            await asyncio.to_thread(_delete, postgres_site, job)
            received = await collect_until(events, has_type("error"))
            return (await waiting).status_code, received[-1]["data"]

    code, error = asyncio.run(both())
    assert (code, error["status"]) == (404, 404)


def _delete(site: Site, job: str) -> None:
    with psycopg.connect(site.database_url, autocommit=True) as database:
        database.execute("DELETE FROM jobs_statechange WHERE job_id = %s", (job,))
        database.execute("DELETE FROM jobs_job WHERE id = %s", (job,))


@pytest.mark.django_db(transaction=True)
def test_revoked_token_ends_waits_and_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call the middleware directly with a shorter interval between its checks."""
    monkeypatch.setattr(held_request_middleware, "RECHECK_S", 0.2)
    owner = User.objects.create_user("owner")
    made, _ = actions.submit(owner, GOOD)
    revoked, token = AuthToken.objects.create(owner)
    board = held_request_middleware.HeldRequestMiddleware(get_asgi_application())
    headers = [(b"host", b"localhost"), (b"authorization", f"Token {token}".encode())]

    async def ask(what: str, queue: asyncio.Queue[Any]) -> None:
        scope = {"type": "http", "method": "GET", "headers": headers, "path": f"/api/v1/jobs/{made.id}/{what}"}
        pending = [{"type": "http.request", "body": b""}]

        async def receive() -> Any:
            return pending.pop() if pending else await asyncio.Event().wait()

        await board({**scope, "query_string": b"", "asgi": {"version": "3.0"}}, receive, queue.put)

    async def both() -> tuple[Any, bytes]:
        waited: asyncio.Queue[Any] = asyncio.Queue()
        events: asyncio.Queue[Any] = asyncio.Queue()
        open_client = [asyncio.create_task(ask("wait", waited)), asyncio.create_task(ask("events", events))]
        async with asyncio.timeout(PATIENCE_S):
            while b"event: state" not in (await events.get()).get("body", b""):
                pass
            await database_sync_to_async(revoked.delete)()
            await asyncio.gather(*open_client)
        text = b""
        while not events.empty():
            text += events.get_nowait()["body"]
        return await waited.get(), text

    start, text = asyncio.run(both())
    assert start["status"] == 401
    assert b'event: error\ndata: {"type":"/docs/errors/#not-logged-in"' in text


def test_states_arrive_while_redis_is_paused(postgres_site: Site, job: str) -> None:
    site = postgres_site
    redis, redis_again = site.redis.client(), Redis.from_url(site.redis.url, socket_timeout=PATIENCE_S)

    async def both() -> tuple[dict[str, Any], list[dict[str, Any]], float]:
        async with open_client(site) as client, follow_events(site, f"/api/v1/jobs/{job}/events") as events:
            waiting = asyncio.create_task(client.get(f"/api/v1/jobs/{job}/wait?for=running&timeout=30"))
            await collect_until(events, has_type("state"))
            await asyncio.to_thread(redis.execute_command, "CLIENT", "PAUSE", "5000", "ALL")
            began = time.monotonic()
            await asyncio.to_thread(set_statuses, site, job, "starting", "running")
            received = await collect_until(events, lambda event: event.get("data", {}).get("status") == "running")
            return (await waiting).json(), received, time.monotonic() - began

    try:
        waited, received, took_s = asyncio.run(both())
    finally:
        redis_again.ping()
    assert took_s < 5, "the events arrive while Redis is paused"
    assert waited["reached"] is True
    assert [event["data"]["status"] for event in received] == ["starting", "running"]


def test_events_continue_after_a_database_failure(postgres_site: Site, job: str) -> None:
    """A failed query must not end or freeze the stream."""

    async def follow() -> list[dict[str, Any]]:
        async with follow_events(postgres_site, f"/api/v1/jobs/{job}/events") as events:
            await collect_until(events, has_type("state"))
            await asyncio.to_thread(_end_reading_connection, postgres_site, job)
            await asyncio.to_thread(set_statuses, postgres_site, job, "succeeded")
            return await collect_until(events, has_type("end"))

    received = asyncio.run(follow())
    assert [event["data"]["status"] for event in received if event.get("event") == "state"] == ["running", "succeeded"]


def _end_reading_connection(site: Site, job: str) -> None:
    """End the database connection that reads the state changes of a job."""
    query = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%%jobs_statechange%%'"
    with psycopg.connect(site.database_url) as holder, psycopg.connect(site.database_url, autocommit=True) as other:
        holder.execute("LOCK TABLE jobs_statechange")
        holder.execute(
            "INSERT INTO jobs_statechange (job_id, attempt, status, reason, at) VALUES (%s, 1, 'running', '', now())",
            (job,),
        )
        other.execute("UPDATE jobs_job SET status = 'running' WHERE id = %s", (job,))
        received = wait_until(lambda: other.execute(query).fetchone(), "the server waits for the state changes")
        assert received is not None
        other.execute("SELECT pg_terminate_backend(%s)", received)


def test_slow_reader_gets_all_events_without_buffering(postgres_site: Site, job: str) -> None:
    """Events that the client has not read yet stay in Redis."""
    site, count = postgres_site, 80
    set_statuses(site, job, "starting", "running")
    filler = "x" * 2000
    for number in range(count):
        send_items(site, job, make_log_item(100 * number, *[filler] * 100), number=number)
    before = largest = site.memory_bytes
    token = site.build_token_header("owner")["Authorization"]
    head = f"GET /api/v1/jobs/{job}/events HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: {token}"
    received = b""
    with socket.create_connection(("127.0.0.1", site.port), timeout=PATIENCE_S) as line:
        line.sendall(f"{head}\r\n\r\n".encode())
        for _ in range(10):  # The server could read ahead during these requests.
            site.call("GET", f"/api/v1/jobs/{job}", headers=site.build_token_header("owner"))
            largest = max(largest, site.memory_bytes)
        while received.count(b"event: log") < count:
            largest = max(largest, site.memory_bytes)
            part = line.recv(64 * 2**10)
            assert part, received[-1000:]
            received += part
    site.redis.client().delete(telemetry_stream(job, 1))
    assert len(received) > (count - 1) * 200_000
    firsts = [int(number) for number in re.findall(rb'"first":([0-9]+)', received)]
    assert firsts == [100 * number for number in range(count)]
    assert largest - before < 8 * 2**20, "the log has 16 MB"
