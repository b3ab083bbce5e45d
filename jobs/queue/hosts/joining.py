"""A machine becomes a host, or shows that it still is one."""

from __future__ import annotations

import hashlib
import ipaddress
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from contracts.hosts import JoinRequest, JoinResponse
from jobs.core.redis_connection import connect
from jobs.core.sealed_values import redis_passwords, signing_keys
from jobs.models import Host
from jobs.queue.hosts import tokens
from jobs.queue.hosts.access import admit
from jobs.queue.hosts.rights import user_of

LOOPBACK = ("localhost", "127.0.0.1", "::1")


class NameTakenError(Exception):
    """Another machine is the host of this name."""


class UnreachableRedisError(Exception):
    """The board knows no address of Redis that the machine could reach; says what to set."""


def become(told: JoinRequest, address: str) -> tuple[Host, bool]:
    """The host that this machine is, and whether it became so just now. Of a transaction: all of it or nothing.

    Joining again with the same identity changes nothing, so that whoever lost the answer asks again.

    Raises:
        tokens.TokenError, NameTakenError, UnreachableRedisError.
    """
    with transaction.atomic():
        host, _ = Host.objects.select_for_update(no_key=True).get_or_create(
            name=told["name"], defaults={**_described(told), "last_seen": timezone.now()}
        )
        joined = not _is_still(host, told["identity"])
        if joined:
            _admit(host, told, address)
        redis_location(address)
        host.refresh_from_db()
    return host, joined


def has_joined(name: str, identity: str) -> bool:
    """Whether the machine of this identity is the host, and comes back without a token."""
    host = Host.objects.filter(name=name).first()
    return host is not None and _is_still(host, identity)


def equip(host: Host, address: str) -> JoinResponse:
    """What a host works with, its Redis user made. Raises access.NoRightsError, redis.RedisError."""
    with connect() as client:
        admit(client, host)
    key = signing_keys(host.name, host.generation)[0]
    return JoinResponse(name=host.name, redis_url=_url(redis_location(address), host), key=key)


def redis_location(address: str) -> str:
    """The URL of Redis as who asks from this address should use it. Raises UnreachableRedisError."""
    given = settings.REDIS_FOR_HOSTS or settings.REDIS_URL
    parts = urlsplit(given)
    if parts.scheme not in ("redis", "rediss"):
        raise UnreachableRedisError(
            f"The board uses Redis over {parts.scheme}://, which hosts cannot reach. Set MESHBOARD_REDIS_FOR_HOSTS."
        )
    if parts.hostname in LOOPBACK and not _is_loopback(address):
        raise UnreachableRedisError(
            f"Redis is at {parts.hostname}, which {address} cannot reach. "
            "Set MESHBOARD_REDIS_FOR_HOSTS to an address that hosts can reach."
        )
    return given


def _is_still(host: Host, identity: str) -> bool:
    return host.removed is None and host.generation > 0 and host.identity_hash == _hash(identity)


def _admit(host: Host, told: JoinRequest, address: str) -> None:
    """Raises TokenError, NameTakenError."""
    if "token" not in told:
        was_it = host.removed is not None and host.identity_hash == _hash(told["identity"])  # nobody else is told
        words = f"Host {host.name} was removed" if was_it else f"This machine has not joined as host {host.name}"
        raise tokens.TokenError(f"{words}. Join with a join token.")
    token = tokens.spend(told["token"], host.name)
    if host.generation > 0 and host.removed is None:
        raise NameTakenError(
            f"Another machine has joined as host {host.name}. Use another name, or ask staff to remove the host."
        )
    now = timezone.now()
    changes: dict[str, Any] = {
        "generation": host.generation + 1,
        "identity_hash": _hash(told["identity"]),
        "joined": now,
        "joined_from": address[:45],
        "labels": sorted({*(host.labels if host.removed is None else []), *token.labels}),
    }
    if host.removed is not None:  # another machine, maybe: nothing that was known of it holds
        changes |= {"removed": None, "drained": False, "last_seen": now, "incarnation": "", "began": 0.0}
        changes |= {"sequence": 0, "holding": [], "profile": None, "profiled": None, "facts": None, "use": None}
        changes |= _described(told)
    Host.objects.filter(pk=host.pk).update(**changes)


def _described(told: JoinRequest) -> dict[str, Any]:
    kept = ("slots", "device", "device_name", "memory_bytes", "boot_id")
    described: dict[str, Any] = {name: told[name] for name in kept}  # type: ignore[literal-required]
    return described | ({"facts": told["facts"]} if "facts" in told else {})


def _url(location: str, host: Host) -> str:
    """`location` with the host's own user, or in shared mode with the board's."""
    parts = urlsplit(location)
    own, at, place = parts.netloc.rpartition("@")
    if settings.REDIS_ACCESS == "shared":
        user = own if at else urlsplit(settings.REDIS_URL).netloc.rpartition("@")[0]
    else:
        user = f"{user_of(host.name)}:{redis_passwords(host.name, host.generation)[0]}"
    return urlunsplit(parts._replace(netloc=f"{user}@{place}" if user else place))


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
