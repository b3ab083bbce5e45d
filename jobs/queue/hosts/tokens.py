"""Join tokens: made by staff, shown once, kept as a hash, good for a while."""

from __future__ import annotations

import hashlib
import secrets
from datetime import timedelta
from typing import Annotated

from django.db.models import F, Q, QuerySet
from django.utils import timezone
from pydantic import Field

from jobs.models import JoinToken
from jobs.models.names import Note
from planner.facts.validation import Problem, SpecError, StrictModel

PREFIX = "mbj_"
MOST_USES = 10_000
MOST_LABELS = 16
FORGOTTEN_AFTER = timedelta(days=30)  # that it could be used last
SHORTEST_GIVEN = 32  # characters of one that an installation brings along
FEWEST_CHARACTERS = 8  # different ones


# As jobs.models.policy has labels.
Label = Annotated[str, Field(max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9._=-]*$")]


class TokenQuery(StrictModel):
    """What a join token may be asked to be."""

    hours: int = Field(default=24, ge=1, le=365 * 24, description="Number of hours until the token expires.")
    uses: int | None = Field(
        default=1,
        ge=1,
        le=MOST_USES,
        description="Maximum number of hosts that can join with the token. null: unlimited.",
    )
    labels: list[Label] = Field(
        default=[],
        max_length=MOST_LABELS,
        description="Labels that a host gets when it joins with the token. Pools select hosts by label.",
    )
    note: Note = Field(default="", description="Purpose of the token.")


class TokenError(Exception):
    """Nobody joins with this; says why."""


def mint(by: str, asked: TokenQuery) -> tuple[JoinToken, str]:
    """A new token, and its text, which nobody sees again."""
    text = PREFIX + secrets.token_urlsafe(32)
    return keep(text, by, asked), text


def keep(text: str, by: str, asked: TokenQuery) -> JoinToken:
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


def spend(text: str, host: str) -> JoinToken:
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
    raise TokenError(why_not(found) or "This join token is invalid.")


def why_not(token: JoinToken) -> str:
    """Why nobody joins with it any more; empty while somebody may."""
    if token.revoked is not None:
        return f"This join token was revoked at {token.revoked:%Y-%m-%d %H:%M:%S} UTC."
    if token.expires <= timezone.now():
        return f"This join token expired at {token.expires:%Y-%m-%d %H:%M:%S} UTC."
    if token.most_uses is not None and token.uses >= token.most_uses:
        return f"This join token has reached its maximum of {token.most_uses} hosts."
    return ""


def revoke(token: JoinToken) -> bool:
    """True when this call did."""
    return bool(JoinToken.objects.filter(pk=token.pk, revoked=None).update(revoked=timezone.now()))


def known() -> QuerySet[JoinToken]:
    """All that could be used in the last 30 days."""
    return JoinToken.objects.filter(expires__gt=timezone.now() - FORGOTTEN_AFTER)


def forget_old() -> int:
    """Drop those that nobody can use for 30 days; returns how many."""
    return JoinToken.objects.filter(expires__lte=timezone.now() - FORGOTTEN_AFTER).delete()[0]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
