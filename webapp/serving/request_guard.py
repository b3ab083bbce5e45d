"""Outermost ASGI layer: rejects malformed, large, and slow requests before Django.

Django would write a body of any size to disk before it authenticates the client.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings

from jobs.api.problems import CONTENT_TYPE, build_request_problem
from jobs.core import errors
from webapp.logs import REQUEST_LOGGER
from webapp.serving import limits

log = logging.getLogger(REQUEST_LOGGER)

HEALTH_PATHS = ("/healthz", "/readyz")
PORTS = {"http": 80, "https": 443}

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


def is_api_path(path: str) -> bool:
    """Return whether a path belongs to the REST API, which returns errors as JSON."""
    return path.lstrip("/").partition("/")[0] == "api"


class RejectedRequestError(Exception):
    """The request is rejected with a status and a message."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


def build_problem(status: int, words: str) -> str:
    """Return the problem document of a rejected request."""
    return json.dumps(build_request_problem(status, words))


class DisconnectedError(Exception):
    """The client disconnected before the request was complete."""


class RequestGuard:
    """Checks the head of a request, reads its body within limits, and passes both on."""

    def __init__(self, application: Application) -> None:
        self._application = application

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._application(scope, receive, send)
            return
        headers = dict(reversed(scope["headers"]))  # the first value of a repeated header
        known = errors.set_request_id(headers.get(errors.REQUEST_ID_HEADER), headers.get(errors.TRACEPARENT_HEADER))
        if scope["type"] == "websocket":
            await self._socket(scope, receive, send)
        else:
            await self._request(scope, receive, _log_response(scope, send, known))

    async def _socket(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if _malformed(scope) or not _same_origin(scope):
            await send({"type": "websocket.close"})
            return
        await self._application(scope, receive, send)

    async def _request(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        try:
            _check_head(scope)
            async with asyncio.timeout(limits.BODY_TIMEOUT_S):
                body = await _read_body(receive)
        except DisconnectedError:
            return
        except TimeoutError:
            await _refuse(
                scope, receive, send, 408, f"The request body did not arrive within {limits.BODY_TIMEOUT_S:.0f} s."
            )
            return
        except RejectedRequestError as error:
            await _refuse(scope, receive, send, error.status, str(error))
            return
        await self._application(scope, _replay(body, receive), _limit_send_time(send))


def _log_response(scope: MutableMapping[str, Any], send: Send, known: str) -> Send:
    """Add the request ID to the response, and log the response without the query."""
    began = time.monotonic()

    async def send_and_log(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {
                **message,
                "headers": [*message.get("headers", []), (errors.REQUEST_ID_HEADER, known.encode())],
            }
            answered = {"method": scope["method"], "path": scope["path"], "status": message["status"]}
            # Proxies and container engines check the health every few seconds.
            level = logging.DEBUG if scope["path"] in HEALTH_PATHS and message["status"] < 400 else logging.INFO
            log.log(level, "answered", extra={**answered, "seconds": round(time.monotonic() - began, 4)})
        await send(message)

    return send_and_log


def _malformed(scope: MutableMapping[str, Any]) -> str | None:
    """Return why Django or Channels could not read this request, or None."""
    if "\x00" in scope["path"] or b"%00" in scope["query_string"]:
        return "The URL contains a NUL character."
    for name, value in scope["headers"]:
        if name == b"cookie" and b"\\000" in value:  # NUL in a quoted cookie
            return "A cookie contains a NUL character."
        if name == b"origin" and not _is_url(value.decode("latin-1")):
            return "The Origin header is not a valid URL."
    return None


def _same_origin(scope: MutableMapping[str, Any]) -> bool:
    """Return whether the request comes from a page of the board.

    A browser sends cookies to all ports of a host, and a job can serve pages on a port.
    """
    headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
    ours = f"{'https' if settings.HTTPS else 'http'}://{headers.get(b'host', '')}"
    origin = _parse_origin(headers.get(b"origin", ""))
    return origin is not None and origin == _parse_origin(ours)


def _parse_origin(address: str) -> tuple[str, str, int] | None:
    """Return scheme, host, and port of an HTTP address, else None."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        return None
    if parts.scheme not in PORTS or not parts.hostname:
        return None
    return parts.scheme, parts.hostname, port or PORTS[parts.scheme]


def _is_url(text: str) -> bool:
    try:
        _ = urlsplit(text).port
    except ValueError:
        return False
    return True


def _check_head(scope: MutableMapping[str, Any]) -> None:
    if words := _malformed(scope):
        raise RejectedRequestError(400, words)
    declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    if not declared.isdigit():
        raise RejectedRequestError(400, "Content-Length is not a number.")
    if len(declared) > 18 or int(declared) > limits.MAX_BODY_BYTES:
        raise RejectedRequestError(413, f"The request body is larger than {limits.MAX_BODY_BYTES // 2**20} MB.")


async def _read_body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise DisconnectedError
        part = message.get("body", b"")
        size += len(part)
        if size > limits.MAX_BODY_BYTES:
            raise RejectedRequestError(413, f"The request body is larger than {limits.MAX_BODY_BYTES // 2**20} MB.")
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a receiver that yields the body as one message, and then waits for the disconnect."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return pending.pop() if pending else await receive()

    return receive_again


def _limit_send_time(send: Send) -> Send:
    """Return a sender that raises TimeoutError if the client reads nothing for SEND_TIMEOUT_S."""

    async def send_in_time(message: Message) -> None:
        async with asyncio.timeout(limits.SEND_TIMEOUT_S):
            await send(message)

    return send_in_time


async def _refuse(scope: MutableMapping[str, Any], receive: Receive, send: Send, status: int, words: str) -> None:
    """Send a response, and discard the rest of the body. A reset connection would lose the response."""
    in_json = is_api_path(scope["path"])
    text = build_problem(status, words) if in_json else words
    content_type = CONTENT_TYPE.encode() if in_json else b"text/plain; charset=utf-8"
    headers = [
        (b"content-type", content_type),
        (b"content-length", str(len(text)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
    # A client with "Expect: 100-continue" has sent no body.
    if status == 413 and not any(name == b"expect" for name, _ in scope["headers"]):
        await _discard_body(receive)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard_body(receive: Receive) -> None:
    left = limits.MAX_LINGER_BYTES
    try:
        async with asyncio.timeout(limits.LINGER_TIMEOUT_S):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


UNKNOWN = "0.0.0.0"  # noqa: S104  # no machine has it


def normalize_client_address(application: Application) -> Application:
    """Wrap an ASGI application so that the client address is a valid IP address."""

    async def run(scope: Any, receive: Any, send: Any) -> None:
        if client := scope.get("client"):
            scope["client"] = (parse_client_address(client[0]), client[1])
        await application(scope, receive, send)

    return run


def parse_client_address(text: str) -> str:
    """Return an IP address without its zone, or 0.0.0.0. A trusted proxy may send "unknown"."""
    try:
        return str(ipaddress.ip_address(text.partition("%")[0]))
    except ValueError:
        return UNKNOWN
