"""Who did what, when and from where: written in the transaction that does it.

The audit as lines and as files, for whoever keeps it elsewhere.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

from django.http import HttpRequest, HttpResponse
from typing_extensions import TypedDict

from jobs.core.job_details import Moment
from jobs.models import AuditEntry


class AuditRow(TypedDict):
    """What a person did."""

    id: int
    at: Moment
    who: str
    address: str
    what: str
    kind: str
    name: str
    before: Any
    after: Any


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


MOST = 50_000  # entries of a file; the next one begins after its last id
COLUMNS = tuple(AuditRow.__annotations__)
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet would carry out
CSV = "text/csv; charset=utf-8"


def rows_of(entries: Iterable[AuditEntry]) -> list[AuditRow]:
    return [
        {
            "id": entry.pk,
            "at": entry.at.isoformat(),
            "who": entry.who,
            "address": entry.address,
            "what": entry.what,
            "kind": entry.kind,
            "name": entry.name,
            "before": entry.before,
            "after": entry.after,
        }
        for entry in entries
    ]


def from_where(after: int) -> list[AuditRow]:
    """The oldest behind an entry's id, MOST at once."""
    return rows_of(AuditEntry.objects.filter(id__gt=after).order_by("id")[:MOST])


def as_csv(rows: Iterable[AuditRow]) -> str:
    """With a line of titles; a cell that a spreadsheet would carry out begins with an apostrophe."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(COLUMNS)
    writer.writerows(map(_cell, row.values()) for row in rows)
    return out.getvalue()


def as_lines(rows: Iterable[AuditRow]) -> str:
    """One JSON object a line."""
    return "".join(json.dumps(row) + "\n" for row in rows)


FORMATS = {"csv": (as_csv, CSV), "jsonl": (as_lines, "application/jsonl; charset=utf-8")}


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value)
    return f"'{text}" if text.startswith(FORMULA) else text
