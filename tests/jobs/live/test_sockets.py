"""Serve the WebSocket of a job from a real uvicorn and a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from http.cookies import SimpleCookie
from typing import Any

import msgpack
import pytest
import redis
from django.conf import settings
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from contracts.names import telemetry_stream
from jobs.models import Attempt, Job, Member, Status
from jobs.queue import actions, lifecycle
from jobs.runs.live.consumers import MAX_SOCKETS_PER_SESSION, TRY_AGAIN
from jobs.runs.live.held_requests import parse_stream_positions
from tests.planner.wrong_specs import GOOD
from tests.support.postgres import get_database_url
from tests.support.processes import (
    ROOT,
    RedisServer,
    base_environment,
    run_process,
    run_redis,
    scale_timeout,
    wait_until,
)
from tests.support.telemetry import unpack_messages
from webapp.runner import find_free_port, is_free

pytestmark = pytest.mark.django_db(transaction=True)


class Server:
    """Address a web process that uses the database of the test."""

    def __init__(self, port: int) -> None:
        self.port = port

    def url(self, job: str, query: str = "") -> str:
        return f"ws://127.0.0.1:{self.port}/ws/jobs/{job}/{query}"

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture(scope="module")
def redis_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with run_redis(tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.fixture(scope="module")
def server(
    django_db_setup: None, redis_service: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Start one server for all tests of this module."""
    port, folder = find_free_port(), tmp_path_factory.mktemp("web")
    environment = {
        **base_environment(),
        "MESHBOARD_SECRET_KEY": settings.SECRET_KEY,
        "MESHBOARD_REDIS_URL": redis_service.url,
        "MESHBOARD_STATE_DIR": str(folder),
        "MESHBOARD_DATABASE_URL": get_database_url(),
        "MESHBOARD_HTTPS": "0",
    }
    uvicorn = [sys.executable, "-m", "uvicorn", "webapp.asgi:application", "--port", str(port)]
    with run_process([*uvicorn, "--timeout-graceful-shutdown", "1"], environment, folder / "web.log", ROOT):
        wait_until(lambda: not is_free(port), "the web server listens")
        yield Server(port)


@pytest.fixture
def job() -> Job:
    made, _ = actions.submit(User.objects.create_user("owner"), GOOD)
    return made


def log_in(username: str) -> dict[str, str]:
    client = Client()
    client.force_login(User.objects.get(username=username))
    jar: SimpleCookie = client.cookies
    return {"Cookie": f"sessionid={jar['sessionid'].value}"}


def put(client: redis.Redis, job: Job, number: int, maxlen: int | None = None, node: int = 0) -> str:
    item = {"kind": "log", "rank": 0, "time": 0.0, "first": number, "lines": [f"line {number}"]}
    batch = {"v": 1, "job": job.id, "attempt": 1, "time": 0.0, "items": [item]}
    entry: Any = client.xadd(
        telemetry_stream(job.id, 1, node), {"b": msgpack.packb(batch)}, maxlen=maxlen, approximate=False
    )
    return str(entry.decode())


async def read(socket: Any, lines: int) -> tuple[list[int], list[str], list[dict[str, Any]]]:
    """Read N log lines. Return their numbers, the stream ids, and all other messages."""
    numbers: list[int] = []
    ids: list[str] = []
    others: list[dict[str, Any]] = []
    while len(numbers) < lines:
        for message in unpack_messages(await asyncio.wait_for(socket.recv(), scale_timeout(15))):
            if "entries" not in message:
                others.append(message)
            for entry_id, packed in message.get("entries", []):
                ids.append(entry_id)
                numbers += [item["first"] for item in msgpack.unpackb(packed)["items"]]
    return numbers, ids, others


def test_sends_stored_then_new_entries_once_each(server: Server, redis_service: RedisServer, job: Job) -> None:
    client = redis_service.client()
    for number in range(700):
        put(client, job, number)
    headers = log_in("owner")

    async def watch() -> None:
        async with connect(server.url(job.id), origin=server.origin, additional_headers=headers) as socket:  # type: ignore[arg-type]
            first, _, others = await read(socket, 700)
            assert others[0]["job"]["id"] == job.id
            for number in range(700, 760):
                put(client, job, number)
            rest, ids, _ = await read(socket, 60)
            assert first + rest == list(range(760))
        after = f"?attempt=1&after={ids[-11]}"
        async with connect(server.url(job.id, after), origin=server.origin, additional_headers=headers) as socket:  # type: ignore[arg-type]
            again, _, _ = await read(socket, 10)
            assert again == list(range(750, 760))

    asyncio.run(watch())


