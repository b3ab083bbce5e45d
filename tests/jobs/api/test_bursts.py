"""Many at once: the web's requests share few connections to PostgreSQL, and no slow reader keeps one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import httpx
import psycopg
import pytest
from django.http import HttpResponse, StreamingHttpResponse
from django.test import RequestFactory

from tests.support.web import Site
from webapp.serving import limits as web_limits

# The server has workers of its own, a vacuum's say, that count as sessions of the database they work on.
LOGGED_IN = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = 'site' AND backend_type = 'client backend' AND pid <> pg_backend_pid()
"""


def test_two_hundred_requests_at_once_are_answered_over_few_connections(postgres_site: Site) -> None:
    seen = []

    async def burst() -> list[int]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=postgres_site.url, headers=postgres_site.build_token_header("owner"), limits=limits, timeout=60
        ) as client:
            asked = [asyncio.create_task(client.get("/api/v1/jobs")) for _ in range(200)]
            # One connection counts the others: of one for each count, some would still be ending and be counted.
            with psycopg.connect(postgres_site.database_url, autocommit=True) as database:
                while not all(task.done() for task in asked):
                    seen.append(await asyncio.to_thread(logged_in, database))
            return [(await task).status_code for task in asked]

    assert set(asyncio.run(burst())) == {200}
    assert 2 < max(seen) <= web_limits.MAX_DATABASE_CONNECTIONS


def logged_in(database: psycopg.Connection) -> int:
    row = database.execute(LOGGED_IN).fetchone()
    assert row
    return int(row[0])


@pytest.mark.parametrize(("response", "times"), [(StreamingHttpResponse([b"a"]), 1), (HttpResponse(b"a"), 0)])
def test_a_long_answer_is_read_without_a_connection(
    response: HttpResponse, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[int] = []
    shared = SimpleNamespace(settings_dict={"OPTIONS": {"pool": {}}}, close=lambda: closed.append(1))
    monkeypatch.setattr(web_limits, "connection", shared)
    assert web_limits.release_connection(lambda _: response)(RequestFactory().get("/")) is response
    assert len(closed) == times
