"""The audit as files, for whoever keeps it elsewhere."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from jobs.models import AuditEntry

MOST = 50_000  # entries of a file; the next one begins after its last id
COLUMNS = ("id", "at", "who", "address", "what", "kind", "name", "before", "after")
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet would carry out


def as_csv(after: int) -> str:
    """With a line of titles; a cell that a spreadsheet would carry out begins with an apostrophe."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(COLUMNS)
    writer.writerows([_cell(row[name]) for name in COLUMNS] for row in _rows(after))
    return out.getvalue()


def as_lines(after: int) -> str:
    """One JSON object a line."""
    return "".join(json.dumps(row) + "\n" for row in _rows(after))


FORMATS = {"csv": (as_csv, "text/csv; charset=utf-8"), "jsonl": (as_lines, "application/jsonl; charset=utf-8")}


def _rows(after: int) -> list[dict[str, Any]]:
    entries = AuditEntry.objects.filter(id__gt=after).order_by("id").values(*COLUMNS)[:MOST]
    return [{**entry, "at": entry["at"].isoformat()} for entry in entries]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value)
    return f"'{text}" if text.startswith(FORMULA) else text
