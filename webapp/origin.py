"""Whose pages may open a socket."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from channels.security.websocket import WebsocketDenier
from django.conf import settings

PORTS = {"http": 80, "https": 443}

Application = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[Any]]


class SameOrigin:
    """Refuses a socket that a page of another scheme, host or port opens, as Django does with forms.

    A browser sends the visitor's cookie to each port of a host, and a job may serve pages on one.
    """

    def __init__(self, application: Application) -> None:
        self._application = application

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> Any:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        ours = f"{'https' if settings.HTTPS else 'http'}://{headers.get(b'host', '')}"
        origin = _place(headers.get(b"origin", ""))
        if origin is None or origin != _place(ours):
            return await WebsocketDenier()(scope, receive, send)
        return await self._application(scope, receive, send)


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
