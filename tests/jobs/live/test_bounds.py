"""Bound the frames of WebSockets, and close sockets that fail."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgpack
import psycopg
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from contracts.names import telemetry_stream
from tests.planner.wrong_specs import GOOD
from tests.support.processes import scale_timeout
from tests.support.telemetry import unpack_messages
from tests.support.web import Site

MAX_FRAME_BYTES = 2**20


def open_socket(site: Site, job: str, **options: Any) -> Any:
    url = f"ws://127.0.0.1:{site.port}/ws/jobs/{job}/"
    return connect(url, origin=site.url, additional_headers=site.build_cookie_header("owner"), max_size=None, **options)  # type: ignore[arg-type]


async def wait_for_close_code(socket: ClientConnection) -> int:
    try:
        while True:
            await asyncio.wait_for(socket.recv(), scale_timeout(30))
    except ConnectionClosed as closed:
        return int(closed.rcvd.code) if closed.rcvd else 0


def pack_batch(size: int) -> bytes:
    return bytes(msgpack.packb({"v": 1, "items": [], "filler": b"x" * size}))


def test_sends_stored_entries_in_frames_of_one_megabyte(postgres_site: Site) -> None:
    job = postgres_site.submit_job(GOOD)
    stream = telemetry_stream(job, 1)
    redis = postgres_site.redis.client()
    sizes = [100] * 300 + [256 * 2**10] * 60 + [3 * 2**20] + [100] * 10
    ids = [redis.xadd(stream, {"b": pack_batch(size)}).decode() for size in sizes]

    async def watch() -> tuple[list[str], list[Any], int]:
        got: list[str] = []
        gaps: list[Any] = []
        largest = 0
        async with open_socket(postgres_site, job) as socket:
            while not got or got[-1] != ids[-1]:
                frame = await asyncio.wait_for(socket.recv(), scale_timeout(30))
                largest = max(largest, len(frame))
                for message in unpack_messages(frame):
                    got += [entry[0] for entry in message.get("entries", [])]
                    gaps += [message["gap"]] if "gap" in message else []
        return got, gaps, largest

    got, gaps, largest = asyncio.run(watch())
    redis.delete(stream)
    assert got == ids[:360] + ids[361:], "each entry once and in order, except the one that is too large for a frame"
    assert gaps == [{"after": ids[359], "first": ids[360]}]
    assert largest <= MAX_FRAME_BYTES


@pytest.mark.parametrize("size", [1, 14 * 2**20])
def test_closes_a_socket_that_sends(postgres_site: Site, size: int) -> None:
    async def send() -> int:
        async with open_socket(postgres_site, postgres_site.submit_job(GOOD)) as socket:
            await socket.recv()
            with contextlib.suppress(ConnectionClosed):  # the server may close first
                await socket.send(b"x" * size)
            return await wait_for_close_code(socket)

    assert asyncio.run(send()) in (4400, 1009)


def test_database_error_closes_the_socket(
    postgres_site: Site,
) -> None:
    """The query for the job fails. Without the close, the browser would not notice."""
    job = postgres_site.submit_job(GOOD)
    postgres_url = postgres_site.database_url

    async def watch() -> int:
        async with open_socket(postgres_site, job) as socket:
            await socket.recv()
            with psycopg.connect(postgres_url, autocommit=True) as admin:
                admin.execute("ALTER TABLE jobs_statechange RENAME TO away")
                try:
                    return await wait_for_close_code(socket)
                finally:
                    admin.execute("ALTER TABLE away RENAME TO jobs_statechange")

    assert asyncio.run(watch()) == 1013
