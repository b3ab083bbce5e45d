"""A run's token: good for one attempt while it lasts, and only its hash is kept."""

from __future__ import annotations

import hashlib
import secrets

from jobs.models import Attempt, RunToken

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
