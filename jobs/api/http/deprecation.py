"""What goes one day: said in the document and, where it is used, in the answer (RFC 9745, RFC 8594).

Within version 1 nothing is taken away: `sunset` is when the version after it may come without it, a year at least.
"""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import NamedTuple

from django.utils.http import http_date
from rest_framework.response import Response

EXPLAINED = "/docs/reference/api/#deprecation"


class Deprecated(NamedTuple):
    """`instead`: what to use."""

    since: date
    sunset: date
    instead: str

    @property
    def words(self) -> str:
        return f"Deprecated. Removed after {self.sunset.isoformat()}. {self.instead}"


OFFSET = Deprecated(date(2026, 11, 22), date(2027, 11, 22), "To read the next page, use the Link header instead.")


def mark(answer: Response, what: Deprecated) -> None:
    """Say so in an answer."""
    answer["Deprecation"] = f"@{_seconds(what.since)}"
    answer["Sunset"] = http_date(_seconds(what.sunset))
    links = [answer["Link"]] if "Link" in answer else []
    answer["Link"] = ", ".join([*links, f'<{EXPLAINED}>; rel="deprecation"; type="text/html"'])


def _seconds(day: date) -> int:
    return int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp())