def test_resumes_the_stream_of_each_node(server: Server, redis_service: RedisServer, job: Job) -> None:
    client = redis_service.client()
    attempt = Attempt.objects.create(job=job, number=1)
    for node in (0, 1):
        Member.objects.create(
            attempt=attempt, node=node, host_name=f"h{node}", first_rank=node, num_ranks=1, ordered=timezone.now()
        )
    ids = {node: [put(client, job, 10 * node + number, node=node) for number in range(3)] for node in (0, 1)}
    headers = log_in("owner")

    async def watch(query: str, lines: int) -> dict[int, list[int]]:
        seen: dict[int, list[int]] = {0: [], 1: []}
        async with connect(server.url(job.id, query), origin=server.origin, additional_headers=headers) as socket:  # type: ignore[arg-type]
            while sum(map(len, seen.values())) < lines:
                for message in unpack_messages(await asyncio.wait_for(socket.recv(), scale_timeout(15))):
                    for _, packed in message.get("entries", []):
                        seen[message["node"]] += [item["first"] for item in msgpack.unpackb(packed)["items"]]
        return seen

    assert asyncio.run(watch("", 6)) == {0: [0, 1, 2], 1: [10, 11, 12]}
    after = f"?attempt=1&after=0:{ids[0][0]},1:{ids[1][1]}"
    assert asyncio.run(watch(after, 3)) == {0: [1, 2], 1: [12]}


@pytest.mark.parametrize("text", ["", "0:", "x:1-0", "0:1-0,", "0:1-0,1", "-1:1-0", "0:99999999999999999999-0"])
def test_rejects_invalid_positions(text: str) -> None:
    assert parse_stream_positions(text) is None


def test_reports_trimmed_entries_as_a_gap(server: Server, redis_service: RedisServer, job: Job) -> None:
    client = redis_service.client()
    seen = put(client, job, 0)
    for number in range(1, 50):
        put(client, job, number, maxlen=10)
    headers = log_in("owner")

    async def watch() -> None:
        url = server.url(job.id, f"?attempt=1&after={seen}")
        async with connect(url, origin=server.origin, additional_headers=headers) as socket:  # type: ignore[arg-type]
            numbers, ids, others = await read(socket, 10)
            assert numbers == list(range(40, 50))
            assert {"node": 0, "gap": {"after": seen, "first": ids[0]}} in others

    asyncio.run(watch())


def test_reports_a_trimmed_start_as_a_gap(server: Server, redis_service: RedisServer, job: Job) -> None:
    for number in range(20):
        redis_service.client().xadd(telemetry_stream(job.id, 1), {"b": b"x", "n": number}, maxlen=5, approximate=False)
    headers = log_in("owner")

    async def watch() -> None:
        async with connect(server.url(job.id), origin=server.origin, additional_headers=headers) as socket:  # type: ignore[arg-type]
            messages = [msgpack.unpackb(await asyncio.wait_for(socket.recv(), scale_timeout(15))) for _ in range(2)]
            assert "gap" in messages[1]

    asyncio.run(watch())


def test_client_recovers_from_a_restart_of_redis(server: Server, redis_service: RedisServer, job: Job) -> None:
    headers = log_in("owner")
    for number in range(5):
        put(redis_service.client(), job, number)

    async def watch() -> list[int]:
        """Reconnect after the last received id, like the browser."""
        seen: list[int] = []
        after, restarted = "0-0", False
        while len(seen) < 10:
            url = server.url(job.id, f"?attempt=1&after={after}")
            try:
                async with connect(url, origin=server.origin, additional_headers=headers) as socket:  # type: ignore[arg-type]
                    while len(seen) < 10:
                        numbers, ids, _ = await read(socket, 1)
                        seen += numbers
                        after = ids[-1]
                        if len(seen) == 5 and not restarted:
                            restarted = True
                            await asyncio.to_thread(restart)
            except (ConnectionClosed, InvalidStatus):
                await asyncio.sleep(0.2)
        return seen

    def restart() -> None:
        redis_service.stop()
        redis_service.start()
        for number in range(5, 10):
            put(redis_service.client(), job, number)

    assert asyncio.run(asyncio.wait_for(watch(), scale_timeout(60))) == list(range(10))


