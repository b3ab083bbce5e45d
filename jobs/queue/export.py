"""The audit as lines and as files, for whoever keeps it elsewhere."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from typing import Any

from jobs.models import AuditEntry
from jobs.queue.shapes import AuditRow

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
