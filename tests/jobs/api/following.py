"""A job on a server, moved as the controller would, told of as its ranks would, and followed over REST."""

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
Event = dict[str, Any]  # "event", "data", and "id" of some


def move(site: Site, job: str, *statuses: str, attempt: int = 1) -> None:
    """As the controller would."""
    with psycopg.connect(site.database_url, autocommit=True) as database:
        for status in statuses:
            database.execute("UPDATE jobs_job SET status = %s, attempt = %s WHERE id = %s", (status, attempt, job))
            database.execute(
                "INSERT INTO jobs_statechange (job_id, attempt, status, reason, at) VALUES (%s, %s, %s, %s, now())",
                (job, attempt, status, f"it is {status}"),
            )


def put(site: Site, job: str, *items: dict[str, Any], number: int = 0) -> str:
    batch = {"v": 1, "job": job, "attempt": 1, "time": 0.0, "items": list(items)}
    entry: Any = site.redis.client().xadd(telemetry_stream(job, 1), {"b": msgpack.packb(batch), "n": number})
    return str(entry.decode())


def lines(first: int, *words: str, rank: int = 0) -> dict[str, Any]:
    return {"kind": "log", "rank": rank, "time": 1.0, "first": first, "lines": list(words)}


def step(number: int, loss: float | None = 4.0, rank: int = 0) -> dict[str, Any]:
    told = {"kind": "step", "rank": rank, "time": 1.0, "step": number, "ran": number, "steps": 50, "step_s": 0.1}
    return {**told, "tokens": 8, "loss": loss, "grad_norm": 1.0, "learning_rate": 0.1, "cells": []}


@contextlib.asynccontextmanager
async def asking(site: Site, who: str = "owner", **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    given = {**site.build_token_header(who), **headers}
    async with httpx.AsyncClient(base_url=site.url, headers=given, timeout=PATIENCE_S, limits=limits) as client:
        yield client


@contextlib.asynccontextmanager
async def followed(
    site: Site, address: str, after: str | None = None, who: str = "owner"
) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """The events: {"event", "data", "id"}."""
    headers = {} if after is None else {"Last-Event-ID": after}
    async with asking(site, who, **headers) as client, client.stream("GET", address) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        assert answer.headers["X-Content-Type-Options"] == "nosniff", "as every other answer"
        yield _events(answer)


async def _events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    told: dict[str, Any] = {}
    async for line in answer.aiter_lines():
        name, _, value = line.partition(": ")
        if line and name:
            told[name] = json.loads(value) if name == "data" else value
        elif "event" in told:
            yield told
            told = {}
        else:
            told = {}


async def until(
    events: AsyncIterator[dict[str, Any]], wanted: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """All up to the first that is wanted, itself too."""
    found = []
    async with asyncio.timeout(PATIENCE_S):
        async for event in events:
            found.append(event)
            if wanted(event):
                return found
    raise AssertionError(f"it never came; there were {found}")


def is_a(name: str) -> Callable[[dict[str, Any]], bool]:
    return lambda event: bool(event["event"] == name)


def connections(site: Site) -> int:
    """Of clients, that are open."""
    opened = psutil.Process(site.process.pid).net_connections("tcp")
    return sum(one.laddr.port == site.port and one.status == psutil.CONN_ESTABLISHED for one in opened)


def have_come(site: Site, most: int) -> None:
    wait_until(lambda: connections(site) >= most, "they have come")


def threads(site: Site) -> int:
    return len(list(Path(f"/proc/{site.process.pid}/task").iterdir()))
