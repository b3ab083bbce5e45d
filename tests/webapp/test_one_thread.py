"""A response that is sent in parts."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.http import FileResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase

from webapp.one_thread import OneThreadHandler

PARTS = 5


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
        while part := source.read(OneThreadHandler.chunk_size):
            yield part

    return StreamingHttpResponse(parts())


@pytest.mark.parametrize("made", [from_file, from_generator])
def test_a_file_is_read_as_it_is_sent(
    made: Callable[[Source], HttpResponseBase], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(bytes(PARTS * OneThreadHandler.chunk_size))
    handler: Any = OneThreadHandler()
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

    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b""}
    asyncio.run(handler(scope, receive, send))
    assert sent == PARTS * OneThreadHandler.chunk_size
    assert read_before == list(range(PARTS + 1))
    assert source.closed or made is from_generator
