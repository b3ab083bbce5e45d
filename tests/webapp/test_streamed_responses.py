"""A response that is sent in parts."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.http import FileResponse, HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase

from tests.support.processes import wait_until
from webapp.serving import limits
from webapp.serving.handler import SingleThreadHandler

PARTS = 5
SCOPE = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b""}


class Source(io.BytesIO):
    """A file that counts how often it was read."""

    reads = 0

    def read(self, size: int | None = -1) -> bytes:
        self.reads += 1
        return super().read(size)


def from_file(source: Source) -> HttpResponseBase:
    return FileResponse(source)


def from_generator(source: Source) -> HttpResponseBase:
    def parts() -> Iterator[bytes]:
        while part := source.read(SingleThreadHandler.chunk_size):
            yield part

    return StreamingHttpResponse(parts())


@pytest.mark.parametrize("made", [from_file, from_generator])
def test_reads_a_file_while_it_is_sent(
    made: Callable[[Source], HttpResponseBase], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(bytes(PARTS * SingleThreadHandler.chunk_size))
    handler: Any = SingleThreadHandler()
    monkeypatch.setattr(handler, "get_response", lambda _request: made(source))
    read_before: list[int] = []
    sent = 0

    async def receive() -> dict[str, Any]:
        if not read_before:
            read_before.append(0)
            return {"type": "http.request"}
        await asyncio.Event().wait()
        raise AssertionError("nobody goes away")

    async def send(message: dict[str, Any]) -> None:
        nonlocal sent
        sent += len(message.get("body", b""))
        if message.get("body"):
            read_before.append(source.reads)

    asyncio.run(handler(SCOPE, receive, send))
    assert sent == PARTS * SingleThreadHandler.chunk_size
    assert read_before == list(range(PARTS + 1))
    assert source.closed or made is from_generator


async def requested() -> dict[str, Any]:
    return {"type": "http.request"}


async def unread(_message: dict[str, Any]) -> None:
    """The client ignores the response."""


def test_reuses_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_REQUEST_THREADS", 2)
    handler: Any = SingleThreadHandler()
    used: list[threading.Thread] = []

    def answer(_request: Any) -> HttpResponse:
        used.append(threading.current_thread())
        return HttpResponse()

    monkeypatch.setattr(handler, "get_response", answer)

    async def one_after_another() -> None:
        for _ in range(20):
            await handler(SCOPE, requested, unread)

    asyncio.run(one_after_another())
    assert len(used) == 20
    assert len(set(used)) <= 2, "one that has answered may not be free at once, and there are two"


def test_requests_wait_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_REQUEST_THREADS", 2)
    handler: Any = SingleThreadHandler()
    begun: list[int] = []
    turn = threading.Event()

    def answer(_request: Any) -> HttpResponse:
        begun.append(len(begun))
        assert turn.wait(30)
        return HttpResponse()

    monkeypatch.setattr(handler, "get_response", answer)

    async def all_at_once() -> None:
        requests = [asyncio.create_task(handler(SCOPE, requested, unread)) for _ in range(5)]
        await asyncio.to_thread(wait_until, lambda: len(begun) == 2, "as many as there are threads have begun")
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(begun) == 2
        turn.set()
        await asyncio.gather(*requests)

    asyncio.run(all_at_once())
    assert len(begun) == 5
