"""Server with prepared responses, and the command that sends requests to it."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from meshboard import Client, commands, transport
from meshboard import client as client_module

Answer = tuple[int, dict[str, str], bytes]


class FakeServer:
    """Server whose `answers` are used in order, the last one repeatedly. `at` has fixed answers by path."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: list[Answer] = []
        self.at: dict[str, Answer] = {}
        self.requests: list[str] = []
        self.bodies: list[bytes] = []
        self.resumed: list[str] = []  # IDs from which streams resumed

    def respond(self, *answers: tuple[int, Any]) -> None:
        self.answers = [answer(status, content) for status, content in answers]

    def respond_at(self, path: str, content: Any, status: int = 200) -> None:
        self.at[path] = answer(status, content)

    def next(self, path: str) -> Answer:
        found = self.at.get(urlsplit(path).path.removeprefix("/api/v1/"))
        if found is not None:
            return found
        if not self.answers:
            return answer(404, {"errors": [{"field": "request", "message": "no such thing"}]})
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def answer(status: int, content: Any, **headers: str) -> Answer:
    return status, headers, content if isinstance(content, bytes) else json.dumps(content).encode()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setattr(client_module, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(transport, "RETRY_AFTER_S", 0.01)
    monkeypatch.setattr(transport, "OUTAGE_RETRY_S", 0.01)
    monkeypatch.setattr(transport, "get_backoff_s", lambda attempt: 0.01)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.bodies.append(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            made.requests.append(f"{self.command} {self.path}")
            made.resumed += [self.headers["Last-Event-ID"]] if "Last-Event-ID" in self.headers else []
            status, headers, body = made.next(self.path)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made = FakeServer(f"http://127.0.0.1:{listening.server_port}")
    threading.Thread(target=listening.serve_forever, args=(0.02,), daemon=True).start()
    yield made
    listening.shutdown()
    listening.server_close()


@pytest.fixture
def board(server: FakeServer) -> Iterator[Client]:
    with Client(server.url, "t") as client:
        yield client


class Ran(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def meshboard(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any) -> Callable[..., Ran]:
    """Run the command in this process, without a stored login."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("MESHBOARD_URL", "MESHBOARD_TOKEN", "MESHBOARD_CA"):
        monkeypatch.delenv(name, raising=False)

    def run(*words: str, at: FakeServer | None = None, token: str = "t", name: str = "meshboard") -> Ran:
        if at is not None:
            monkeypatch.setenv("MESHBOARD_URL", at.url)
            monkeypatch.setenv("MESHBOARD_TOKEN", token)
        monkeypatch.setattr(sys, "argv", [name, *words])
        with pytest.raises(SystemExit) as ended:
            commands.main()
        content = capsys.readouterr()
        return Ran(int(ended.value.code or 0), content.out, content.err)

    return run
