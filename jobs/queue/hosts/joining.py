"""A machine becomes a host, or shows that it still is one.

Join tokens: made by staff, shown once, kept as a hash, good for a while.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
from datetime import timedelta
from typing import Annotated, Any
from urllib.parse import urlsplit, urlunsplit

from django.conf import settings
from django.db import transaction
from django.db.models import F, Q, QuerySet
from django.utils import timezone
from pydantic import Field

from contracts.hosts import JoinRequest, JoinResponse
from jobs.core.credentials import derive_redis_passwords, derive_signing_keys
from jobs.core.redis_client import connect
from jobs.models import Host, JoinToken
from jobs.models.validators import Note
from jobs.queue.hosts.redis_access import create_user, get_redis_user
from planner.facts.validation import Problem, SpecError, StrictModel

LOOPBACK = ("localhost", "127.0.0.1", "::1")


class NameTakenError(Exception):
    """Another machine is the host of this name."""


class UnreachableRedisError(Exception):
    """The board knows no address of Redis that the machine could reach; says what to set."""


def register_host(told: JoinRequest, address: str) -> tuple[Host, bool]:
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
        get_redis_url(address)
        host.refresh_from_db()
    return host, joined


def has_joined(name: str, identity: str) -> bool:
    """Whether the machine of this identity is the host, and comes back without a token."""
    host = Host.objects.filter(name=name).first()
    return host is not None and _is_still(host, identity)


def create_join_response(host: Host, address: str) -> JoinResponse:
    """What a host works with, its Redis user made. Raises access.NoRightsError, redis.RedisError."""
    with connect() as client:
        create_user(client, host)
    key = derive_signing_keys(host.name, host.generation)[0]
    return JoinResponse(name=host.name, redis_url=_url(get_redis_url(address), host), key=key)


def get_redis_url(address: str) -> str:
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
        raise TokenError(f"{words}. Join with a join token.")
    token = use_token(told["token"], host.name)
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
        user = f"{get_redis_user(host.name)}:{derive_redis_passwords(host.name, host.generation)[0]}"
    return urlunsplit(parts._replace(netloc=f"{user}@{place}" if user else place))


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


TEXT_PREFIX = "mbj_"
MAX_TOKEN_USES = 10_000
MAX_TOKEN_LABELS = 16
FORGOTTEN_AFTER = timedelta(days=30)  # that it could be used last
SHORTEST_GIVEN = 32  # characters of one that an installation brings along
FEWEST_CHARACTERS = 8  # different ones


# As jobs.models.policy has labels.
Label = Annotated[str, Field(max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9._=-]*$")]


class JoinTokenRequest(StrictModel):
    """What a join token may be asked to be."""

    hours: int = Field(default=24, ge=1, le=365 * 24, description="Number of hours until the token expires.")
    uses: int | None = Field(
        default=1,
        ge=1,
        le=MAX_TOKEN_USES,
        description="Maximum number of hosts that can join with the token. null: unlimited.",
    )
    labels: list[Label] = Field(
        default=[],
        max_length=MAX_TOKEN_LABELS,
        description="Labels that a host gets when it joins with the token. Pools select hosts by label.",
    )
    note: Note = Field(default="", description="Purpose of the token.")


class TokenError(Exception):
    """Nobody joins with this; says why."""


def create_token(by: str, asked: JoinTokenRequest) -> tuple[JoinToken, str]:
    """A new token, and its text, which nobody sees again."""
    text = TEXT_PREFIX + secrets.token_urlsafe(32)
    return store_token(text, by, asked), text


def store_token(text: str, by: str, asked: JoinTokenRequest) -> JoinToken:
    """A token of this text; one that is there already lasts from now on, and stays revoked where it was.

    Raises:
        SpecError: the text could be guessed.
    """
    if len(text) < SHORTEST_GIVEN or len(set(text)) < FEWEST_CHARACTERS:
        words = (
            f"The token has {len(text)} characters, "
            f"of which {len(set(text))} are different. Use {SHORTEST_GIVEN} random characters."
        )
        raise SpecError([Problem("token", words)])
    told = {
        "note": asked.note,
        "created_by": by,
        "expires": timezone.now() + timedelta(hours=asked.hours),
        "most_uses": asked.uses,
        "labels": asked.labels,
        "uses": 0,
    }
    token, _ = JoinToken.objects.update_or_create(hash=_hash(text), defaults=told)
    return token


def use_token(text: str, host: str) -> JoinToken:
    """Take one use of a token, in the caller's transaction.

    Raises:
        TokenError: there is none to take.
    """
    now = timezone.now()
    found = JoinToken.objects.filter(hash=_hash(text)).first()
    if found is None:
        raise TokenError("The join token does not exist.")
    usable = Q(most_uses=None) | Q(uses__lt=F("most_uses"))
    taken = JoinToken.objects.filter(usable, pk=found.pk, revoked=None, expires__gt=now)
    if taken.update(uses=F("uses") + 1, last_used=now, last_host=host):
        return found
    found.refresh_from_db()
    raise TokenError(explain_invalid_token(found) or "This join token is invalid.")


def explain_invalid_token(token: JoinToken) -> str:
    """Why nobody joins with it any more; empty while somebody may."""
    if token.revoked is not None:
        return f"This join token was revoked at {token.revoked:%Y-%m-%d %H:%M:%S} UTC."
    if token.expires <= timezone.now():
        return f"This join token expired at {token.expires:%Y-%m-%d %H:%M:%S} UTC."
    if token.most_uses is not None and token.uses >= token.most_uses:
        return f"This join token has reached its maximum of {token.most_uses} hosts."
    return ""


def revoke_token(token: JoinToken) -> bool:
    """True when this call did."""
    return bool(JoinToken.objects.filter(pk=token.pk, revoked=None).update(revoked=timezone.now()))


def list_recent_tokens() -> QuerySet[JoinToken]:
    """All that could be used in the last 30 days."""
    return JoinToken.objects.filter(expires__gt=timezone.now() - FORGOTTEN_AFTER)


def delete_expired_tokens() -> int:
    """Drop those that nobody can use for 30 days; returns how many."""
    return JoinToken.objects.filter(expires__lte=timezone.now() - FORGOTTEN_AFTER).delete()[0]
