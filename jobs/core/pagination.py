"""A page of a long list, narrowed by words in what its lines are called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from django.core.paginator import Page, Paginator
from django.db.models import QuerySet
from django.http import HttpRequest

from jobs.core.text import storable

PAGE_SIZE = 50
LONGEST = 100  # characters of the words


class Listed(NamedTuple):
    """`words`: what was asked for. `long`: it has a use for a search."""

    page: Page[Any]
    words: str
    long: bool


def listed(request: HttpRequest, rows: QuerySet[Any], name: str, *, size: int = PAGE_SIZE) -> Listed:
    """Those with the words of `q` in the field `name`; a page that is not there is the nearest one."""
    words = request.GET.get("q", "").strip()[:LONGEST]
    if words and not storable(words):
        rows = rows.none()
    elif words:
        rows = rows.filter(**{f"{name}__icontains": words})
    page = page_of(request, rows, "page", size=size)
    return Listed(page, words, bool(words) or page.paginator.num_pages > 1)


def page_of(
    request: HttpRequest, rows: QuerySet[Any] | Sequence[Any], parameter: str, *, size: int = PAGE_SIZE
) -> Page[Any]:
    """Of a list beside others: each turns by a parameter of its own."""
    return Paginator(rows, size).get_page(request.GET.get(parameter))
