"""Addresses that webhooks can reach: public ones, and the private networks in the settings."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import httpx
import pytest

from jobs.people.notifications.webhook_transport import (
    RefusedAddressError,
    check_port,
    is_in_networks,
    may_reach,
    parse_address_literal,
    resolve,
)

PRIVATE = (
    *("127.0.0.1", "127.8.9.10", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
    *("192.0.0.192", "198.18.0.1", "192.88.99.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1"),
    *("::", "::1", "fe80::1", "fe80::1%1", "fc00::1", "fd12:3456::1", "ff02::1", "fec0::1", "2001:db8::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1", "64:ff9b::7f00:1"),
    *("198.51.100.7", "203.0.113.9", "233.252.0.1", "3fff::1", "168.63.129.16", "::ffff:168.63.129.16"),
    *("64:ff9b:1::1", "2002:7f00:1::1", "2001:0:4136:e378:8000:63bf:80ff:fffe", "100::1", "5f00::1"),
)
PUBLIC = ("93.184.216.34", "8.8.8.8", "2606:4700::1111", "2a00:1450:4001::1", "::ffff:8.8.8.8")


@pytest.mark.parametrize("text", PRIVATE)
def test_webhooks_cannot_reach_private_addresses(text: str) -> None:
    assert not may_reach(ip_address(text), [])


@pytest.mark.parametrize("text", PUBLIC)
def test_webhooks_can_reach_public_addresses(text: str) -> None:
    assert may_reach(ip_address(text), [])


@pytest.mark.parametrize("text", ["168.63.129.16", "169.254.169.254", "fd00:ec2::254", "::ffff:100.100.100.200"])
def test_settings_cannot_allow_services_of_cloud_providers(text: str) -> None:
    allowed = [ip_network(network) for network in ("0.0.0.0/1", "128.0.0.0/1", "fd00::/8", f"{text}")]
    assert not may_reach(ip_address(text), allowed)
    assert not is_in_networks(ip_address(text), allowed)


@pytest.mark.parametrize(
    ("url", "port"),
    [
        ("https://hooks.example/x", 443),
        ("http://hooks.example", 80),
        ("https://hooks.example:80", 80),
        ("https://hooks.example:9000", 9000),
    ],
)
def test_ports_that_webhooks_can_use(url: str, port: int) -> None:
    assert check_port(httpx.URL(url), [9000]) == port


@pytest.mark.parametrize(
    "url", ["https://hooks.example:22", "https://hooks.example:6379", "http://[2606:4700::1]:8080"]
)
def test_rejects_other_ports(url: str) -> None:
    with pytest.raises(RefusedAddressError, match="add the port to MESHBOARD_WEBHOOK_PORTS"):
        check_port(httpx.URL(url), [9000])


def test_settings_allow_only_the_listed_networks() -> None:
    allowed = [ip_network("10.1.0.0/16"), ip_network("fd12::/16")]
    for text in ("10.1.2.3", "::ffff:10.1.2.3", "fd12::1"):
        assert may_reach(ip_address(text), allowed)
        assert is_in_networks(ip_address(text), allowed)
    for text in ("10.2.0.1", "127.0.0.1", "fd13::1"):
        assert not may_reach(ip_address(text), allowed)


@pytest.mark.parametrize("host", ["2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "127.1", "::ffff:7f00:1", "0"])
def test_rejects_private_addresses_in_every_notation(host: str) -> None:
    (address,) = parse_address_literal(host)
    assert not may_reach(address, [])
    with pytest.raises(RefusedAddressError, match="resolves to a private address"):
        resolve(host, 443, [])


def test_rejects_names_without_a_public_address() -> None:
    assert parse_address_literal("hooks.example") == []
    with pytest.raises(RefusedAddressError, match="has no IP address"):
        resolve("nothing.invalid", 443, [])
    with pytest.raises(RefusedAddressError, match=r"resolves to a private address"):
        resolve("localhost", 443, [])


def test_rejects_a_name_that_resolves_to_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: [])
    with pytest.raises(RefusedAddressError, match="has no IP address"):
        resolve("empty.example", 443, [])


def test_rejects_a_name_with_one_private_address(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = [(2, 1, 6, "", ("93.184.216.34", 443)), (2, 1, 6, "", ("10.0.0.1", 443))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: addresses)
    with pytest.raises(RefusedAddressError, match=r"resolves to a private address"):
        resolve("half.example", 443, [])
