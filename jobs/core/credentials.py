"""A run's token: good for one attempt while it lasts, and only its hash is kept.

A host's key and its Redis password, made from the board's secret key: nothing secret lies in the database.

Both change with the host's generation. Where the secret key was replaced, what was made of the older ones
(`SECRET_KEY_FALLBACKS`) holds until the host has joined again, which a start of its worker does.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from django.conf import settings
from django.utils.crypto import salted_hmac

from contracts.codec import BadMessageError
from contracts.security import sign
from jobs.models import Attempt, Host, RunToken

LONGEST = 200


def issue(attempt: Attempt) -> str:
    """A new token for whoever reports this attempt; earlier ones stay good."""
    token = secrets.token_urlsafe(32)
    RunToken.objects.create(attempt=attempt, digest=digest(token))
    return token


def find(token: str) -> RunToken | None:
    """What a token is for; None of one that nobody was given."""
    if not token.isascii() or len(token) > LONGEST:
        return None
    found = RunToken.objects.filter(digest=digest(token))
    return found.select_related("attempt__job__owner").defer("attempt__exit", "attempt__job__estimate").first()


def digest(secret: str) -> str:
    """256 random bits need no salt."""
    return hashlib.sha256(secret.encode()).hexdigest()


def signing_keys(name: str, generation: int) -> list[str]:
    """Hexadecimal; the newest first."""
    return _derived("meshboard.host.signing", name, generation)


def redis_passwords(name: str, generation: int) -> list[str]:
    """Hexadecimal; the newest first."""
    return _derived("meshboard.host.redis", name, generation)


def loan_secret(job: str, attempt: int) -> str:
    """Hexadecimal; what an attempt shows to the host that lends it a checkpoint. The same however often it is told."""
    return salted_hmac("meshboard.loan", f"{attempt}:{job}", algorithm="sha256").hexdigest()


def password_hash(password: str) -> str:
    """As Redis keeps it."""
    return hashlib.sha256(password.encode()).hexdigest()


def check_sender(name: str, body: bytes, signed: bytes) -> None:
    """Raises BadMessageError where the host that a message names did not write it."""
    host = Host.objects.filter(name=name).only("name", "generation", "removed").first()
    if host is None or host.generation == 0:
        raise BadMessageError(f"Host {name} has not joined.")
    if host.removed is not None:
        raise BadMessageError(f"Host {name} was removed.")
    if not signed_by(host, body, signed):
        raise BadMessageError(f"The message of host {name} has an invalid signature.")


def signed_by(host: Host, body: bytes, signed: bytes) -> bool:
    """Whether a message is the host's own."""
    known = signing_keys(host.name, host.generation)
    return any(hmac.compare_digest(sign(bytes.fromhex(key), body), signed) for key in known)


def _derived(purpose: str, name: str, generation: int) -> list[str]:
    told = f"{generation}:{name}"
    secrets = [settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS]
    return [salted_hmac(purpose, told, secret, algorithm="sha256").hexdigest() for secret in secrets]
