"""The server's outermost layer, on a real uvicorn: what is too large or too slow ends before the application."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any

import pytest

from jobs.api.http.problems import ProblemDetails, details
from planner.facts.validation import Problem
from tests.webapp.behind import LONGEST_S, PATIENCE_S, Behind, until_closed
from webapp import serve
from webapp.serving import limits
from webapp.serving.doors import Doors

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"


def refusal(status: int, words: str) -> ProblemDetails:
    return details(status, [Problem("request", words)])


def test_what_is_whole_and_small_passes(behind: Behind) -> None:
    assert b" 200 " in behind.answer(HEAD + b"Content-Length: 3\r\nConnection: close\r\n\r\nabc")
    assert behind.bodies == [b"abc"]


def test_a_body_declared_too_large_is_refused_before_it_is_sent(behind: Behind) -> None:
    answer = behind.answer(HEAD + b"Content-Length: 1048577\r\nExpect: 100-continue\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413")
    assert answer.endswith(b"The request body is larger than 1 MB.")
    assert behind.bodies == []


def test_its_sender_gets_to_see_the_refusal_though_it_sends_on(behind: Behind) -> None:
    body = [b"x" * 2**20] * 4
    answer = behind.answer(HEAD + b"Content-Length: %d\r\n\r\n" % (4 * 2**20), *body)
    assert answer.startswith(b"HTTP/1.1 413")
    assert behind.bodies == []


@pytest.mark.parametrize("declared", [b"9" * 30, b"-1", b"1e3", "²".encode()])
def test_a_length_that_is_none_is_refused(behind: Behind, declared: bytes) -> None:
    assert behind.answer(HEAD + b"Content-Length: " + declared + b"\r\n\r\n")[:10] == b"HTTP/1.1 4"
    assert behind.bodies == []


@pytest.mark.parametrize("declared", [b"-1", b"1e3", b"", "²".encode()])
def test_nor_does_it_pass_where_a_servers_parser_lets_it(declared: bytes) -> None:
    """uvicorn's does not: what serves us need not be uvicorn."""
    sent: list[Any] = []
    headers = [(b"content-length", declared)]
    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": headers}

    async def never(*_: Any) -> Any:
        raise AssertionError("neither the body nor the application is asked")

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(Doors(never)(scope, never, send))
    assert sent[0]["status"] == 400
    assert sent[1]["body"] == b"Content-Length is not a number."


@pytest.mark.parametrize("count", [1, 50, 2000])
@pytest.mark.parametrize(
    "line", [b"GET / HTTP/1.1\r\nHost: x\r\n", b"GET /?" + b"q" * 30_000 + b" HTTP/1.1\r\nHost: x\r\n"]
)
def test_a_head_over_its_bound_is_refused_however_it_arrives(behind: Behind, line: bytes, count: int) -> None:
    """100,000 bytes of one header passed: they and the head's end came in one piece."""
    size = 66_000 // count
    headers = b"".join(b"X-%d: %s\r\n" % (n, b"x" * size) for n in range(count))
    answer = behind.answer(line + headers + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"longer than 65,536 bytes" in answer
    assert behind.bodies == []


def test_a_chunked_body_is_cut_at_the_bound(behind: Behind) -> None:
    chunk = b"80000\r\n" + b"x" * 2**19 + b"\r\n"
    answer = behind.answer(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", chunk, chunk, chunk, b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413")
    assert behind.bodies == []


def test_a_body_that_never_ends_is_408(behind: Behind) -> None:
    assert behind.answer(HEAD + b"Content-Length: 10\r\n\r\nabc").startswith(b"HTTP/1.1 408")
    assert behind.bodies == []


@pytest.mark.parametrize("sent", [b"", b"GET / HT", HEAD], ids=["nothing", "half a line", "half a head"])
def test_a_head_that_never_ends_is_closed(behind: Behind, sent: bytes) -> None:
    assert behind.answer(sent) == b""
    assert behind.bodies == []


def test_the_next_head_on_a_connection_is_waited_for_no_longer(behind: Behind) -> None:
    with behind.line() as line:
        line.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"ok" in line.recv(65536)
        line.sendall(b"GET / HT")
        assert until_closed(line) == b""


def test_a_head_fed_drop_by_drop_is_closed_all_the_same(behind: Behind) -> None:
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


def test_a_head_without_end_is_refused(behind: Behind) -> None:
    with behind.line() as line:
        with contextlib.suppress(ConnectionError):
            line.sendall(HEAD + b"X-A: " + b"b" * (2 * limits.HEAD_BYTES + 2**20))
        assert until_closed(line)[:12] in (b"HTTP/1.1 400", b"")


@pytest.mark.parametrize("path", [b"/api", b"/api/v1/jobs", b"//api/v1/jobs", b"/api?x"])
def test_a_program_is_refused_in_json_however_it_writes_the_path(behind: Behind, path: bytes) -> None:
    answer = behind.answer(b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999\r\nExpect: y\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413")
    assert json.loads(answer.partition(b"\r\n\r\n")[2]) == refusal(413, "The request body is larger than 1 MB.")
    assert b"content-type: application/problem+json" in answer


def test_a_page_is_refused_in_words(behind: Behind) -> None:
    answer = behind.answer(b"POST /apish HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999\r\nExpect: y\r\n\r\n")
    assert b"text/plain" in answer


@pytest.mark.parametrize(
    "sent", [b"no request\r\n\r\n", b"GET / HTTP/9.9.9\r\n\r\n", b"POST /api HTTP/1.1\r\n:\r\n\r\n"]
)
def test_what_is_no_http_is_refused_in_the_shape_of_every_refusal(behind: Behind, sent: bytes) -> None:
    head, _, body = behind.answer(sent).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert b"content-type: application/problem+json" in head
    assert json.loads(body) == refusal(400, "Invalid HTTP request received.")
    assert behind.bodies == []


def test_nobody_on_loopback_can_say_that_he_is_somebody_else() -> None:
    assert serve.config("127.0.0.1", 1).proxy_headers is False
