"""The server's outermost layer on a real uvicorn rejects large or slow requests before the application."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from typing import Any

import pytest
from pythonjsonlogger.json import JsonFormatter

from jobs.api.problems import ProblemDetails, build_problem
from planner.facts.validation import Problem
from tests.webapp.recording_app import LONGEST_S, PATIENCE_S, Behind, until_closed
from webapp import serve
from webapp.logs import REQUEST_LOGGER, add_request_id, build_logging_settings
from webapp.serving import limits
from webapp.serving.request_guard import RequestGuard

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"


def refusal(status: int, words: str) -> ProblemDetails:
    return build_problem(status, [Problem("request", words)])


def test_passes_small_requests(behind: Behind) -> None:
    assert b" 200 " in behind.answer(HEAD + b"Content-Length: 3\r\nConnection: close\r\n\r\nabc")
    assert behind.bodies == [b"abc"]


def test_rejects_a_large_content_length_before_the_body(behind: Behind) -> None:
    answer = behind.answer(HEAD + b"Content-Length: 1048577\r\nExpect: 100-continue\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413")
    assert answer.endswith(b"The request body is larger than 1 MB.")
    assert behind.bodies == []


def test_client_reads_the_rejection_while_it_sends(behind: Behind) -> None:
    body = [b"x" * 2**20] * 4
    answer = behind.answer(HEAD + b"Content-Length: %d\r\n\r\n" % (4 * 2**20), *body)
    assert answer.startswith(b"HTTP/1.1 413")
    assert behind.bodies == []


@pytest.mark.parametrize("declared", [b"9" * 30, b"-1", b"1e3", "²".encode()])
def test_rejects_an_invalid_content_length(behind: Behind, declared: bytes) -> None:
    assert behind.answer(HEAD + b"Content-Length: " + declared + b"\r\n\r\n")[:10] == b"HTTP/1.1 4"
    assert behind.bodies == []


@pytest.mark.parametrize("declared", [b"-1", b"1e3", b"", "²".encode()])
def test_guard_rejects_an_invalid_content_length(declared: bytes) -> None:
    """uvicorn's parser does not reject it, and another server may be in use."""
    sent: list[Any] = []
    headers = [(b"content-length", declared)]
    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": headers}

    async def never(*_: Any) -> Any:
        raise AssertionError("neither the body nor the application is asked")

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(RequestGuard(never)(scope, never, send))
    assert sent[0]["status"] == 400
    assert sent[1]["body"] == b"Content-Length is not a number."


@pytest.mark.parametrize("count", [1, 50, 2000])
@pytest.mark.parametrize(
    "line", [b"GET / HTTP/1.1\r\nHost: x\r\n", b"GET /?" + b"q" * 30_000 + b" HTTP/1.1\r\nHost: x\r\n"]
)
def test_rejects_a_large_head(behind: Behind, line: bytes, count: int) -> None:
    """The 100,000 bytes of one header and the end of the head arrive in one piece."""
    size = 66_000 // count
    headers = b"".join(b"X-%d: %s\r\n" % (n, b"x" * size) for n in range(count))
    answer = behind.answer(line + headers + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"longer than 65,536 bytes" in answer
    assert behind.bodies == []


def test_rejects_a_large_chunked_body(behind: Behind) -> None:
    chunk = b"80000\r\n" + b"x" * 2**19 + b"\r\n"
    answer = behind.answer(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", chunk, chunk, chunk, b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413")
    assert behind.bodies == []


def test_slow_body_gets_408(behind: Behind) -> None:
    assert behind.answer(HEAD + b"Content-Length: 10\r\n\r\nabc").startswith(b"HTTP/1.1 408")
    assert behind.bodies == []


@pytest.mark.parametrize("sent", [b"", b"GET / HT", HEAD], ids=["nothing", "half a line", "half a head"])
def test_closes_a_connection_with_a_slow_head(behind: Behind, sent: bytes) -> None:
    assert behind.answer(sent) == b""
    assert behind.bodies == []


def test_limits_the_time_of_the_next_head(behind: Behind) -> None:
    with behind.line() as line:
        line.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"ok" in line.recv(65536)
        line.sendall(b"GET / HT")
        assert until_closed(line) == b""


def test_closes_a_connection_with_a_trickling_head(behind: Behind) -> None:
    began = time.monotonic()
    with behind.line() as line, contextlib.suppress(ConnectionError):
        line.sendall(HEAD)
        line.settimeout(PATIENCE_S / 10)
        while time.monotonic() < began + LONGEST_S:
            line.sendall(b"X-A: b\r\n")
            with contextlib.suppress(TimeoutError):
                if not line.recv(1):
                    break
    assert time.monotonic() - began < LONGEST_S / 2


def test_rejects_an_endless_head(behind: Behind) -> None:
    with behind.line() as line:
        with contextlib.suppress(ConnectionError):
            line.sendall(HEAD + b"X-A: " + b"b" * (2 * limits.MAX_HEAD_BYTES + 2**20))
        assert until_closed(line)[:12] in (b"HTTP/1.1 400", b"")


@pytest.mark.parametrize("path", [b"/api", b"/api/v1/jobs", b"//api/v1/jobs", b"/api?x"])
def test_rejects_api_requests_in_json(behind: Behind, path: bytes) -> None:
    answer = behind.answer(b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999\r\nExpect: y\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413")
    assert json.loads(answer.partition(b"\r\n\r\n")[2]) == refusal(413, "The request body is larger than 1 MB.")
    assert b"content-type: application/problem+json" in answer


def test_rejects_page_requests_in_text(behind: Behind) -> None:
    answer = behind.answer(b"POST /apish HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999\r\nExpect: y\r\n\r\n")
    assert b"text/plain" in answer


@pytest.mark.parametrize(
    "sent", [b"no request\r\n\r\n", b"GET / HTTP/9.9.9\r\n\r\n", b"POST /api HTTP/1.1\r\n:\r\n\r\n"]
)
def test_rejects_invalid_http_with_a_problem_document(behind: Behind, sent: bytes) -> None:
    head, _, body = behind.answer(sent).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert b"content-type: application/problem+json" in head
    assert json.loads(body) == refusal(400, "Invalid HTTP request received.")
    assert behind.bodies == []


def test_ignores_forwarded_headers_from_loopback() -> None:
    assert serve.build_config("127.0.0.1", 1).proxy_headers is False


@pytest.mark.parametrize(
    ("path", "status", "level"), [("/healthz", 200, "DEBUG"), ("/readyz", 503, "INFO"), ("/jobs/", 200, "INFO")]
)
def test_logs_failed_health_checks_and_other_requests(
    caplog: pytest.LogCaptureFixture, path: str, status: int, level: str
) -> None:
    async def answer(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def send(_message: Any) -> None:
        """Drop the response."""

    caplog.set_level("DEBUG", REQUEST_LOGGER)
    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": [], "scheme": "http"}
    asyncio.run(RequestGuard(answer)(scope, receive, send))
    assert [(record.levelname, record.__dict__["path"]) for record in caplog.records] == [(level, path)]


def test_json_lines_have_no_ansi_codes() -> None:
    formats = build_logging_settings("json")
    fields = {"color_message": "\x1b[36mstarted\x1b[0m"}
    record = logging.makeLogRecord({"name": "uvicorn.error", "levelname": "INFO", "msg": "started", **fields})
    add_request_id(record)
    options = formats["formatters"]["json"]
    line = JsonFormatter(options["fmt"], rename_fields=options["rename_fields"]).format(record)
    assert json.loads(line) == {"level": "INFO", "logger": "uvicorn.error", "message": "started", "request_id": ""}
