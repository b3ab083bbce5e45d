"""REST tokens: each person makes their own, with a name, scopes and an end; knox keeps a hash of each."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any, Literal, NamedTuple

from django.conf import settings
from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import Q
from django.utils import timezone
from knox.models import AuthToken
from pydantic import Field
from typing_extensions import TypedDict

from jobs.core.audit import get_request_username, record
from jobs.models import Scope, TokenGrant
from jobs.models.validators import NameRule
from jobs.people.scopes import ALL
from planner.facts.validation import NO_NUL, Problem, SpecError, StrictModel

MOST = 1000  # that a person may have
USE_NOTED_EVERY = timedelta(minutes=1)
SCOPES = tuple(Scope)


class ApiTokenRequest(StrictModel):
    """What a REST token may be asked to be."""

    name: Annotated[
        str, Field(min_length=1, max_length=100, pattern=NO_NUL, description="Purpose of the token."), NameRule
    ]
    scopes: Annotated[
        list[Literal["read", "submit", "operate"]],
        Field(
            min_length=1,
            max_length=len(SCOPES),
            description="Actions that the token allows, within the permissions of its owner.",
        ),
    ]
    days: int | None = Field(
        default=None,
        ge=1,
        le=36500,
        description="Days until the token expires. null: the maximum that the board allows.",
    )


class ApiToken(TypedDict):
    """A REST token, as its owner sees it. `key` is how it begins."""

    key: str
    name: str
    scopes: list[str]
    created: str
    expires: str | None
    last_used: str | None
    address: str


class NewApiToken(ApiToken):
    """With the token itself, which nobody is told again. `shortened`: it ends sooner than the days asked for, as this
    board, or the token that asked, lets it last no longer."""

    token: str
    shortened: bool


class Made(NamedTuple):
    """A new token, and its text, which nobody sees again. `shortened`: as `NewApiToken` has it."""

    token: AuthToken
    text: str
    shortened: bool


def make(user: User, asked: ApiTokenRequest, *, by: AuthToken | None = None) -> Made:
    """`by`: the token that asks for it, which gives away no more than it has.

    Raises:
        SpecError: it would do more than `by`, or is one too many.
    """
    wished = dict.fromkeys(asked.scopes)
    days = min(asked.days or settings.TOKEN_DAYS, settings.TOKEN_DAYS)
    shortened = days < (asked.days or days)
    with transaction.atomic():
        User.objects.select_for_update(no_key=True).get(pk=user.pk)  # of several at once each counts those before
        if problems := _problems(user, asked, by):
            raise SpecError(problems)
        token, text = AuthToken.objects.create(user, expiry=timedelta(days=days))
        if by is not None and by.expiry is not None and token.expiry > by.expiry:
            AuthToken.objects.filter(pk=token.pk).update(expiry=by.expiry)
            token.expiry = by.expiry
            shortened = asked.days is not None
        TokenGrant.objects.create(token=token, name=asked.name, scopes=list(wished))
        after = {"name": asked.name, "scopes": list(wished), "expires": token.expiry.isoformat()}
        record(user.get_username(), "make", "token", token.token_key, after=after)
    return Made(token, text, shortened)


def _problems(user: User, asked: ApiTokenRequest, by: AuthToken | None) -> list[Problem]:
    found = []
    if by is not None and (more := [scope for scope in asked.scopes if scope not in scopes_of(by)]):
        found.append(Problem("scopes", f"The token of this request lacks the scope {more[0]}. Use another token."))
    if known(user).count() >= MOST:
        found.append(Problem("name", f"You already have {MOST} tokens, the maximum. Revoke a token first."))
    return found


def known(user: User) -> Any:
    """A person's tokens that have not ended, the newest first."""
    own = AuthToken.objects.filter(user=user).filter(Q(expiry=None) | Q(expiry__gt=timezone.now()))
    return own.select_related("grant").order_by("-created")


def told(token: AuthToken) -> ApiToken:
    grant = getattr(token, "grant", None)
    return {
        "key": token.token_key,
        "name": grant.name if grant else "created without a name",
        "scopes": [scope.value for scope in SCOPES if scope in scopes_of(token)],
        "created": token.created.isoformat(),
        "expires": token.expiry.isoformat() if token.expiry else None,
        "last_used": grant.last_used.isoformat() if grant and grant.last_used else None,
        "address": grant.address if grant else "",
    }


def revoke(user: User, key: str) -> bool:
    """One's own token ends at once; True when this call did it."""
    with transaction.atomic():
        ended, _ = AuthToken.objects.filter(user=user, token_key=key).delete()
        if ended:
            record(user.get_username(), "revoke", "token", key)
    return bool(ended)


def drop_all(user: User, why: str) -> int:
    """Every token of a person; returns how many."""
    with transaction.atomic():
        keys = list(AuthToken.objects.filter(user=user).values_list("token_key", flat=True))
        AuthToken.objects.filter(user=user).delete()
        if keys:
            record(get_request_username(user.get_username()), "revoke all", "token", why, before=keys)
    return len(keys)


def scopes_of(token: AuthToken) -> frozenset[str]:
    grant = getattr(token, "grant", None)
    return ALL if grant is None else frozenset(grant.scopes)


def note_use(token: AuthToken, address: str) -> None:
    """When and from where it was used last, to the minute."""
    grant, now = getattr(token, "grant", None), timezone.now()
    if grant is None or (grant.last_used and grant.last_used > now - USE_NOTED_EVERY and grant.address == address):
        return
    TokenGrant.objects.filter(pk=grant.pk).update(last_used=now, address=address)
