"""Join machines as hosts, and manage join tokens, which are stored as hashes."""

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

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
TEXT_PREFIX = "mbj_"
MAX_TOKEN_USES = 10_000
MAX_TOKEN_LABELS = 16
DELETED_AFTER = timedelta(days=30)  # of the expiry of a token
MIN_TOKEN_CHARACTERS = 32
MIN_DIFFERENT_CHARACTERS = 8
# Equal to the rule for labels in jobs.models.policy.
Label = Annotated[str, Field(max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9._=-]*$")]


class NameTakenError(Exception):
    """Another machine has joined with this name."""


class UnreachableRedisError(Exception):
    """The machine cannot reach the address of Redis. The message says what to set."""


class TokenError(Exception):
    """The join token is missing or invalid. The message says why."""


def register_host(request: JoinRequest, address: str) -> tuple[Host, bool]:
    """Return the host of a machine, and whether it joined just now. Repeated requests change nothing.

    Raises:
        TokenError, NameTakenError, UnreachableRedisError.
    """
    with transaction.atomic():
        host, _ = Host.objects.select_for_update(no_key=True).get_or_create(
            name=request["name"], defaults={**_get_hardware_fields(request), "last_seen": timezone.now()}
        )
        is_new = not _is_joined(host, request["identity"])
        if is_new:
            _admit(host, request, address)
        get_redis_url(address)
        host.refresh_from_db()
    return host, is_new


def has_joined(name: str, identity: str) -> bool:
    """Return whether the machine with this identity is the host, and needs no token."""
    host = Host.objects.filter(name=name).first()
    return host is not None and _is_joined(host, identity)


def create_join_response(host: Host, address: str) -> JoinResponse:
    """Create the host's Redis user, and return the credentials.

    Raises:
        redis_access.NoRightsError, redis.RedisError.
    """
    with connect() as client:
        create_user(client, host)
    key = derive_signing_keys(host.name, host.generation)[0]
    return JoinResponse(name=host.name, redis_url=_add_user(get_redis_url(address), host), key=key)


def get_redis_url(address: str) -> str:
    """Return the URL of Redis for a machine with this address, without the user.

    Raises:
        UnreachableRedisError.
    """
    url = settings.REDIS_FOR_HOSTS or settings.REDIS_URL
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss"):
        raise UnreachableRedisError(
            f"The board uses Redis over {parts.scheme}://, which hosts cannot reach. Set MESHBOARD_REDIS_FOR_HOSTS."
        )
    if parts.hostname in LOOPBACK_NAMES and not _is_loopback(address):
        raise UnreachableRedisError(
            f"Redis is at {parts.hostname}, which {address} cannot reach. "
            "Set MESHBOARD_REDIS_FOR_HOSTS to an address that hosts can reach."
        )
    return url


def _is_joined(host: Host, identity: str) -> bool:
    return host.removed is None and host.generation > 0 and host.identity_hash == _hash(identity)


def _admit(host: Host, request: JoinRequest, address: str) -> None:
    """Make a machine the host with a join token. Raise TokenError or NameTakenError if that is not allowed."""
    if "token" not in request:
        # Only the machine itself learns that its host was removed.
        was_host = host.removed is not None and host.identity_hash == _hash(request["identity"])
        words = f"Host {host.name} was removed" if was_host else f"This machine has not joined as host {host.name}"
        raise TokenError(f"{words}. Join with a join token.")
    token = use_token(request["token"], host.name)
    if host.generation > 0 and host.removed is None:
        raise NameTakenError(
            f"Another machine has joined as host {host.name}. Use another name, or ask staff to remove the host."
        )
    now = timezone.now()
    changes: dict[str, Any] = {
        "generation": host.generation + 1,
        "identity_hash": _hash(request["identity"]),
        "joined": now,
        "joined_from": address[:45],
        "labels": sorted({*(host.labels if host.removed is None else []), *token.labels}),
    }
    if host.removed is not None:  # possibly another machine, so old data is reset
        changes |= {"removed": None, "drained": False, "last_seen": now, "incarnation": "", "began": 0.0}
        changes |= {"sequence": 0, "holding": [], "profile": None, "profiled": None, "facts": None, "use": None}
        changes |= _get_hardware_fields(request)
    Host.objects.filter(pk=host.pk).update(**changes)


def _get_hardware_fields(request: JoinRequest) -> dict[str, Any]:
    names = ("slots", "device", "device_name", "memory_bytes", "boot_id")
    fields: dict[str, Any] = {name: request[name] for name in names}  # type: ignore[literal-required]
    return fields | ({"facts": request["facts"]} if "facts" in request else {})


def _add_user(url: str, host: Host) -> str:
    """Return the URL of Redis with the host's user, or with the board's user in shared mode."""
    parts = urlsplit(url)
    own_user, at, location = parts.netloc.rpartition("@")
    if settings.REDIS_ACCESS == "shared":
        user = own_user if at else urlsplit(settings.REDIS_URL).netloc.rpartition("@")[0]
    else:
        user = f"{get_redis_user(host.name)}:{derive_redis_passwords(host.name, host.generation)[0]}"
    return urlunsplit(parts._replace(netloc=f"{user}@{location}" if user else location))


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class JoinTokenRequest(StrictModel):
    """The properties of a new join token."""

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


def create_token(by: str, request: JoinTokenRequest) -> tuple[JoinToken, str]:
    """Create a token, and return it with its text, which is not stored."""
    text = TEXT_PREFIX + secrets.token_urlsafe(32)
    return store_token(text, by, request), text


def store_token(text: str, by: str, request: JoinTokenRequest) -> JoinToken:
    """Store a token with this text. An existing token gets a new expiry and stays revoked if it is.

    Raises:
        SpecError: The text could be guessed.
    """
    different = len(set(text))
    if len(text) < MIN_TOKEN_CHARACTERS or different < MIN_DIFFERENT_CHARACTERS:
        words = (
            f"The token has {len(text)} characters, "
            f"of which {different} are different. Use {MIN_TOKEN_CHARACTERS} random characters."
        )
        raise SpecError([Problem("token", words)])
    values = {
        "note": request.note,
        "created_by": by,
        "expires": timezone.now() + timedelta(hours=request.hours),
        "most_uses": request.uses,
        "labels": request.labels,
        "uses": 0,
    }
    token, _ = JoinToken.objects.update_or_create(hash=_hash(text), defaults=values)
    return token


def use_token(text: str, host: str) -> JoinToken:
    """Count a use of a token in the caller's transaction.

    Raises:
        TokenError: The token is invalid.
    """
    now = timezone.now()
    token = JoinToken.objects.filter(hash=_hash(text)).first()
    if token is None:
        raise TokenError("The join token does not exist.")
    has_uses = Q(most_uses=None) | Q(uses__lt=F("most_uses"))
    valid = JoinToken.objects.filter(has_uses, pk=token.pk, revoked=None, expires__gt=now)
    if valid.update(uses=F("uses") + 1, last_used=now, last_host=host):
        return token
    token.refresh_from_db()
    raise TokenError(explain_invalid_token(token) or "This join token is invalid.")


def explain_invalid_token(token: JoinToken) -> str:
    """Return why a token is invalid, or an empty text."""
    if token.revoked is not None:
        return f"This join token was revoked at {token.revoked:%Y-%m-%d %H:%M:%S} UTC."
    if token.expires <= timezone.now():
        return f"This join token expired at {token.expires:%Y-%m-%d %H:%M:%S} UTC."
    if token.most_uses is not None and token.uses >= token.most_uses:
        return f"This join token has reached its maximum of {token.most_uses} hosts."
    return ""


def revoke_token(token: JoinToken) -> bool:
    """Revoke a token, and return whether this call did it."""
    return bool(JoinToken.objects.filter(pk=token.pk, revoked=None).update(revoked=timezone.now()))


def list_recent_tokens() -> QuerySet[JoinToken]:
    """Return the tokens that have not expired more than 30 days ago."""
    return JoinToken.objects.filter(expires__gt=timezone.now() - DELETED_AFTER)


def delete_expired_tokens() -> int:
    """Delete tokens that expired more than 30 days ago, and return their number."""
    return JoinToken.objects.filter(expires__lte=timezone.now() - DELETED_AFTER).delete()[0]
