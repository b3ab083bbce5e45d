"""Record actions of users in the audit log, and export the log as CSV or JSON Lines."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, cast

from django.http import HttpRequest, HttpResponse
from typing_extensions import TypedDict

from jobs.core.job_details import Timestamp
from jobs.models import AuditEntry

MAX_EXPORTED_ENTRIES = 50_000  # per file. The next file begins after the last id.
FORMULA_PREFIXES = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet runs cells that begin so
CSV_CONTENT_TYPE = "text/csv; charset=utf-8"

_request: ContextVar[HttpRequest | None] = ContextVar("request", default=None)


class AuditRow(TypedDict):
    """An action of a user."""

    id: int
    at: Timestamp
    who: str
    address: str
    what: str
    kind: str
    name: str
    before: Any
    after: Any


class AuditRequestMiddleware:
    """Make the current request available to `record`."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        token = _request.set(request)
        try:
            return self._get_response(request)
        finally:
            _request.reset(token)


def get_request_username(default: str) -> str:
    """Return the name of the user who is logged in to the current request."""
    user = getattr(_request.get(), "user", None)
    return user.get_username() if user is not None and user.is_authenticated else default


def record(who: str, what: str, kind: str, name: object, before: Any = None, after: Any = None) -> None:
    """Add an entry. Call it inside the transaction that makes the change."""
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


def serialize_entries(entries: Iterable[AuditEntry]) -> list[AuditRow]:
    """Return the entries as rows of REST and of exports."""
    columns = AuditRow.__annotations__
    rows = [{name: getattr(entry, name) for name in columns} | {"at": entry.at.isoformat()} for entry in entries]
    return cast(list[AuditRow], rows)


def get_rows_after(entry_id: int) -> list[AuditRow]:
    """Return the oldest rows after an entry, as many as one file contains."""
    return serialize_entries(AuditEntry.objects.filter(id__gt=entry_id).order_by("id")[:MAX_EXPORTED_ENTRIES])


def format_csv(rows: Iterable[AuditRow]) -> str:
    """Return CSV with a header. Cells that a spreadsheet would run begin with an apostrophe."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(AuditRow.__annotations__)
    writer.writerows(map(_format_cell, row.values()) for row in rows)
    return out.getvalue()


def _format_cell(value: Any) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value)
    return f"'{text}" if text.startswith(FORMULA_PREFIXES) else text


def _format_json_lines(rows: Iterable[AuditRow]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


EXPORT_FORMATS = {
    "csv": (format_csv, CSV_CONTENT_TYPE),
    "jsonl": (_format_json_lines, "application/jsonl; charset=utf-8"),
}
