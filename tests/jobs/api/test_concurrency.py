"""Concurrent requests share a few connections to PostgreSQL."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import psycopg
import pytest
from django.http import HttpResponse, StreamingHttpResponse
from django.test import RequestFactory

from tests.support.postgres import terminate_sessions
from tests.support.web import Site
from webapp.serving import limits as web_limits

# Workers of PostgreSQL, for example vacuum, are also sessions of the database.
COUNT_SESSIONS = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = 'site' AND backend_type = 'client backend' AND pid <> pg_backend_pid()
"""


def test_200_requests_share_few_connections(postgres_site: Site) -> None:
    counts = []

    async def burst() -> list[int]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=postgres_site.url, headers=postgres_site.build_token_header("owner"), limits=limits, timeout=60
        ) as client:
            tasks = [asyncio.create_task(client.get("/api/v1/jobs")) for _ in range(200)]
            # One connection for all counts, because closed connections can still be counted for a while.
            with psycopg.connect(postgres_site.database_url, autocommit=True) as database:
                while not all(task.done() for task in tasks):
                    counts.append(await asyncio.to_thread(count_sessions, database))
            return [(await task).status_code for task in tasks]

    assert set(asyncio.run(burst())) == {200}
    assert 2 < max(counts) <= web_limits.MAX_DATABASE_CONNECTIONS


def test_no_request_fails_after_the_end_of_all_sessions(postgres_site: Site) -> None:
    """A restart of PostgreSQL ends the sessions of the pool, too."""
    headers = postgres_site.build_token_header("owner")

    def send(_number: int) -> int:
        return postgres_site.call("GET", "/api/v1/jobs", headers=headers).status

    with ThreadPoolExecutor(20) as threads:
        assert set(threads.map(send, range(20))) == {200}
    with psycopg.connect(postgres_site.database_url, autocommit=True) as database:
        assert count_sessions(database) > 2
        terminate_sessions(database)
    assert [send(number) for number in range(8)] == [200] * 8


def count_sessions(database: psycopg.Connection) -> int:
    row = database.execute(COUNT_SESSIONS).fetchone()
    assert row
    return int(row[0])


@pytest.mark.parametrize(("response", "times"), [(StreamingHttpResponse([b"a"]), 1), (HttpResponse(b"a"), 0)])
def test_streaming_response_releases_its_connection(
    response: HttpResponse, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[int] = []
    shared = SimpleNamespace(settings_dict={"OPTIONS": {"pool": {}}}, close=lambda: closed.append(1))
    monkeypatch.setattr(web_limits, "connection", shared)
    assert web_limits.release_connection(lambda _: response)(RequestFactory().get("/")) is response
    assert len(closed) == times
