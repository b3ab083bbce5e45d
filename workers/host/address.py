"""Where other hosts reach this one, and through which interface. Names are never asked: they resolve to anything."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

import psutil

LOOPBACK = "127.0.0.1"
REDIS_PORT = 6379


def address_towards(url: str) -> str:
    """Our address on the way to a server; loopback where there is no way to it."""
    try:
        parts = urlsplit(url)
        where, port = parts.hostname, parts.port or REDIS_PORT
        if not where:  # a unix socket
            return LOOPBACK
        family, kind, _, _, target = socket.getaddrinfo(where, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:  # connecting sends nothing: it asks for the route
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return LOOPBACK


def listening(address: str) -> socket.socket:
    """At a port that the kernel chose. Raises OSError where no interface has the address."""
    return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


def interface_of(address: str) -> str | None:
    """The interface that has an address, None when none has."""
    for name, held in psutil.net_if_addrs().items():
        if any(address in (one.address, one.address.partition("%")[0]) for one in held):
            return name
    return None
