"""A TCP relay that can drop the responses of the board."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class Relay:
    """Forward connections to `port`. While `deaf` is set, drop the response and close the connection."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.deaf = threading.Event()
        self.lost = self.opened = 0
        self.asked: list[bytes] = []  # the first line of each CONNECT

    def serve(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            self.opened += 1
            threading.Thread(target=self._pass, args=(client,), daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _pass(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            first = client.recv(8, socket.MSG_PEEK)
            if first.startswith(b"CONNECT"):
                self.asked.append(self._head(client).split(b"\r\n")[0])
                client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            board = socket.create_connection(("127.0.0.1", self._to))
            threading.Thread(target=self._copy, args=(client, board), daemon=True).start()
            while part := board.recv(65536):
                if self.deaf.is_set() and self._is_answer(part):
                    self.lost += 1
                    break
                client.sendall(part)
            for line in (client, board):
                with contextlib.suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _is_answer(part: bytes) -> bool:
        return part[:1] == b"\x17"  # TLS: application data

    @staticmethod
    def _head(client: socket.socket) -> bytes:
        result = b""
        while not result.endswith(b"\r\n\r\n"):
            result += client.recv(1)
        return result

    @staticmethod
    def _copy(client: socket.socket, board: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := client.recv(65536):
                board.sendall(part)


@contextlib.contextmanager
def relay(port: int) -> Iterator[Relay]:
    made = Relay(port)
    threading.Thread(target=made.serve, daemon=True).start()
    try:
        yield made
    finally:
        made.close()
