"""Who did what, when and from where: written in the transaction that does it."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from django.http import HttpRequest, HttpResponse

from jobs.models import AuditEntry

_request: ContextVar[HttpRequest | None] = ContextVar("request", default=None)


class AddressMiddleware:
    """Remembers who asks, and from where, while it is answered."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        token = _request.set(request)
        try:
            return self._get_response(request)
        finally:
            _request.reset(token)


def who_asks(otherwise: str) -> str:
    """The name of whoever is logged in to the request that is answered now."""
    request = _request.get()
    user = getattr(request, "user", None)
    return user.get_username() if user is not None and user.is_authenticated else otherwise


def record(who: str, what: str, kind: str, name: object, before: Any = None, after: Any = None) -> None:
    """One entry. Call it inside the transaction that makes the change."""
    request = _request.get()
    AuditEntry.objects.create(
        who=who[:150],
        address=str(request.META.get("REMOTE_ADDR", ""))[:45] if request is not None else "",
        what=what,
        kind=kind,
        name=str(name)[:100],
        before=before,
        after=after,
    )
