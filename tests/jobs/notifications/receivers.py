"""Receivers of webhooks on free loopback ports, with correct and hostile responses."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from email.message import Message
from email.parser import BytesParser
from typing import Any, NamedTuple

from django.contrib.auth.models import User

from jobs.models import Webhook
from tests.support.processes import scale_timeout

ENDLESS = b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\n"


class ReceivedRequest(NamedTuple):
    """Request that a receiver got."""

    target: str
    headers: Message
    body: bytes


class Receiver:
    """Server that sends the same response to each connection.

    A response of `None` is never sent. An `endless` response has a body that continues until the client disconnects.
    """

    def __init__(self, response: bytes | None, *, endless: bool = False, tls: ssl.SSLContext | None = None) -> None:
        self.requests: list[ReceivedRequest] = []
        self.connections = 0
        self.sent_bytes = 0
        self.closed = threading.Event()
        self._response, self._endless, self._tls = response, endless, tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self.closed.set()
        for connection in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                self._open.append(connection)
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ssl.SSLError):
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            with connection.makefile("rb") as read:
                target = read.readline().split()[1].decode()
                head = b"".join(iter(read.readline, b"\r\n"))
                headers = BytesParser().parsebytes(head)
                self.requests.append(ReceivedRequest(target, headers, read.read(int(headers["Content-Length"] or 0))))
            if self._response is None:
                self.closed.wait(scale_timeout(60))
                return
            connection.sendall(self._response)
            while self._endless and not self.closed.is_set():
                self.sent_bytes += connection.send(b"x" * 65536)
            connection.close()


@contextlib.contextmanager
def run_receiver(
    response: bytes | None, *, endless: bool = False, tls: ssl.SSLContext | None = None
) -> Iterator[Receiver]:
    receiver = Receiver(response, endless=endless, tls=tls)
    try:
        yield receiver
    finally:
        receiver.close()


def build_response(status: str, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", "Content-Length: 0", *headers, "", ""]).encode()


def make_webhook(owner: User, receiver: Receiver | str, **fields: Any) -> Webhook:
    url = receiver if isinstance(receiver, str) else f"http://127.0.0.1:{receiver.port}/hook?a=1"
    return Webhook.objects.create(owner=owner, project="default", name="chat", url=url, **fields)
