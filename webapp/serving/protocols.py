"""HTTP and WebSocket protocols of uvicorn with the limits of `webapp.serving.limits`."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from jobs.api.problems import CONTENT_TYPE
from webapp.serving import limits
from webapp.serving.request_guard import build_problem

TOO_LONG = f"The request line and headers are longer than {limits.MAX_HEAD_BYTES:,} bytes."
WITH_BODY = "To open a WebSocket, send a GET request without a body."
POLICY = 1008  # close code, RFC 6455 section 7.4.1


class BoundedHttpProtocol(HttpToolsProtocol):
    """HTTP protocol that limits the size and the time of the request head."""

    _reading_head = True
    _head_bytes = 0  # that arrived
    _parsed_bytes = 0  # of complete headers
    _head_timer: asyncio.TimerHandle | None = None
    _error = ""  # error message

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._reading_head:
            return
        self._head_bytes += len(data)
        if self._head_bytes > limits.MAX_HEAD_BYTES:
            self.send_400_response(TOO_LONG)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._reading_head:  # another request on the same connection
            self._start_head()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_parsed(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Ignore trailers after the body."""
        if self._reading_head:
            super().on_header(name, value)
        self._count_parsed(len(name) + len(value) + len(b": \r\n"))

    def _count_parsed(self, num_bytes: int) -> None:
        self._parsed_bytes += num_bytes
        if self._parsed_bytes > limits.MAX_HEAD_BYTES:
            self._refuse(TOO_LONG)

    def on_headers_complete(self) -> None:
        self._end_head()
        if self._should_upgrade() and (self.parser.get_method() != b"GET" or self._has_body()):
            self._refuse(WITH_BODY)  # uvicorn would wait forever
        super().on_headers_complete()

    def _has_body(self) -> bool:
        return any(
            name == b"transfer-encoding" or (name == b"content-length" and value.strip() != b"0")
            for name, value in self.headers
        )

    def _refuse(self, words: str) -> None:
        self._error = words
        raise ValueError(words)  # uvicorn responds with 400

    def send_400_response(self, msg: str) -> None:
        """Send the error as a problem document."""
        body = build_problem(400, self._error or msg).encode()
        head = [
            STATUS_LINE[400],
            b"content-type: %s\r\n" % CONTENT_TYPE.encode(),
            b"content-length: %d\r\n" % len(body),
        ]
        self.transport.write(b"".join([*head, b"connection: close\r\n\r\n", body]))
        self.transport.close()

    def _start_head(self) -> None:
        self._reading_head, self._head_bytes, self._parsed_bytes = True, 0, 0
        self._head_timer = self.loop.call_later(limits.HEAD_TIMEOUT_S, self._close)

    def _end_head(self) -> None:
        self._reading_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


class BoundedWebSocketProtocol(WebSocketsSansIOProtocol):
    """WebSocket protocol that limits the bytes per second.

    uvicorn limits only messages, so empty fragments and pings could keep a process busy. Pages send no messages.
    """

    _second = 0.0  # start of the counted second
    _received_bytes = 0

    def data_received(self, data: bytes) -> None:
        allowance = self._get_allowance() if self.handshake_initiated else len(data)
        self._received_bytes += len(data)
        super().data_received(data[:allowance])
        if len(data) > allowance and not self.transport.is_closing():
            self._abort()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self.transport.abort()  # drops unsent data

    def _get_allowance(self) -> int:
        """Return the number of bytes that the client may still send in this second."""
        now = self.loop.time()
        if now >= self._second + 1:
            self._second, self._received_bytes = now, 0
        return max(0, limits.MAX_SOCKET_BYTES_PER_S - self._received_bytes)

    def _abort(self) -> None:
        if not self.close_sent:
            self.conn.fail(POLICY, "it sends too much")
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.close_sent = True
        self.transport.abort()
