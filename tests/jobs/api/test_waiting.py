"""Waiting for a job and following it, on the server as it is deployed."""

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
from tests.jobs.api.following import (
    PATIENCE_S,
    asking,
    followed,
    have_come,
    is_a,
    lines,
    move,
    put,
    step,
    threads,
    until,
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


def test_a_wait_ends_when_the_job_has_come_into_the_state(postgres_site: Site, job: str) -> None:
    async def wait() -> list[dict[str, Any]]:
        async with asking(postgres_site) as client:
            names = ("started", "running", "failed", "finished")
            asked = [
                asyncio.create_task(client.get(f"/api/v1/jobs/{job}/wait?for={name}&timeout=30")) for name in names
            ]
            done, _ = await asyncio.wait(asked, timeout=1.5)
            assert not done, "nothing happened yet"
            await asyncio.to_thread(move, postgres_site, job, "starting")
            first = (await asked[0]).json()
            assert not any(task.done() for task in asked[1:])
            await asyncio.to_thread(move, postgres_site, job, "running", "succeeded")
            return [first, *[(await task).json() for task in asked[1:]]]

    started, running, failed, finished = asyncio.run(wait())
    assert (started["reached"], started["job"]["status"]) == (True, "starting")
    assert (running["reached"], running["job"]["status"]) == (True, "succeeded"), "it was, for less than a look"
    assert (failed["reached"], failed["job"]["finished"]) == (False, True), "it no longer can"
    assert (finished["reached"], finished["job"]["status"]) == (True, "succeeded")


def test_a_wait_answers_when_its_time_is_up_or_it_makes_no_sense(postgres_site: Site, job: str) -> None:
    headers = postgres_site.build_token_header("owner")
    for query in ("?timeout=0", "?timeout=1"):
        told = postgres_site.call("GET", f"/api/v1/jobs/{job}/wait{query}", headers=headers)
        assert (told.status, told.json()["reached"], told.json()["job"]["status"]) == (200, False, "queued")
    for query, field in (("for=done", "for"), ("timeout=301", "timeout"), ("timeout=-1", "timeout"), ("x=1", "x")):
        wrong = postgres_site.call("GET", f"/api/v1/jobs/{job}/wait?{query}", headers=headers)
        assert (wrong.status, wrong.json()["errors"][0]["field"]) == (400, field)
    for path in ("wait", "events"):
        for given, status in (({}, 401), (postgres_site.build_token_header("stranger"), 404)):
            assert postgres_site.call("GET", f"/api/v1/jobs/{job}/{path}", headers=given).status == status


def test_two_hundred_wait_beside_fewer_threads_one_more_is_429_until_one_leaves(postgres_site: Site) -> None:
    job = postgres_site.submit_job(GOOD)
    address = f"/api/v1/jobs/{job}/wait?timeout=60"

    async def wait() -> tuple[Any, Any, Any, set[int]]:
        async with asking(postgres_site) as client, asking(postgres_site, "staff") as other:
            asked = [asyncio.create_task(client.get(address)) for _ in range(200)]
            await asyncio.to_thread(have_come, postgres_site, 200)
            asked.append(asyncio.create_task(client.get(address)))
            (refused, *more), held = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            assert not more
            of_another = await other.get(f"/api/v1/jobs/{job}/wait?timeout=1")
            assert threads(postgres_site) < limits.MAX_REQUEST_THREADS + 40 < 200
            assert not any(task.done() for task in held)
            held.pop().cancel()
            async with asyncio.timeout(PATIENCE_S):
                while (after := await client.get(f"/api/v1/jobs/{job}/wait?timeout=1")).status_code == 429:
                    pass
            await asyncio.to_thread(move, postgres_site, job, "starting", "running", "succeeded")
            return refused.result(), of_another, after, {(await task).status_code for task in held}

    refused, of_another, after, codes = asyncio.run(wait())
    assert codes == {200}
    assert (of_another.status_code, after.status_code) == (200, 200)
    assert (refused.status_code, refused.headers["Content-Type"]) == (429, "application/problem+json")
    assert int(refused.headers["Retry-After"]) > 0
    assert (
        refused.json()["errors"][0]["message"] == "You already have 200 waiting requests, the maximum. Try again later."
    )


def test_events_tell_what_happened_then_what_happens_until_the_end(postgres_site: Site, job: str) -> None:
    site = postgres_site
    move(site, job, "starting", "running")
    put(site, job, lines(0, "hello"), step(1, None), step(1, 4.0, rank=1))

    async def follow() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        async with followed(site, f"/api/v1/jobs/{job}/events") as events:
            first = await until(events, is_a("step"))
            nan = {**step(3, None, rank=1), "not_finite": "loss is nan"}
            await asyncio.to_thread(put, site, job, step(2, 3.5), step(3, None), nan, lines(1, "bye"), number=1)
            await asyncio.to_thread(move, site, job, "succeeded")
            rest = await until(events, is_a("end"))
        after = next(event["id"] for event in reversed(first) if "id" in event)
        async with followed(site, f"/api/v1/jobs/{job}/events", after) as events:
            return first + rest, await until(events, is_a("end"))

    everything, resumed = asyncio.run(follow())
    states = [event["data"]["status"] for event in everything if event["event"] == "state"]
    assert states == ["queued", "starting", "running", "succeeded"]
    assert [event["data"]["lines"] for event in everything if event["event"] == "log"] == [["hello"], ["bye"]]
    steps = [(event["data"]["step"], event["data"]["loss"]) for event in everything if event["event"] == "step"]
    assert steps == [(1, 4.0), (2, 3.5), (3, None)], "one of each, of a rank that knows the loss"
    assert [event["data"]["step"] for event in everything if "not_finite" in event.get("data", {})] == [3]
    assert everything[-1]["data"] == {"status": "succeeded", "attempt": 1}
    again = [(e["event"], e["data"]) for e in resumed if e["event"] != "verdict"]
    known = [(e["event"], e["data"]) for e in everything if e["event"] != "verdict"]
    assert sorted(map(str, again)) == sorted(map(str, known[-len(again) :])), "what came after, once, and no more"
    assert len(again) == 5, "steps 2 and 3, their line, succeeded, end"


def test_who_was_cut_off_anywhere_among_what_had_happened_is_told_the_rest(postgres_site: Site, job: str) -> None:
    site, address = postgres_site, f"/api/v1/jobs/{job}/events"
    move(site, job, "starting", "running", "lost", "queued")
    move(site, job, "starting", "running", "cancelling", "cancelled", attempt=2)

    async def follow(after: str | None = None) -> list[dict[str, Any]]:
        async with followed(site, address, after) as events:
            return await until(events, is_a("end"))

    async def cut_off_behind_each(whole: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        return await asyncio.gather(*(follow(event["id"]) for event in whole))

    whole = asyncio.run(follow())
    assert [event["event"] for event in whole] == ["state"] * 9 + ["end"]
    rests = asyncio.run(cut_off_behind_each(whole[:-1]))
    assert rests == [whole[at + 1 :] for at in range(9)]


def test_who_follows_it_live_is_told_each_second_what_every_axis_sends(postgres_site: Site, job: str) -> None:
    """From the stream itself: there is no recorder here. What a counter held before it was heard of is no rate."""
    site = postgres_site
    move(site, job, "starting", "running")
    put(site, job, lines(0, "hello"), traffic(0, tp=1000, dp=7), traffic(1, tp=50))
    put(site, job, traffic(0, tp=1200), traffic(1, tp=40), step(1), number=1)

    async def follow() -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
        async with followed(site, f"/api/v1/jobs/{job}/events?live=30") as events:
            first = await until(events, sends)
            await asyncio.to_thread(put, site, job, traffic(1, tp=90, dp=5), traffic(0, dp=9), number=2)
            second = await until(events, sends)
            quiet = await until(events, is_a("traffic"))
            await asyncio.to_thread(move, site, job, "succeeded")
            return first, second, quiet + await until(events, is_a("end"))

    first, second, rest = asyncio.run(follow())
    assert {event["event"] for event in (*first, *second, *rest)} - {"verdict"} == {"state", "step", "traffic", "end"}
    assert told_bytes(first) == {"tp": 200}, "200 more on rank 0; an older word of rank 1 takes nothing back"
    assert told_bytes(second) == {"tp": 40, "dp": 2}
    assert told_bytes(rest) == {}
    seconds = [one["second"] for event in (*first, *second) if sends(event) for one in event["data"]["sent"]]
    assert all(abs(second - time.time()) < 2 * PATIENCE_S for second in seconds)
    for wrong in ("0", "61", "x"):
        answer = site.call("GET", f"/api/v1/jobs/{job}/events?live={wrong}", headers=site.build_token_header("owner"))
        assert (answer.status, answer.json()["errors"][0]["field"]) == (400, "live")


def traffic(rank: int, **sent: int) -> dict[str, Any]:
    """Payload bytes of a rank so far, by axis."""
    counts = {"count": 1, "completed": 1, "algorithmic_bytes": 0, "busy_s": 0.0}
    cell = {"phase": "step", "op": "all_reduce", "group_size": 2, **counts}
    cells = [{**cell, "axis": axis, "payload_bytes": num_bytes} for axis, num_bytes in sent.items()]
    return {"kind": "traffic", "rank": rank, "time": 1.0, "cells": cells, "dropped": 0}


def sends(event: dict[str, Any]) -> bool:
    return bool(event["event"] == "traffic" and event["data"]["sent"])


def told_bytes(events: list[dict[str, Any]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in (one for event in events if event["event"] == "traffic" for one in event["data"]["sent"]):
        found[one["axis"]] = found.get(one["axis"], 0) + one["bytes"]
    return found


def test_an_id_that_is_none_is_400(postgres_site: Site, job: str) -> None:
    for text in ("x", "1.1.1", "1.1.1.0:99999999999999999999-0", "-1.0.0.", "1.1.1.a"):
        headers = {**postgres_site.build_token_header("owner"), "Last-Event-ID": text}
        answer = postgres_site.call("GET", f"/api/v1/jobs/{job}/events", headers=headers)
        (error,) = answer.json()["errors"]
        assert (answer.status, error["field"], error["in"]) == (400, "Last-Event-ID", "header")


def test_one_log_is_followed_line_by_line(postgres_site: Site, job: str) -> None:
    site = postgres_site
    address = f"/api/v1/jobs/{job}/logs/1?follow=1"
    assert site.call("GET", address, headers=site.build_token_header("owner")).status == 409, "nothing has logged yet"
    move(site, job, "starting", "running")
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
    put(site, job, lines(0, "of rank 0"), lines(0, "of rank 1", rank=1), step(1))
    assert site.call("GET", address.replace("/1?", "/7?"), headers=site.build_token_header("owner")).status == 404

    async def follow() -> list[dict[str, Any]]:
        async with followed(site, address) as events:
            first = await until(events, is_a("log"))
            await asyncio.to_thread(put, site, job, lines(1, "more", rank=1), lines(1, "not mine"), number=1)
            return first + await until(events, is_a("log"))

    told = asyncio.run(follow())
    assert [(event["event"], event["data"]["lines"]) for event in told] == [("log", ["of rank 1"]), ("log", ["more"])]


def test_what_was_trimmed_is_told_as_a_gap(postgres_site: Site, job: str) -> None:
    move(postgres_site, job, "starting", "running")
    put(postgres_site, job, lines(500, "late"), number=40)

    async def follow() -> list[dict[str, Any]]:
        async with followed(postgres_site, f"/api/v1/jobs/{job}/events") as events:
            return await until(events, is_a("log"))

    told = [event["event"] for event in asyncio.run(follow())]
    assert told[-2:] == ["gap", "log"]


def test_a_deleted_job_ends_the_wait_and_the_events(postgres_site: Site) -> None:
    job = postgres_site.submit_job(GOOD)

    async def both() -> tuple[int, dict[str, Any]]:
        async with asking(postgres_site) as client, followed(postgres_site, f"/api/v1/jobs/{job}/events") as events:
            waiting = asyncio.create_task(client.get(f"/api/v1/jobs/{job}/wait?timeout=60"))
            await until(events, is_a("state"))
            await asyncio.to_thread(_delete, postgres_site, job)
            told = await until(events, is_a("error"))
            return (await waiting).status_code, told[-1]["data"]

    code, error = asyncio.run(both())
    assert (code, error["status"]) == (404, 404)


def _delete(site: Site, job: str) -> None:
    with psycopg.connect(site.database_url, autocommit=True) as database:
        database.execute("DELETE FROM jobs_statechange WHERE job_id = %s", (job,))
        database.execute("DELETE FROM jobs_job WHERE id = %s", (job,))


@pytest.mark.django_db(transaction=True)
def test_a_revoked_token_ends_the_wait_and_the_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the layer itself, which asks again after 10 s where it is deployed."""
    monkeypatch.setattr(held_request_middleware, "RECHECK_S", 0.2)
    owner = User.objects.create_user("owner")
    made, _ = actions.submit(owner, GOOD)
    revoked, token = AuthToken.objects.create(owner)
    board = held_request_middleware.HeldRequestMiddleware(get_asgi_application())
    headers = [(b"host", b"localhost"), (b"authorization", f"Token {token}".encode())]

    async def ask(what: str, told: asyncio.Queue[Any]) -> None:
        scope = {"type": "http", "method": "GET", "headers": headers, "path": f"/api/v1/jobs/{made.id}/{what}"}
        pending = [{"type": "http.request", "body": b""}]

        async def receive() -> Any:
            return pending.pop() if pending else await asyncio.Event().wait()

        await board({**scope, "query_string": b"", "asgi": {"version": "3.0"}}, receive, told.put)

    async def both() -> tuple[Any, bytes]:
        waited: asyncio.Queue[Any] = asyncio.Queue()
        events: asyncio.Queue[Any] = asyncio.Queue()
        asking = [asyncio.create_task(ask("wait", waited)), asyncio.create_task(ask("events", events))]
        async with asyncio.timeout(PATIENCE_S):
            while b"event: state" not in (await events.get()).get("body", b""):
                pass
            await database_sync_to_async(revoked.delete)()
            await asyncio.gather(*asking)
        text = b""
        while not events.empty():
            text += events.get_nowait()["body"]
        return await waited.get(), text

    start, text = asyncio.run(both())
    assert start["status"] == 401
    assert b'event: error\ndata: {"type":"/docs/errors/#not-logged-in"' in text


def test_states_come_and_waits_end_while_redis_does_not_answer(postgres_site: Site, job: str) -> None:
    site = postgres_site
    redis, redis_again = site.redis.client(), Redis.from_url(site.redis.url, socket_timeout=PATIENCE_S)

    async def both() -> tuple[dict[str, Any], list[dict[str, Any]], float]:
        async with asking(site) as client, followed(site, f"/api/v1/jobs/{job}/events") as events:
            waiting = asyncio.create_task(client.get(f"/api/v1/jobs/{job}/wait?for=running&timeout=30"))
            await until(events, is_a("state"))
            await asyncio.to_thread(redis.execute_command, "CLIENT", "PAUSE", "5000", "ALL")
            began = time.monotonic()
            await asyncio.to_thread(move, site, job, "starting", "running")
            told = await until(events, lambda event: event.get("data", {}).get("status") == "running")
            return (await waiting).json(), told, time.monotonic() - began

    try:
        waited, told, took_s = asyncio.run(both())
    finally:
        redis_again.ping()
    assert took_s < 5, "it was still away"
    assert waited["reached"] is True
    assert [event["data"]["status"] for event in told] == ["starting", "running"]


def test_who_follows_while_the_database_fails_is_told_the_rest_and_the_end(postgres_site: Site, job: str) -> None:
    """Once it was told that the job is still here, for ever."""

    async def told() -> list[dict[str, Any]]:
        async with followed(postgres_site, f"/api/v1/jobs/{job}/events") as events:
            await until(events, is_a("state"))
            await asyncio.to_thread(_cut_off_who_looks, postgres_site, job)
            await asyncio.to_thread(move, postgres_site, job, "succeeded")
            return await until(events, is_a("end"))

    found = asyncio.run(told())
    assert [event["data"]["status"] for event in found if event.get("event") == "state"] == ["running", "succeeded"]


def _cut_off_who_looks(site: Site, job: str) -> None:
    """At what happened to a job, by ending its connection."""
    looks = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%%jobs_statechange%%'"
    with psycopg.connect(site.database_url) as holder, psycopg.connect(site.database_url, autocommit=True) as other:
        holder.execute("LOCK TABLE jobs_statechange")
        holder.execute(
            "INSERT INTO jobs_statechange (job_id, attempt, status, reason, at) VALUES (%s, 1, 'running', '', now())",
            (job,),
        )
        other.execute("UPDATE jobs_job SET status = 'running' WHERE id = %s", (job,))
        found = wait_until(lambda: other.execute(looks).fetchone(), "what happened to the job is looked at")
        assert found is not None
        other.execute("SELECT pg_terminate_backend(%s)", found)


def test_a_slow_reader_misses_nothing_and_costs_no_memory(postgres_site: Site, job: str) -> None:
    """What it does not read yet stays in Redis."""
    site, count = postgres_site, 80
    move(site, job, "starting", "running")
    filler = "x" * 2000
    for number in range(count):
        put(site, job, lines(100 * number, *[filler] * 100), number=number)
    before = largest = site.memory_bytes
    token = site.build_token_header("owner")["Authorization"]
    head = f"GET /api/v1/jobs/{job}/events HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: {token}"
    found = b""
    with socket.create_connection(("127.0.0.1", site.port), timeout=PATIENCE_S) as line:
        line.sendall(f"{head}\r\n\r\n".encode())
        for _ in range(10):  # in which the server could read ahead
            site.call("GET", f"/api/v1/jobs/{job}", headers=site.build_token_header("owner"))
            largest = max(largest, site.memory_bytes)
        while found.count(b"event: log") < count:
            largest = max(largest, site.memory_bytes)
            part = line.recv(64 * 2**10)
            assert part, found[-1000:]
            found += part
    site.redis.client().delete(telemetry_stream(job, 1))
    assert len(found) > (count - 1) * 200_000
    firsts = [int(number) for number in re.findall(rb'"first":([0-9]+)', found)]
    assert firsts == [100 * number for number in range(count)]
    assert largest - before < 8 * 2**20, "of 16 MB"
