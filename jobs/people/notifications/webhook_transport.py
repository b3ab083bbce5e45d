"""Send webhook messages: check the address, sign the body, and post it.

A name is resolved once, so the checked address is the address of the connection. Signatures follow Stripe
(https://docs.stripe.com/webhooks#verify-manually): `t=SECONDS,v1=HEX`, HMAC-SHA256 of `SECONDS.BODY`, with one v1 per
valid secret. Secrets are derived from the secret key of the board and the generation of the webhook.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import socket
import ssl
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any

import httpx
from django.conf import settings
from django.utils import timezone
from django.utils.crypto import salted_hmac

from jobs.models import Webhook

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

# https://www.iana.org/assignments/ipv6-address-space, without tunnels and identifiers that hide their destination.
GLOBAL_UNICAST = IPv6Network("2000::/3")
TUNNELS = tuple(ip_network(text) for text in ("2001::/32", "2002::/16", "2001:10::/28", "2001:20::/28"))
# Missing from `ipaddress` in some Python versions: https://www.iana.org/assignments/iana-ipv4-special-registry
NOT_GLOBAL = tuple(
    ip_network(text)
    for text in ("100.64.0.0/10", "192.0.0.0/24", "192.88.99.0/24", "198.18.0.0/15", "233.252.0.0/24", "3fff::/20")
)
# Services of cloud providers for their own machines. They give secrets to every sender, so no setting allows them.
CLOUD_SERVICES = frozenset(
    ip_address(text)
    for text in (
        "168.63.129.16",  # Azure
        "169.254.169.254",  # metadata of most providers
        "169.254.170.2",  # Amazon ECS
        "169.254.170.23",  # Amazon EKS
        "fd00:ec2::23",  # Amazon EKS
        "fd00:ec2::254",  # Amazon EC2
        "fd20:ce::254",  # Google Cloud
        "100.100.100.200",  # Alibaba Cloud
        "192.0.0.192",  # Oracle Cloud
    )
)
DEFAULT_PORTS = (80, 443)


class RefusedAddressError(Exception):
    """A webhook must not send to this address. The text says why."""


def get_host_name(url: httpx.URL) -> str:
    """Return the host name in the encoding of browsers. Python encodes Unicode names by IDNA 2003."""
    return url.raw_host.decode("ascii")


def is_in_networks(address: Address, allowed: Iterable[Network]) -> bool:
    """Return whether the address is in one of the networks from the settings."""
    plain = _unwrap_ipv4(address)
    if plain in CLOUD_SERVICES:
        return False
    return any(plain.version == network.version and plain in network for network in allowed)


def may_reach(address: Address, allowed: Iterable[Network]) -> bool:
    """Return whether the address is public or in an allowed network."""
    plain = _unwrap_ipv4(address)
    if is_in_networks(plain, allowed):
        return True
    hidden = plain in CLOUD_SERVICES or any(plain in network for network in (*NOT_GLOBAL, *TUNNELS))
    if hidden or not plain.is_global:
        return False
    return plain in GLOBAL_UNICAST if isinstance(plain, IPv6Address) else not (plain.is_multicast or plain.is_reserved)


def check_port(url: httpx.URL, allowed: Iterable[int]) -> int:
    """Return the port of a webhook. Raises RefusedAddressError."""
    port = url.port or (443 if url.scheme == "https" else 80)
    if port not in (*DEFAULT_PORTS, *allowed):
        raise RefusedAddressError(
            f"`url` has port {port}. Use port 80 or 443, or ask an admin to add the port to MESHBOARD_WEBHOOK_PORTS."
        )
    return port


def parse_address_literal(host: str) -> list[Address]:
    """Return the address in any notation (2130706433, 0x7f.1, ::1), or nothing for a name."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return []
    return _get_unique_addresses(found)


