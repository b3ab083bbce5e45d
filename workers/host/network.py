"""Addresses and interfaces of this host. Host names are never resolved, because they can resolve to anything."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

import psutil

LOOPBACK = "127.0.0.1"
REDIS_PORT = 6379


def get_address_towards(url: str) -> str:
    """Return the address that this host uses to reach a server, or loopback if the server has no route."""
    try:
        parts = urlsplit(url)
        if not parts.hostname:  # a unix socket
            return LOOPBACK
        port = parts.port or REDIS_PORT
        family, kind, _, _, target = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # selects a route and sends nothing
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return LOOPBACK


def open_listener(address: str) -> socket.socket:
    """Listen on a port that the kernel chooses. Raises OSError if no interface has the address."""
    return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


def find_interface(address: str) -> str | None:
    """Return the name of the interface that has an address."""
    for name, entries in psutil.net_if_addrs().items():
        if any(address in (entry.address, entry.address.partition("%")[0]) for entry in entries):
            return name
    return None
