"""The outermost ASGI layer: what is malformed, too large or too slow never reaches Django.

Django's own handler spools a body of any size to disk before it asks who sent it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings

from jobs.api.http.problems import CONTENT_TYPE, WHOLE, details
from jobs.core import request_id
from planner.facts.validation import Problem
from webapp.logs import REQUESTS
from webapp.serving import limits

log = logging.getLogger(REQUESTS)

PORTS = {"http": 80, "https": 443}

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


def is_api(path: str) -> bool:
    """Whether a program asked: it is answered in JSON, however it writes the path."""
    return path.lstrip("/").partition("/")[0] == "api"


class RefusedError(Exception):
    """The status and the words of a refusal."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


def problem(status: int, words: str) -> str:
    """A refusal's body, in the API's shape."""
    return json.dumps(details(status, [Problem(WHOLE, words)]))


class DisconnectedError(Exception):
    """The client went away before its request was whole."""


class Doors:
    """Checks a request's head, takes in its body within bounds, and hands both on."""

    def __init__(self, application: Application) -> None:
        self._application = application

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._application(scope, receive, send)
            return
        known = request_id.begin(next((value for name, value in scope["headers"] if name == request_id.HEADER), None))
        if scope["type"] == "websocket":
            await self._socket(scope, receive, send)
        else:
            await self._request(scope, receive, _told(scope, send, known))

    async def _socket(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if _malformed(scope) or not _same_origin(scope):
            await send({"type": "websocket.close"})
            return
        await self._application(scope, receive, send)

    async def _request(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        try:
            _check_head(scope)
            async with asyncio.timeout(limits.BODY_S):
                body = await _whole_body(receive)
        except DisconnectedError:
            return
        except TimeoutError:
            await _refuse(scope, receive, send, 408, f"The request body did not arrive within {limits.BODY_S:.0f} s.")
            return
        except RefusedError as error:
            await _refuse(scope, receive, send, error.status, str(error))
            return
        await self._application(scope, _replay(body, receive), _patient(send))


def _told(scope: MutableMapping[str, Any], send: Send, known: str) -> Send:
    """The answer names the request's id, and the log the answer: never what stood behind the `?`."""
    began = time.monotonic()

    async def telling(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), (request_id.HEADER, known.encode())]}
            answered = {"method": scope["method"], "path": scope["path"], "status": message["status"]}
            log.info("answered", extra={**answered, "seconds": round(time.monotonic() - began, 4)})
        await send(message)

    return telling


def _malformed(scope: MutableMapping[str, Any]) -> str | None:
    """What no honest client sends, and what comes after us would raise on."""
    if "\x00" in scope["path"] or b"%00" in scope["query_string"]:
        return "The URL contains a NUL character."
    for name, value in scope["headers"]:
        if name == b"cookie" and b"\\000" in value:  # a quoted cookie's way to write NUL
            return "A cookie contains a NUL character."
        if name == b"origin" and not _is_address(value.decode("latin-1")):
            return "The Origin header is not a valid URL."
    return None


def _same_origin(scope: MutableMapping[str, Any]) -> bool:
    """Whether a page of the board's own scheme, host and port asks, as Django has it of forms: a browser sends the
    visitor's cookie to each port of a host, and a job may serve pages on one."""
    headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
    ours = f"{'https' if settings.HTTPS else 'http'}://{headers.get(b'host', '')}"
    origin = _place(headers.get(b"origin", ""))
    return origin is not None and origin == _place(ours)


def _place(address: str) -> tuple[str, str, int] | None:
    """Scheme, host and port of an address on the web, None of anything else."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        return None
    if parts.scheme not in PORTS or not parts.hostname:
        return None
    return parts.scheme, parts.hostname, port or PORTS[parts.scheme]


def _is_address(text: str) -> bool:
    try:
        _ = urlsplit(text).port
    except ValueError:
        return False
    return True


def _check_head(scope: MutableMapping[str, Any]) -> None:
    if words := _malformed(scope):
        raise RefusedError(400, words)
    declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    if not declared.isdigit():
        raise RefusedError(400, "Content-Length is not a number.")
    if len(declared) > 18 or int(declared) > limits.BODY_BYTES:
        raise RefusedError(413, f"The request body is larger than {limits.BODY_BYTES // 2**20} MB.")


async def _whole_body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise DisconnectedError
        part = message.get("body", b"")
        size += len(part)
        if size > limits.BODY_BYTES:
            raise RefusedError(413, f"The request body is larger than {limits.BODY_BYTES // 2**20} MB.")
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body as one message, then what the server says, which is only that the client went away."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed


def _patient(send: Send) -> Send:
    """A peer that takes nothing for SEND_S loses its connection: the error ends the request."""

    async def within(message: Message) -> None:
        async with asyncio.timeout(limits.SEND_S):
            await send(message)

    return within


async def _refuse(scope: MutableMapping[str, Any], receive: Receive, send: Send, status: int, words: str) -> None:
    """Answer, then throw away some of what is still coming: a reset connection would lose the answer."""
    in_json = is_api(scope["path"])
    text = problem(status, words) if in_json else words
    content_type = CONTENT_TYPE.encode() if in_json else b"text/plain; charset=utf-8"
    headers = [
        (b"content-type", content_type),
        (b"content-length", str(len(text)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
    # Who asked first ("Expect: 100-continue") has sent nothing.
    if status == 413 and not any(name == b"expect" for name, _ in scope["headers"]):
        await _throw_away(receive)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _throw_away(receive: Receive) -> None:
    left = limits.LINGER_BYTES
    try:
        async with asyncio.timeout(limits.LINGER_S):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return