def resolve(host: str, port: int, allowed: Iterable[Network]) -> list[Address]:
    """Resolve a name and check its addresses. Blocks. Raises RefusedAddressError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        found = []
    if not found:
        raise RefusedAddressError(f"{host} has no IP address")
    return check_addresses(host, _get_unique_addresses(found), allowed)


def check_addresses(host: str, addresses: list[Address], allowed: Iterable[Network]) -> list[Address]:
    """Return the addresses, or raise RefusedAddressError if one of them is private."""
    networks = tuple(allowed)
    if not all(may_reach(address, networks) for address in addresses):
        # The message hides the address: otherwise users could query the internal resolver of the board.
        raise RefusedAddressError(
            f"{host} resolves to a private address, and MESHBOARD_WEBHOOK_NETWORKS does not allow this address"
        )
    return addresses


def _get_unique_addresses(found: Iterable[Any]) -> list[Address]:
    return list(dict.fromkeys(_unwrap_ipv4(ip_address(str(sockaddr[0]))) for *_, sockaddr in found))


def _unwrap_ipv4(address: Address) -> Address:
    # An IPv4 address that is mapped into IPv6.
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


WEBHOOK_PREFIX = "mbw_"
OLD_SECRET_LIFETIME = timedelta(days=1)


def get_secret(hook: Webhook) -> str:
    """Return the current secret, which is shown once."""
    return _derive_secret(settings.SECRET_KEY, hook.id, hook.generation)


def get_valid_secrets(hook: Webhook) -> list[str]:
    """Return the secrets that a receiver may know, from before a recent rotation and from fallback keys."""
    recent = hook.rotated is not None and timezone.now() - hook.rotated < OLD_SECRET_LIFETIME
    generations = [hook.generation, hook.generation - 1] if recent else [hook.generation]
    keys = [settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS]
    return [_derive_secret(key, hook.id, generation) for generation in generations for key in keys]


def sign_body(secrets: list[str], seconds: int, body: bytes) -> str:
    """Return the value of the signature header."""
    signed = b"%d.%s" % (seconds, body)
    made = [hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest() for secret in secrets]
    return ",".join([f"t={seconds}", *(f"v1={one}" for one in made)])


def _derive_secret(key: str, hook: str, generation: int) -> str:
    mac = salted_hmac("meshboard.webhook", f"{generation}:{hook}", key, algorithm="sha256")
    return WEBHOOK_PREFIX + mac.hexdigest()


POST_TIMEOUT_S = 10.0  # from the name lookup to the response headers
MAX_ADDRESSES = 3  # per name
MAX_RESULT_CHARACTERS = 300


@dataclass(frozen=True)
class WebhookMessage:
    key: str
    event: str
    body: bytes


@dataclass(frozen=True)
class SendResult:
    """Result of a try. `status`: HTTP status, None without a response."""

    delivered: bool
    seconds: float
    status: int | None
    words: str


async def post_message(
    letter: WebhookMessage,
    url: str,
    secrets: list[str],
    *,
    allowed: list[Network],
    trust: ssl.SSLContext,
    resolvers: ThreadPoolExecutor,
) -> SendResult:
    """Send a message and return the result. Never raises."""
    began = time.monotonic()
    status = None
    try:
        async with asyncio.timeout(POST_TIMEOUT_S):
            status = await _send(letter, httpx.URL(url), secrets, allowed, trust, resolvers)
        words = f"answered {status}"
        if 300 <= status < 400:
            words += ", redirects are not followed"
    except TimeoutError:
        words = f"the receiver did not answer within {POST_TIMEOUT_S:g} s"
    except RefusedAddressError as error:
        words = str(error)
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
    delivered = status is not None and 200 <= status < 300
    return SendResult(delivered, round(time.monotonic() - began, 3), status, words[:MAX_RESULT_CHARACTERS])


async def _send(
    letter: WebhookMessage,
    url: httpx.URL,
    secrets: list[str],
    allowed: list[Network],
    trust: ssl.SSLContext,
    resolvers: ThreadPoolExecutor,
) -> int:
    """Return the HTTP status of the response."""
    port = check_port(url, settings.WEBHOOK_PORTS)
    found = await asyncio.get_running_loop().run_in_executor(resolvers, resolve, get_host_name(url), port, allowed)
    if url.scheme != "https" and not all(is_in_networks(address, allowed) for address in found):
        raise RefusedAddressError("unencrypted http:// is allowed only for addresses in MESHBOARD_WEBHOOK_NETWORKS")
    seconds = int(time.time())
    headers = {
        "Host": url.netloc.decode("ascii"),
        "Content-Type": "application/json",
        "User-Agent": "Meshboard",
        "Meshboard-Delivery": letter.key,
        "Meshboard-Event": letter.event,
        "Meshboard-Signature": sign_body(secrets, seconds, letter.body),
    }
    # A proxy would resolve the name again, so the environment is ignored.
    async with httpx.AsyncClient(
        verify=trust, trust_env=False, timeout=POST_TIMEOUT_S, follow_redirects=False
    ) as client:
        *others, last = found[:MAX_ADDRESSES]
        for address in others:
            with contextlib.suppress(httpx.ConnectError):
                return await _post_to_address(client, url, address, headers, letter.body)
        return await _post_to_address(client, url, last, headers, letter.body)


async def _post_to_address(
    client: httpx.AsyncClient, url: httpx.URL, address: Address, headers: dict[str, str], body: bytes
) -> int:
    # The certificate and the Host header use the name.
    pinned = url.copy_with(host=str(address))
    extensions = {"sni_hostname": get_host_name(url)}
    async with client.stream("POST", pinned, headers=headers, content=body, extensions=extensions) as answer:
        return answer.status_code
