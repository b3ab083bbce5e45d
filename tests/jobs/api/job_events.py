"""Helpers that change a job on a server, send its telemetry, and follow its events over REST."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgpack
import psutil
import psycopg

from contracts.names import telemetry_stream
from tests.support.processes import scale_timeout, wait_until
from tests.support.web import Site

PATIENCE_S = scale_timeout(30)
Event = dict[str, Any]  # Keys: "event", "data", and for some events "id".


def set_statuses(site: Site, job: str, *statuses: str, attempt: int = 1) -> None:
    """Set the status of a job several times, as the controller does."""
    with psycopg.connect(site.database_url, autocommit=True) as database:
        for status in statuses:
            database.execute("UPDATE jobs_job SET status = %s, attempt = %s WHERE id = %s", (status, attempt, job))
            database.execute(
                "INSERT INTO jobs_statechange (job_id, attempt, status, reason, at) VALUES (%s, %s, %s, %s, now())",
                (job, attempt, status, f"status {status}"),
            )


def send_items(site: Site, job: str, *items: dict[str, Any], number: int = 0) -> str:
    batch = {"v": 1, "job": job, "attempt": 1, "time": 0.0, "items": list(items)}
    entry: Any = site.redis.client().xadd(telemetry_stream(job, 1), {"b": msgpack.packb(batch), "n": number})
    return str(entry.decode())


def make_log_item(first: int, *words: str, rank: int = 0) -> dict[str, Any]:
    return {"kind": "log", "rank": rank, "time": 1.0, "first": first, "lines": list(words)}


def make_step_item(number: int, loss: float | None = 4.0, rank: int = 0) -> dict[str, Any]:
    item = {"kind": "step", "rank": rank, "time": 1.0, "step": number, "ran": number, "steps": 50, "step_s": 0.1}
    return {**item, "tokens": 8, "loss": loss, "grad_norm": 1.0, "learning_rate": 0.1, "cells": []}


@contextlib.asynccontextmanager
async def open_client(site: Site, who: str = "owner", **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    all_headers = {**site.build_token_header(who), **headers}
    async with httpx.AsyncClient(base_url=site.url, headers=all_headers, timeout=PATIENCE_S, limits=limits) as client:
        yield client


@contextlib.asynccontextmanager
async def follow_events(
    site: Site, address: str, after: str | None = None, who: str = "owner"
) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """Open an event stream, and yield an iterator over its events."""
    headers = {} if after is None else {"Last-Event-ID": after}
    async with open_client(site, who, **headers) as client, client.stream("GET", address) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["X-Content-Type-Options"] == "nosniff", "event streams have the security headers"
        yield _events(response)


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    event: dict[str, Any] = {}
    async for line in response.aiter_lines():
        name, _, value = line.partition(": ")
        if line and name:
            event[name] = json.loads(value) if name == "data" else value
        elif "event" in event:
            yield event
            event = {}
        else:
            event = {}


async def collect_until(
    events: AsyncIterator[dict[str, Any]], matches: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """Return all events up to and including the first that matches."""
    found = []
    async with asyncio.timeout(PATIENCE_S):
        async for event in events:
            found.append(event)
            if matches(event):
                return found
    raise AssertionError(f"the event did not arrive after {found}")


def has_type(name: str) -> Callable[[dict[str, Any]], bool]:
    return lambda event: bool(event["event"] == name)


def count_connections(site: Site) -> int:
    """Return the number of open connections of clients."""
    sockets = psutil.Process(site.process.pid).net_connections("tcp")
    return sum(one.laddr.port == site.port and one.status == psutil.CONN_ESTABLISHED for one in sockets)


def wait_for_connections(site: Site, minimum: int) -> None:
    wait_until(lambda: count_connections(site) >= minimum, "the clients are connected")


def count_threads(site: Site) -> int:
    return len(list(Path(f"/proc/{site.process.pid}/task").iterdir()))
