"""Create and check the credentials of attempts and hosts.

The database stores only hashes of run tokens. Signing keys and Redis passwords of hosts are derived from the secret key
of the board and change with the generation of the host. Values that are derived from `SECRET_KEY_FALLBACKS` stay valid
until the host joins again, which each start of its worker does.
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

MAX_TOKEN_CHARACTERS = 200


def issue_run_token(attempt: Attempt) -> str:
    """Return a new token for reports of an attempt. Earlier tokens stay valid."""
    token = secrets.token_urlsafe(32)
    RunToken.objects.create(attempt=attempt, digest=hash_secret(token))
    return token


def find_run_token(token: str) -> RunToken | None:
    """Return the stored token with its job, None if it is unknown."""
    if not token.isascii() or len(token) > MAX_TOKEN_CHARACTERS:
        return None
    rows = RunToken.objects.filter(digest=hash_secret(token))
    return rows.select_related("attempt__job__owner").defer("attempt__exit", "attempt__job__estimate").first()


def hash_secret(secret: str) -> str:
    """Return the SHA-256 hash. 256 random bits need no salt, and Redis stores passwords in this form."""
    return hashlib.sha256(secret.encode()).hexdigest()


def derive_signing_keys(name: str, generation: int) -> list[str]:
    """Return the hexadecimal signing keys of a host, newest first."""
    return _derive_secrets("meshboard.host.signing", name, generation)


def derive_redis_passwords(name: str, generation: int) -> list[str]:
    """Return the hexadecimal Redis passwords of a host, newest first."""
    return _derive_secrets("meshboard.host.redis", name, generation)


def derive_loan_secret(job: str, attempt: int) -> str:
    """Return the hexadecimal secret with which an attempt requests a checkpoint from another host."""
    return salted_hmac("meshboard.loan", f"{attempt}:{job}", algorithm="sha256").hexdigest()


def derive_upload_secret(job: str, attempt: int) -> str:
    """Return the hexadecimal secret with which the hosts of an attempt download its uploaded script."""
    return salted_hmac("meshboard.upload", f"{attempt}:{job}", algorithm="sha256").hexdigest()


def check_sender(name: str, body: bytes, signature: bytes) -> None:
    """Raise BadMessageError unless the named host signed the message."""
    host = Host.objects.filter(name=name).only("name", "generation", "removed").first()
    if host is None or host.generation == 0:
        raise BadMessageError(f"Host {name} has not joined.")
    if host.removed is not None:
        raise BadMessageError(f"Host {name} was removed.")
    if not is_signed_by(host, body, signature):
        raise BadMessageError(f"The message of host {name} has an invalid signature.")


def is_signed_by(host: Host, body: bytes, signature: bytes) -> bool:
    """Return whether the host signed the message."""
    keys = derive_signing_keys(host.name, host.generation)
    return any(hmac.compare_digest(sign(bytes.fromhex(key), body), signature) for key in keys)


def _derive_secrets(purpose: str, name: str, generation: int) -> list[str]:
    keys = [settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS]
    return [salted_hmac(purpose, f"{generation}:{name}", key, algorithm="sha256").hexdigest() for key in keys]
