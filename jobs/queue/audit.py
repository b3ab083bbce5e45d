"""Who did what, when and from where: written in the transaction that does it."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from django.http import HttpRequest, HttpResponse

from jobs.models import AuditEntry

_address: ContextVar[str] = ContextVar("address", default="")


class AddressMiddleware:
    """Remembers where the request came from while it is answered."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        token = _address.set(str(request.META.get("REMOTE_ADDR", ""))[:45])
        try:
            return self._get_response(request)
        finally:
            _address.reset(token)


def record(who: str, what: str, kind: str, name: object, before: Any = None, after: Any = None) -> None:
    """One entry. Call it inside the transaction that makes the change."""
    AuditEntry.objects.create(
        who=who[:150],
        address=_address.get(),
        what=what,
        kind=kind,
        name=str(name)[:100],
        before=before,
        after=after,
    )
