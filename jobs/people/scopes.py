"""What a token must have been given for a request."""

from __future__ import annotations

from collections.abc import Collection

from jobs.models import Scope

READS = ("GET", "HEAD", "OPTIONS")
# The first word of a route behind `/api/v1/`, of what changes nothing and is POST for a body's sake.
ASKS = ("plan",)
# Routes that submit jobs and change the user's own jobs. `jobs.core.access` also requires `operate` for other jobs.
SUBMITS = ("jobs", "runs", "lab", "imports")
ALL = frozenset(Scope)


def enough(method: str, route: str) -> tuple[Scope, ...]:
    """One of these, for a method and a route as `jobs.api.urls` has it: what nobody thought of takes the most."""
    first = route.partition("/")[0]
    if method in READS:
        return (Scope.READ,)
    if first in ASKS:
        return (Scope.READ, Scope.SUBMIT)
    return (Scope.SUBMIT,) if first in SUBMITS else (Scope.OPERATE,)


def refusal(needed: Collection[Scope], has: Collection[str], what: str) -> str:
    """In words."""
    given = ", ".join(scope for scope in Scope if scope in has)
    return f"{what} needs a token with the scope {' or '.join(needed)}. The scopes of this token are: {given}."
