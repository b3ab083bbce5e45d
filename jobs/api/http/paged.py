"""A list page by page: a page begins behind a row and not at a number, so that what comes or goes moves nothing."""

from __future__ import annotations

import json
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from functools import reduce
from typing import Any, NamedTuple

from django.core.exceptions import ValidationError
from django.db.models import Q, QuerySet
from drf_spectacular.utils import OpenApiParameter
from rest_framework.request import Request

from jobs.api.http.parameters import Parameters
from jobs.core.text import is_storable, parse_json

PAGE = 1000  # by itself too: these lists came whole once, and nobody has more tokens
CURSOR = re.compile(r"[A-Za-z0-9_-]{1,1000}")


def parameters(usual: int | None = PAGE) -> list[OpenApiParameter]:
    """`usual`: how many where nobody says; None for all."""
    limit = {"type": "integer", "minimum": 1, "maximum": PAGE, **({} if usual is None else {"default": usual})}
    return [
        OpenApiParameter("limit", limit, description="Number of rows." + (" Default: all." if usual is None else "")),
        OpenApiParameter(
            "cursor",
            {"type": "string", "pattern": f"^{CURSOR.pattern}$"},
            description='Start of the page. Use the cursor in the Link header (rel="next") of the previous page.',
        ),
    ]


class Paged(NamedTuple):
    """`headers`: lead to the page behind, where there is one."""

    rows: list[Any]
    headers: dict[str, str]


def paged(request: Request, rows: QuerySet[Any], *order: str, usual: int | None = PAGE) -> Paged:
    """The rows of the page that was asked for. `order`: fields that together no two rows share. `usual` as for
    `parameters`.

    Raises:
        BadParameterError: naming every parameter that makes no sense.
    """
    given = Parameters(request)
    limit = given.number("limit", usual, 1, PAGE)
    words = "`cursor` is invalid. Use the cursor in the Link header of the previous page."
    left = given.read("cursor", rows, words, lambda cursor: _behind(rows, order, cursor)).order_by(*order)
    given.check()
    if limit is None:
        return Paged(list(left), {})
    found = list(left[: limit + 1])
    return Paged(found[:limit], _next(request, order, found[limit - 1]) if len(found) > limit else {})


def _next(request: Request, order: tuple[str, ...], last: Any) -> dict[str, str]:
    place = [str(reduce(getattr, field.lstrip("-").split("__"), last)) for field in order]
    following = request.query_params.copy()
    following["cursor"] = urlsafe_b64encode(json.dumps(place, ensure_ascii=False).encode()).decode().rstrip("=")
    return {"Link": f'<{request.build_absolute_uri(request.path)}?{following.urlencode()}>; rel="next"'}


def _behind(rows: QuerySet[Any], order: tuple[str, ...], cursor: str) -> QuerySet[Any] | None:
    """Those behind a place; None for what is no cursor of such a list."""
    if not CURSOR.fullmatch(cursor):
        return None
    try:
        place = parse_json(urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        if not isinstance(place, list) or len(place) != len(order) or not all(map(is_storable, place)):
            return None
        behind = rows.filter(_condition(order, place))
        str(behind.query)  # SQLite's times are turned into UTC here, where some have no year
    except (ValueError, ValidationError, OverflowError):
        return None
    return behind


def _condition(order: tuple[str, ...], place: list[str]) -> Q:
    (first, *others), (value, *values) = order, place
    name = first.lstrip("-")
    behind = Q(**{f"{name}__{'lt' if first.startswith('-') else 'gt'}": value})
    return behind | (Q(**{name: value}) & _condition(tuple(others), values)) if others else behind
