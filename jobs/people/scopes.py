"""What a token must have been given for a request."""

from __future__ import annotations

from collections.abc import Collection

from jobs.models import Scope

READS = ("GET", "HEAD", "OPTIONS")
# The first word of a route behind `/api/v1/`, of what submits jobs and changes one's own; to change those of others
# takes `operate` besides, which `jobs.access` asks for.
SUBMITS = ("jobs", "plan", "runs", "lab", "imports")
ALL = frozenset(Scope)


def needed(method: str, route: str) -> Scope:
    """Of a method and a route as `jobs.api.urls` has it: what nobody thought of takes the most."""
    if method in READS:
        return Scope.READ
    return Scope.SUBMIT if route.partition("/")[0] in SUBMITS else Scope.OPERATE


def refusal(scope: Scope, has: Collection[str], what: str) -> str:
    """In words."""
    given = ", ".join(scope for scope in Scope if scope in has)
    return f"{what} needs a token with the scope {scope.value}; this one has {given}"
