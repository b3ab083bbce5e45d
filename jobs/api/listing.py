"""What a list of jobs may be narrowed to over REST: the page's own filters, and nothing senseless passes."""

from __future__ import annotations

from typing import Any, NamedTuple

import django_filters
from django.db.models import QuerySet
from django.http import QueryDict
from drf_spectacular.utils import OpenApiParameter
from rest_framework.request import Request

from jobs.access import listed_jobs
from jobs.filters import JobFilter
from jobs.models import Job
from jobs.text import whole_number
from planner.facts.spec import Problem

PAGE, PAGE_LIMIT = 50, 200
MOST_SKIPPED = 1_000_000
HELP = {
    "q": "words in the name, or a whole id",
    "status": "jobs in this state",
    "kind": "jobs of this kind",
    "tag": "jobs with this tag",
    "whose": "mine: only your own, of those that you may see",
    "owner": "jobs of this user: those that you may see",
    "archived": "archived jobs only, or too; left out by default",
}


NAMES = ("limit", "offset", *HELP)


class BadParameterError(Exception):
    """Every parameter that makes no sense."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(f"{p.field}: {p.message}" for p in problems))
        self.problems = problems


class Listed(NamedTuple):
    """A page of jobs; `next_query` asks for the one after it, None where this is the last."""

    jobs: list[Job]
    next_query: str | None


def narrowed(request: Request) -> Listed:
    """The newest jobs that the user may see and asked for.

    Raises:
        BadParameterError: naming every parameter that makes no sense.
    """
    asked = request.query_params
    known = ", ".join(NAMES)
    problems = [
        Problem(name[:100], f"is no parameter of this list; there are {known}") for name in asked if name not in NAMES
    ]
    problems += [Problem(name, "was given more than once") for name in NAMES if len(asked.getlist(name)) > 1]
    limit = whole_number(asked.get("limit", str(PAGE)), 1, PAGE_LIMIT)
    offset = whole_number(asked.get("offset", "0"), 0, MOST_SKIPPED)
    if limit is None:
        problems.append(Problem("limit", f"must be a whole number from 1 to {PAGE_LIMIT}"))
    if offset is None:
        problems.append(Problem("offset", f"must be a whole number from 0 to {MOST_SKIPPED}"))
    problems += [Problem(name, "is empty") for name in HELP if name in asked and not asked[name].strip()]
    filters = JobFilter(asked, queryset=listed_jobs(request.user).prefetch_related("tags"), user=request.user)
    problems += [Problem(name, " ".join(told)) for name, told in filters.form.errors.items()]
    if problems or limit is None or offset is None:
        raise BadParameterError(problems)
    found: QuerySet[Job] = filters.qs[offset : offset + limit + 1]
    jobs = list(found)
    more = len(jobs) > limit and offset + limit <= MOST_SKIPPED
    return Listed(jobs[:limit], _with_offset(asked, offset + limit) if more else None)


def _with_offset(asked: QueryDict, offset: int) -> str:
    following = asked.copy()
    following["offset"] = str(offset)
    return following.urlencode()


def _schema(known: django_filters.Filter) -> dict[str, Any]:
    choices = known.extra.get("choices")
    if choices is not None:
        return {"type": "string", "enum": [name for name, _ in choices]}
    return {
        "type": "string",
        "minLength": 1,
        "maxLength": known.extra["max_length"],
        "pattern": r"^[^\x00]*[^\s\x00\x1c-\x1f\x85][^\x00]*$",  # Python strips more than ECMA calls a space
    }


PARAMETERS = [
    OpenApiParameter(
        "limit",
        {"type": "integer", "minimum": 1, "maximum": PAGE_LIMIT, "default": PAGE},
        description="how many, the newest first",
    ),
    OpenApiParameter(
        "offset",
        {"type": "integer", "minimum": 0, "maximum": MOST_SKIPPED, "default": 0},
        description='how many of the newest to leave out; the answer\'s Link header, rel="next", has the page after it',
    ),
    *(OpenApiParameter(name, _schema(known), description=HELP[name]) for name, known in JobFilter.base_filters.items()),
]
