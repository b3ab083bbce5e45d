"""Query parameters, the Idempotency-Key header, pages of lists, and deprecated parameters."""

from __future__ import annotations

import json
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from datetime import UTC, date, datetime
from functools import reduce
from typing import Any, NamedTuple, TypeVar

from django.core.exceptions import ValidationError
from django.db.models import Q, QuerySet
from django.utils.http import http_date
from drf_spectacular.utils import OpenApiParameter
from rest_framework.request import Request
from rest_framework.response import Response

from jobs.api.problems import ProblemLocation
from jobs.core.text import format_choice_problem, format_number_problem, is_storable, parse_json, parse_whole_number
from planner.facts.validation import Problem, SpecError

MAX_KEY_CHARACTERS = 200
KEY_PATTERN = f"[!-~]{{1,{MAX_KEY_CHARACTERS}}}"
KEY = OpenApiParameter(
    "Idempotency-Key",
    {"type": "string", "pattern": f"^{KEY_PATTERN}$"},
    OpenApiParameter.HEADER,
    description="A request with a repeated key and body returns the job of the first request.",
)
MAX_PAGE_ROWS = 1000  # also the default, because earlier versions returned these lists complete
CURSOR = re.compile(r"[A-Za-z0-9_-]{1,1000}")
CURSOR_PROBLEM = "`cursor` is invalid. Use the cursor in the Link header of the previous page."
CURSOR_HELP = 'Start of the page. Use the cursor in the Link header (rel="next") of the previous page.'

T = TypeVar("T")
D = TypeVar("D")


class BadParameterError(Exception):
    """Parameters of a request are invalid. `problems` names each of them."""

    def __init__(self, problems: list[Problem], location: ProblemLocation = "query") -> None:
        super().__init__(" ".join(problem.sentence for problem in problems))
        self.problems, self.location = problems, location


class Parameters:
    """Reader of query parameters that collects problems until `check`."""

    def __init__(self, request: Request) -> None:
        self._query = request.query_params
        self._problems: list[Problem] = []
        self._clashes: list[Problem] = []

    def read(self, name: str, default: D, message: str, parse: Callable[[str], T | None]) -> T | D:
        """Return a parsed parameter, or the default. `message` is the problem if `parse` returns None."""
        if name not in self._query:
            return default
        value = parse(self._query[name])
        if value is None:
            self._problems.append(Problem(name, message))
            return default
        return value

    def read_number(self, name: str, default: D, minimum: int, maximum: int) -> int | D:
        message = format_number_problem(name, self._query.get(name, ""), minimum, maximum)
        return self.read(name, default, message, lambda text: parse_whole_number(text, minimum, maximum))

    def read_choice(self, name: str, default: D, choices: tuple[str, ...]) -> str | D:
        message = format_choice_problem(name, self._query.get(name, ""), choices)
        return self.read(name, default, message, lambda text: text if text in choices else None)

    def add_clash(self, name: str, message: str) -> None:
        """Add a problem of a valid parameter that contradicts other parameters."""
        self._clashes.append(Problem(name, message))

    def check(self) -> None:
        """Raise the collected problems.

        Raises:
            BadParameterError: Parameters are invalid (400).
            SpecError: Valid parameters contradict each other (422), which no OpenAPI document can express.
        """
        if self._problems:
            raise BadParameterError([*self._problems, *self._clashes])
        if self._clashes:
            raise SpecError(self._clashes)


def get_idempotency_key(request: Request) -> str | None:
    """Return the idempotency key of a request. Raises BadParameterError."""
    key = request.headers.get("Idempotency-Key")
    if key is not None and not re.fullmatch(KEY_PATTERN, key):
        message = (
            f"`{KEY.name}` has invalid characters or length. Use 1 to {MAX_KEY_CHARACTERS} visible ASCII characters."
        )
        raise BadParameterError([Problem(KEY.name, message)], "header")
    return key


