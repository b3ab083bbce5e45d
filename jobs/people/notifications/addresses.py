"""Which addresses a webhook may be sent to. A name is resolved once, and what was checked is what is connected to."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any

import httpx

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

# https://www.iana.org/assignments/ipv6-address-space: all unicast that was ever given out. What maps IPv4 into IPv6
# lies elsewhere, but for these, of which the first two are retired, and the last two say nothing of where they lead.
GLOBAL_UNICAST = IPv6Network("2000::/3")
TUNNELS = tuple(ip_network(text) for text in ("2001::/32", "2002::/16", "2001:10::/28", "2001:20::/28"))
# Beside what `ipaddress` knows in every version of Python: https://www.iana.org/assignments/iana-ipv4-special-registry
NOT_GLOBAL = tuple(ip_network(text) for text in ("100.64.0.0/10", "192.0.0.0/24", "192.88.99.0/24", "198.18.0.0/15"))


class RefusedAddressError(Exception):
    """Nothing is sent there; says why."""


def name_of(url: httpx.URL) -> str:
    """The host as a browser asks for it: Python itself would make another name of a Unicode one, by IDNA 2003."""
    return url.raw_host.decode("ascii")


def is_inside(address: Address, allowed: Iterable[Network]) -> bool:
    """Whether it lies in one of the networks that the board's settings name."""
    plain = _plain(address)
    return any(plain.version == network.version and plain in network for network in allowed)


def may_reach(address: Address, allowed: Iterable[Network]) -> bool:
    """Whether it is on the public internet, or inside where the settings allow it."""
    plain = _plain(address)
    if is_inside(plain, allowed):
        return True
    if isinstance(plain, IPv6Address):
        return plain in GLOBAL_UNICAST and plain.is_global and not any(plain in tunnel for tunnel in TUNNELS)
    hidden = any(plain in network for network in NOT_GLOBAL)
    return plain.is_global and not (plain.is_multicast or plain.is_reserved or hidden)


def literal(host: str) -> list[Address]:
    """The address that a host is itself, however it is written (2130706433, 0x7f.1, ::1); none where it is a name."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return []
    return _addresses(found)


def resolve(host: str, port: int, allowed: Iterable[Network]) -> list[Address]:
    """Where a name leads, each address checked; blocks for as long as the resolver does.

    Raises:
        RefusedAddressError: it leads nowhere, or one of its addresses is inside.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        found = []
    if not found:
        raise RefusedAddressError(f"{host} has no IP address")
    return checked(host, _addresses(found), allowed)


def checked(host: str, addresses: list[Address], allowed: Iterable[Network]) -> list[Address]:
    """These, if all of them may be reached.

    Raises:
        RefusedAddressError: one may not.
    """
    networks = tuple(allowed)
    if not all(may_reach(address, networks) for address in addresses):
        # Which address is not told: it would be the board's own resolver that anybody asks about names inside.
        raise RefusedAddressError(
            f"{host} resolves to a private address, and MESHBOARD_WEBHOOK_NETWORKS does not allow this address"
        )
    return addresses


def _addresses(found: Iterable[Any]) -> list[Address]:
    return list(dict.fromkeys(_plain(ip_address(str(sockaddr[0]))) for *_, sockaddr in found))


def _plain(address: Address) -> Address:
    """IPv4 as itself where IPv6 only carries it."""
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address
