"""Whose tries are counted together where a bound is by address."""

from __future__ import annotations

from ipaddress import IPv6Address, IPv6Network

from django.http import HttpRequest

CUSTOMER_BITS = 64  # of an IPv6 address, whose others one customer has too: RFC 6177


def origin(request: HttpRequest) -> str:
    """An IPv6 network that one customer has whole, or an address."""
    address = str(request.META.get("REMOTE_ADDR", ""))
    try:
        found = IPv6Address(address)
    except ValueError:
        return address
    if found.ipv4_mapped:
        return str(found.ipv4_mapped)
    return str(IPv6Network((found, CUSTOMER_BITS), strict=False).network_address)