def test_sends_a_change_of_state(server: Server, job: Job) -> None:
    headers = log_in("owner")

    async def watch() -> None:
        async with connect(server.url(job.id), origin=server.origin, additional_headers=headers) as socket:  # type: ignore[arg-type]
            assert msgpack.unpackb(await socket.recv())["job"]["status"] == "queued"
            await asyncio.to_thread(lifecycle.change_status, job.id, 1, Status.STARTING, "placed")
            async with asyncio.timeout(scale_timeout(10)):
                while msgpack.unpackb(await socket.recv()).get("job", {}).get("status") != "starting":
                    pass  # a heartbeat or another reason why the job is queued

    asyncio.run(watch())


def test_sends_heartbeats_of_an_unchanged_job(server: Server, job: Job) -> None:
    url, headers = server.url(job.id), log_in("owner")

    async def watch() -> None:
        async with connect(url, origin=server.origin, additional_headers=headers) as socket:  # type: ignore[arg-type]
            async with asyncio.timeout(scale_timeout(10)):
                while "beat" not in msgpack.unpackb(await socket.recv()):
                    pass

    asyncio.run(watch())


@pytest.mark.parametrize(
    "origin",
    [
        None,
        "null",
        "http://evil.example",
        "http://127.0.0.1.evil.example",
        "http://127.0.0.1",
        "http://127.0.0.1:9",  # another service on this host receives the same cookie
        "https://127.0.0.1:{port}",
        "http://localhost:{port}",
    ],
)
def test_refuses_foreign_origins(server: Server, job: Job, origin: str | None) -> None:
    headers = log_in("owner")

    async def watch() -> None:
        header: Any = origin and origin.format(port=server.port)
        async with connect(server.url(job.id), origin=header, additional_headers=headers):
            raise AssertionError("connected")

    with pytest.raises(InvalidStatus) as refused:
        asyncio.run(watch())
    assert refused.value.response.status_code == 403


@pytest.mark.parametrize(
    ("who", "query", "code"), [("stranger", "", 4403), (None, "", 4403), ("owner", "?after=yesterday", 4400)]
)
def test_closes_unauthorized_sockets(server: Server, job: Job, who: str | None, query: str, code: int) -> None:
    User.objects.create_user("stranger")
    headers = log_in(who) if who else {}

    async def watch() -> None:
        async with connect(server.url(job.id, query), origin=server.origin, additional_headers=headers) as socket:  # type: ignore[arg-type]
            while True:
                await asyncio.wait_for(socket.recv(), scale_timeout(10))

    with pytest.raises(ConnectionClosed) as closed:
        asyncio.run(watch())
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == code


def test_limits_the_sockets_of_a_session(server: Server, job: Job) -> None:
    headers = log_in("owner")

    async def opened(stack: contextlib.AsyncExitStack) -> Any:
        return await stack.enter_async_context(
            connect(server.url(job.id), origin=server.origin, additional_headers=headers)  # type: ignore[arg-type]
        )

    async def watch() -> None:
        async with contextlib.AsyncExitStack() as stack:
            allowed = [await opened(stack) for _ in range(MAX_SOCKETS_PER_SESSION)]
            one_more = await opened(stack)
            with pytest.raises(ConnectionClosed) as closed:
                await asyncio.wait_for(one_more.recv(), scale_timeout(10))
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == TRY_AGAIN
            await allowed[0].close()
            again = await opened(stack)
            assert "job" in msgpack.unpackb(await asyncio.wait_for(again.recv(), scale_timeout(10)))

    asyncio.run(watch())


def test_logout_closes_open_sockets(server: Server, job: Job) -> None:
    from django.contrib.sessions.models import Session

    headers = log_in("owner")

    async def watch() -> None:
        async with connect(server.url(job.id), origin=server.origin, additional_headers=headers) as socket:  # type: ignore[arg-type]
            await socket.recv()
            await asyncio.to_thread(Session.objects.all().delete)
            while True:
                await asyncio.wait_for(socket.recv(), scale_timeout(30))

    with pytest.raises(ConnectionClosed) as closed:
        asyncio.run(watch())
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 4403
