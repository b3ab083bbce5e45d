"""Receivers of webhooks, honest and not, on free ports of loopback."""

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


class Heard(NamedTuple):
    """A request."""

    target: str
    headers: Message
    body: bytes


class Receiver:
    """Answers each connection with the same bytes; `None`: never, `endless`: bytes of the body until it is cut off."""

    def __init__(self, answer: bytes | None, *, endless: bool = False, tls: ssl.SSLContext | None = None) -> None:
        self.heard: list[Heard] = []
        self.connections = 0
        self.sent_bytes = 0
        self.closed = threading.Event()
        self._answer, self._endless, self._tls = answer, endless, tls
        self._door = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.port: int = self._door.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self.closed.set()
        for line in (self._door, *self._open):
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                line, _ = self._door.accept()
                self.connections += 1
                self._open.append(line)
                threading.Thread(target=self._talk, args=(line,), daemon=True).start()

    def _talk(self, line: socket.socket) -> None:
        with contextlib.suppress(OSError, ssl.SSLError):
            if self._tls is not None:
                line = self._tls.wrap_socket(line, server_side=True)
            with line.makefile("rb") as read:
                target = read.readline().split()[1].decode()
                head = b"".join(iter(read.readline, b"\r\n"))
                headers = BytesParser().parsebytes(head)
                self.heard.append(Heard(target, headers, read.read(int(headers["Content-Length"] or 0))))
            if self._answer is None:
                self.closed.wait(scale_timeout(60))
                return
            line.sendall(self._answer)
            while self._endless and not self.closed.is_set():
                self.sent_bytes += line.send(b"x" * 65536)
            line.close()


@contextlib.contextmanager
def receiver(answer: bytes | None, *, endless: bool = False, tls: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    made = Receiver(answer, endless=endless, tls=tls)
    try:
        yield made
    finally:
        made.close()


def answering(status: str, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", "Content-Length: 0", *headers, "", ""]).encode()


def hook_of(owner: User, where: Receiver | str, **fields: Any) -> Webhook:
    url = where if isinstance(where, str) else f"http://127.0.0.1:{where.port}/hook?a=1"
    return Webhook.objects.create(owner=owner, project="default", name="chat", url=url, **fields)
