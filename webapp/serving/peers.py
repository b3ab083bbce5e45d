"""Who asks is an address, or 0.0.0.0: a trusted proxy may pass on "unknown", and who is on this link comes with a zone,
which databases take for no address."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable
from typing import Any

UNKNOWN = "0.0.0.0"  # noqa: S104  # of nobody, and so of nobody here
Application = Callable[[Any, Any, Any], Awaitable[None]]


def addressed(application: Application) -> Application:
    """ASGI: around all that reads who asks. Who passed it on is not known any more where this stands."""

    async def answered(scope: Any, receive: Any, send: Any) -> None:
        if client := scope.get("client"):
            scope["client"] = (address_of(client[0]), client[1])
        await application(scope, receive, send)

    return answered


def address_of(told: str) -> str:
    """Without its zone."""
    try:
        return str(ipaddress.ip_address(told.partition("%")[0]))
    except ValueError:
        return UNKNOWN
