"""Application behind the server's limits, on a real uvicorn."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

from tests.support.processes import scale_timeout
from webapp.runner import find_free_port

PATIENCE_S = 0.3
LONGEST_S = scale_timeout(10)  # timeout of the test, far above the server's own timeouts on a busy machine


class Behind:
    """Record the bodies and headers that reach the application behind the server's limits."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[list[tuple[bytes, bytes]]] = []
        self.left = threading.Event()  # sent on a socket
        self.port = find_free_port()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await self._socket(scope, receive, send)
            return
        assert scope["type"] == "http"
        self.headers.append(list(scope["headers"]))
        self.bodies.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def _socket(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        if scope["path"] == "/refused":
            await send({"type": "websocket.close", "code": 4403})
        while (await receive())["type"] != "websocket.disconnect":
            pass
        self.left.set()

    @contextlib.contextmanager
    def line(self) -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=LONGEST_S) as made:
            yield made

    def answer(self, *parts: bytes) -> bytes:
        """Return all bytes until the server closes the connection."""
        with self.line() as line:
            for part in parts:
                line.sendall(part)
            return until_closed(line)


def until_closed(line: socket.socket) -> bytes:
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while part := line.recv(65536):
            got += part
    return got
