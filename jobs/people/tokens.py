"""Create, list, and revoke API tokens, and decide which scopes a request needs. knox stores the hashes."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Annotated, Any, Literal, NamedTuple

from django.conf import settings
from django.contrib.auth.models import User
from django.db import DatabaseError, transaction
from django.db.models import Q
from django.db.models.signals import pre_save
from django.utils import timezone
from knox.models import AuthToken
from pydantic import Field
from typing_extensions import TypedDict

from jobs.core.audit import get_request_username, record
from jobs.core.errors import is_database_read_only
from jobs.models import Scope, TokenGrant
from jobs.models.validators import NameRule
from planner.facts.validation import NO_NUL, Problem, SpecError, StrictModel

MAX_TOKENS = 1000  # per user
USE_RECORD_INTERVAL = timedelta(minutes=1)
SCOPES = tuple(Scope)


class ApiTokenRequest(StrictModel):
    """A new API token."""

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
    """An API token as its owner sees it. `key`: its first characters."""

    key: str
    name: str
    scopes: list[str]
    created: str
    expires: str | None
    last_used: str | None
    address: str


class NewApiToken(ApiToken):
    """A new API token. `shortened`: true if it expires before the requested days.

    The board and the token of the request limit the lifetime.
    """

    token: str
    shortened: bool


class CreatedToken(NamedTuple):
    """A new token with its text, which is shown once."""

    token: AuthToken
    text: str
    shortened: bool


def create_token(user: User, token_request: ApiTokenRequest, *, by: AuthToken | None = None) -> CreatedToken:
    """Create a token. Raises SpecError.

    Args:
        by: Token of the request, which limits the scopes and the lifetime of the new token.
    """
    scopes = list(dict.fromkeys(token_request.scopes))
    days = min(token_request.days or settings.TOKEN_DAYS, settings.TOKEN_DAYS)
    shortened = days < (token_request.days or days)
    with transaction.atomic():
        User.objects.select_for_update(no_key=True).get(pk=user.pk)  # serializes concurrent requests
        if problems := _check_request(user, token_request, by):
            raise SpecError(problems)
        token, text = AuthToken.objects.create(user, expiry=timedelta(days=days))
        if by is not None and by.expiry is not None and token.expiry > by.expiry:
            AuthToken.objects.filter(pk=token.pk).update(expiry=by.expiry)
            token.expiry = by.expiry
            shortened = token_request.days is not None
        TokenGrant.objects.create(token=token, name=token_request.name, scopes=scopes)
        after = {"name": token_request.name, "scopes": scopes, "expires": token.expiry.isoformat()}
        record(user.get_username(), "make", "token", token.token_key, after=after)
    return CreatedToken(token, text, shortened)


def _check_request(user: User, token_request: ApiTokenRequest, by: AuthToken | None) -> list[Problem]:
    found = []
    if by is not None and (more := [scope for scope in token_request.scopes if scope not in get_scopes(by)]):
        found.append(Problem("scopes", f"The token of this request lacks the scope {more[0]}. Use another token."))
    if get_active_tokens(user).count() >= MAX_TOKENS:
        found.append(Problem("name", f"You already have {MAX_TOKENS} tokens, the maximum. Revoke a token first."))
    return found


def get_active_tokens(user: User) -> Any:
    """Return the unexpired tokens of a user, newest first."""
    own = AuthToken.objects.filter(user=user).filter(Q(expiry=None) | Q(expiry__gt=timezone.now()))
    return own.select_related("grant").order_by("-created")


def serialize_token(token: AuthToken) -> ApiToken:
    grant = getattr(token, "grant", None)
    return {
        "key": token.token_key,
        "name": grant.name if grant else "created without a name",
        "scopes": [scope.value for scope in SCOPES if scope in get_scopes(token)],
        "created": token.created.isoformat(),
        "expires": token.expiry.isoformat() if token.expiry else None,
        "last_used": grant.last_used.isoformat() if grant and grant.last_used else None,
        "address": grant.address if grant else "",
    }


def revoke_token(user: User, key: str) -> bool:
    """Revoke a token of the user. Return whether it existed."""
    with transaction.atomic():
        ended, _ = AuthToken.objects.filter(user=user, token_key=key).delete()
        if ended:
            record(user.get_username(), "revoke", "token", key)
    return bool(ended)


def revoke_all_tokens(user: User, why: str) -> int:
    """Revoke all tokens of a user. Return their number."""
    with transaction.atomic():
        keys = list(AuthToken.objects.filter(user=user).values_list("token_key", flat=True))
        AuthToken.objects.filter(user=user).delete()
        if keys:
            record(get_request_username(user.get_username()), "revoke all", "token", why, before=keys)
    return len(keys)


def get_scopes(token: AuthToken) -> frozenset[str]:
    grant = getattr(token, "grant", None)
    return ALL_SCOPES if grant is None else frozenset(grant.scopes)


def record_use(token: AuthToken, address: str) -> None:
    """Store when and from where the token was last used, at most once per minute, unless the database is read-only."""
    grant, now = getattr(token, "grant", None), timezone.now()
    if grant is None or (grant.last_used and grant.last_used > now - USE_RECORD_INTERVAL and grant.address == address):
        return
    try:
        TokenGrant.objects.filter(pk=grant.pk).update(last_used=now, address=address)
    except DatabaseError as error:
        if not is_database_read_only(error):
            raise


SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
# Routes after `/api/v1/` that change nothing and use POST only to have a body.
READ_ROUTES = ("plan",)
# Routes that submit jobs and change the user's own jobs. `jobs.core.access` also requires `operate` for other jobs.
SUBMIT_ROUTES = ("jobs", "runs", "lab", "imports", "uploads")
ALL_SCOPES = frozenset(Scope)


def get_required_scopes(method: str, route: str) -> tuple[Scope, ...]:
    """Return the scopes of which a request needs one. An unknown route requires the most."""
    first = route.partition("/")[0]
    if method in SAFE_METHODS:
        return (Scope.READ,)
    if first in READ_ROUTES:
        return (Scope.READ, Scope.SUBMIT)
    return (Scope.SUBMIT,) if first in SUBMIT_ROUTES else (Scope.OPERATE,)


def format_scope_problem(needed: Collection[Scope], has: Collection[str], what: str) -> str:
    scopes = ", ".join(scope for scope in Scope if scope in has)
    return f"{what} needs a token with the scope {' or '.join(needed)}. The scopes of this token are: {scopes}."


def connect_signals() -> None:
    pre_save.connect(_drop_tokens, sender=User, dispatch_uid="revoke tokens after a password change")


def _drop_tokens(instance: User, raw: bool, update_fields: Any, **_named: Any) -> None:
    if raw or instance._state.adding or (update_fields is not None and "password" not in update_fields):
        return
    before = User.objects.filter(pk=instance.pk).values_list("password", flat=True).first()
    # Django rehashes an unchanged password at a login when the hasher changed.
    is_rehash = update_fields == frozenset(["password"]) and getattr(instance, "_password", None) is None
    if before is not None and before != instance.password and not is_rehash:
        revoke_all_tokens(instance, "the password was changed")
