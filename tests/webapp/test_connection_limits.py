"""Limits of connections, on a running uvicorn."""

from __future__ import annotations

import asyncio
import socket

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from tests.webapp.recording_app import LONGEST_S, Behind, until_closed
from webapp.serving import limits

UPGRADE = (
    b"%s %s HTTP/1.1\r\nHost: x\r\nOrigin: http://x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
MASK = b"\1\2\3\4"
PING, EMPTY, REST = b"\x89\x80" + MASK, b"\x01\x80" + MASK, b"\x00\x80" + MASK


def talking(behind: Behind) -> connect:
    origin = f"http://127.0.0.1:{behind.port}"
    return connect(f"ws://127.0.0.1:{behind.port}/", origin=origin)  # type: ignore[arg-type]


def flood(line: socket.socket, sent: bytes) -> None:
    """Send data until the other side closes the connection or the test ends."""
    line.sendall(EMPTY)
    for _ in range(100):
        line.sendall(sent * 10_000)


def test_ignores_trailers(behind: Behind) -> None:
    """Trailers would otherwise be added to the headers after their check."""
    head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = behind.answer(head, b"3\r\nabc\r\n0\r\nAuthorization: Token mine\r\nCookie: a=b\r\n\r\n")
    assert b" 200 " in answer
    assert behind.bodies == [b"abc"]
    assert {name for name, _ in behind.headers[0]} == {b"host", b"connection", b"transfer-encoding"}


def test_limits_trailers(behind: Behind) -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n"
    assert b"HTTP/1.1 400" in behind.answer(head, b"a: b\r\n" * limits.MAX_HEAD_BYTES)


@pytest.mark.parametrize(
    ("method", "rest"),
    [
        (b"POST", b"Content-Length: 3\r\n\r\nabc"),
        (b"POST", b"Content-Length: 3\r\n\r\n"),
        (b"POST", b"\r\n"),
        (b"GET", b"Content-Length: 3\r\n\r\nabc"),
        (b"GET", b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"),
        (b"GET", b"Transfer-Encoding: chunked\r\n\r\n"),
    ],
)
def test_websocket_needs_a_get_without_a_body(behind: Behind, method: bytes, rest: bytes) -> None:
    """Otherwise neither a request nor a socket begins, and the connection stays open forever."""
    answer = behind.answer(UPGRADE % (method, b"/") + rest)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"a GET request without a body" in answer


@pytest.mark.parametrize("path", [b"/", b"/refused"])
@pytest.mark.parametrize("sent", [PING, REST])
def test_closes_a_socket_that_sends_too_much(behind: Behind, path: bytes, sent: bytes) -> None:
    """The limit counts bytes outside of messages too, including those after a rejection."""
    with behind.line() as line:
        line.sendall(UPGRADE % (b"GET", path) + b"\r\n")
        assert line.recv(65536).startswith(b"HTTP/1.1 101")
        with pytest.raises(OSError, match=r"reset|pipe"):
            flood(line, sent)
        assert behind.left.wait(LONGEST_S)


def test_sends_the_close_code_before_it_closes(behind: Behind) -> None:
    async def content() -> int:
        async with talking(behind) as line:
            line.transport.write(PING * 1000)
            with pytest.raises(ConnectionClosed) as closed:
                await line.recv()
            return closed.value.rcvd.code if closed.value.rcvd else 0

    assert asyncio.run(content()) in (1008, 0), "a reset may overtake the word"


def test_keeps_a_well_behaved_socket_open(behind: Behind) -> None:
    async def talk() -> None:
        async with talking(behind) as line:
            for _ in range(50):
                await (await line.ping())
                await line.send("hello")

    asyncio.run(talk())
    assert behind.left.wait(LONGEST_S)


def test_accepts_a_websocket_with_content_length_zero(behind: Behind) -> None:
    with behind.line() as line:
        line.sendall(UPGRADE % (b"GET", b"/") + b"Content-Length: 0\r\n\r\n")
        assert line.recv(65536).startswith(b"HTTP/1.1 101")
        line.shutdown(socket.SHUT_WR)
        until_closed(line)
