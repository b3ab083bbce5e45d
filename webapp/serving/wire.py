"""What a connection may send: uvicorn's protocols, each with the bounds of `webapp.serving.limits`."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from jobs.api.http.problems import CONTENT_TYPE
from webapp.serving import limits
from webapp.serving.doors import problem

TOO_LONG = f"The request line and headers are longer than {limits.HEAD_BYTES:,} bytes."
WITH_BODY = "To open a WebSocket, send a GET request without a body."
POLICY = 1008  # why a socket was closed, RFC 6455 section 7.4.1


class BoundedHeads(HttpToolsProtocol):
    """uvicorn waits for ever for the end of a request's headers, and keeps what came of them however long."""

    _reading_head = True
    _head_bytes = 0  # that arrived
    _parsed_bytes = 0  # of whole headers, which may have arrived at once with their end
    _head_timer: asyncio.TimerHandle | None = None
    _wrong = ""  # with the head, in words

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_read()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._reading_head:
            return
        self._head_bytes += len(data)
        if self._head_bytes > limits.HEAD_BYTES:
            self.send_400_response(TOO_LONG)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._reading_head:  # another request on the same connection
            self._await_head()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._parsed(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Behind a body come trailers, which are no headers: whoever looked at these has done so."""
        if self._reading_head:
            super().on_header(name, value)
        self._parsed(len(name) + len(value) + len(b": \r\n"))

    def _parsed(self, num_bytes: int) -> None:
        self._parsed_bytes += num_bytes
        if self._parsed_bytes > limits.HEAD_BYTES:
            self._refuse(TOO_LONG)

    def on_headers_complete(self) -> None:
        self._head_is_read()
        if self._should_upgrade() and (self.parser.get_method() != b"GET" or self._has_body()):
            self._refuse(WITH_BODY)  # uvicorn would begin neither a request nor a socket, and wait for ever
        super().on_headers_complete()

    def _has_body(self) -> bool:
        return any(
            name == b"transfer-encoding" or (name == b"content-length" and value.strip() != b"0")
            for name, value in self.headers
        )

    def _refuse(self, words: str) -> None:
        self._wrong = words
        raise ValueError(words)  # the parser stops, and uvicorn answers with 400

    def send_400_response(self, msg: str) -> None:
        """In the API's shape: browsers send nothing that a parser chokes on, programs do."""
        body = problem(400, self._wrong or msg).encode()
        head = [
            STATUS_LINE[400],
            b"content-type: %s\r\n" % CONTENT_TYPE.encode(),
            b"content-length: %d\r\n" % len(body),
        ]
        self.transport.write(b"".join([*head, b"connection: close\r\n\r\n", body]))
        self.transport.close()

    def _await_head(self) -> None:
        self._reading_head, self._head_bytes, self._parsed_bytes = True, 0, 0
        self._head_timer = self.loop.call_later(limits.HEAD_S, self._give_up)

    def _head_is_read(self) -> None:
        self._reading_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


class BoundedSocket(WebSocketsSansIOProtocol):
    """uvicorn bounds messages alone, and reads on behind its own close: empty fragments and pings kept a process busy.

    No page of ours sends anything, and a ping is a few bytes now and then.
    """

    _second = 0.0  # in which bytes are counted
    _taken_bytes = 0

    def data_received(self, data: bytes) -> None:
        room = self._room() if self.handshake_initiated else len(data)
        self._taken_bytes += len(data)
        super().data_received(data[:room])  # which may know of a better reason
        if len(data) > room and not self.transport.is_closing():
            self._cut()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self.transport.abort()  # what it does not take is not kept for it

    def _room(self) -> int:
        """Bytes that may still come in this second."""
        now = self.loop.time()
        if now >= self._second + 1:
            self._second, self._taken_bytes = now, 0
        return max(0, limits.SOCKET_BYTES_S - self._taken_bytes)

    def _cut(self) -> None:
        if not self.close_sent:
            self.conn.fail(POLICY, "it sends too much")
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.close_sent = True
        self.transport.abort()