def describe_page_parameters(default_limit: int | None = MAX_PAGE_ROWS) -> list[OpenApiParameter]:
    """Return the parameters of a paginated list. Without a default limit, the list is complete by default."""
    limit = {"type": "integer", "minimum": 1, "maximum": MAX_PAGE_ROWS}
    if default_limit is not None:
        limit["default"] = default_limit
    note = " Default: all." if default_limit is None else ""
    return [
        OpenApiParameter("limit", limit, description=f"Number of rows.{note}"),
        OpenApiParameter("cursor", {"type": "string", "pattern": f"^{CURSOR.pattern}$"}, description=CURSOR_HELP),
    ]


class Page(NamedTuple):
    """Rows of a page, and headers with the link to the next page, if there is one."""

    rows: list[Any]
    headers: dict[str, str]


def get_page(request: Request, rows: QuerySet[Any], *order: str, default_limit: int | None = MAX_PAGE_ROWS) -> Page:
    """Return the requested page.

    A cursor names the last row of the previous page, so new and deleted rows do not shift a page.

    Args:
        order: Fields that together identify a row, "-" for descending.

    Raises:
        BadParameterError
    """
    query = Parameters(request)
    limit = query.read_number("limit", default_limit, 1, MAX_PAGE_ROWS)
    rest = query.read("cursor", rows, CURSOR_PROBLEM, lambda cursor: _filter_after(rows, order, cursor))
    query.check()
    rest = rest.order_by(*order)
    if limit is None:
        return Page(list(rest), {})
    found = list(rest[: limit + 1])
    return Page(found[:limit], _link_next(request, order, found[limit - 1]) if len(found) > limit else {})


def _link_next(request: Request, order: tuple[str, ...], last: Any) -> dict[str, str]:
    position = [str(reduce(getattr, field.lstrip("-").split("__"), last)) for field in order]
    query = request.query_params.copy()
    query["cursor"] = urlsafe_b64encode(json.dumps(position, ensure_ascii=False).encode()).decode().rstrip("=")
    return {"Link": f'<{request.build_absolute_uri(request.path)}?{query.urlencode()}>; rel="next"'}


def _filter_after(rows: QuerySet[Any], order: tuple[str, ...], cursor: str) -> QuerySet[Any] | None:
    """Return the rows after a cursor, or None for an invalid cursor."""
    if not CURSOR.fullmatch(cursor):
        return None
    try:
        position = parse_json(urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        if not isinstance(position, list) or len(position) != len(order) or not all(map(is_storable, position)):
            return None
        after = rows.filter(_build_condition(order, position))
        str(after.query)  # converts times to UTC, which fails for years outside the range of SQLite
    except (ValueError, ValidationError, OverflowError):
        return None
    return after


def _build_condition(order: tuple[str, ...], position: list[str]) -> Q:
    (first, *fields), (value, *values) = order, position
    name = first.lstrip("-")
    after = Q(**{f"{name}__{'lt' if first.startswith('-') else 'gt'}": value})
    return after | (Q(**{name: value}) & _build_condition(tuple(fields), values)) if fields else after


class Deprecation(NamedTuple):
    """Deprecated parameter, announced in the OpenAPI document and in responses (RFC 9745, RFC 8594).

    Version 1 keeps it. The next version can omit it after `sunset`, at least a year later.
    """

    since: date
    sunset: date
    instead: str

    @property
    def description(self) -> str:
        return f"Deprecated. Removed after {self.sunset.isoformat()}. {self.instead}"

    def add_headers(self, response: Response) -> None:
        """Announce the deprecation in a response."""
        since_s, sunset_s = (
            int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()) for day in (self.since, self.sunset)
        )
        response["Deprecation"] = f"@{since_s}"
        response["Sunset"] = http_date(sunset_s)
        links = [response["Link"]] if "Link" in response else []
        explanation = '</docs/reference/api/#deprecation>; rel="deprecation"; type="text/html"'
        response["Link"] = ", ".join([*links, explanation])


OFFSET = Deprecation(date(2026, 11, 22), date(2027, 11, 22), "To read the next page, use the Link header instead.")
