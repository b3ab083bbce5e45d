"""What a list of jobs may be narrowed to over REST: the page's own filters, and nothing senseless passes."""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from datetime import UTC, datetime
from typing import Any, NamedTuple

import django_filters
from django.db.models import Q, QuerySet
from django.http import QueryDict
from drf_spectacular.utils import OpenApiParameter
from rest_framework.request import Request

from jobs.access import visible_jobs
from jobs.api.http.deprecation import OFFSET
from jobs.api.http.parameters import BadParameterError
from jobs.filters import JobFilter, SeveralFilter
from jobs.models import Job
from jobs.present import JobBrief, job_briefs
from jobs.text import storable, whole_number
from planner.facts.spec import Problem

PAGE, PAGE_LIMIT = 50, 200
MOST_SKIPPED = 1_000_000
CURSOR = re.compile(r"[A-Za-z0-9_-]{1,200}")
HELP = {
    "q": "words in the name, or a whole id",
    "status": "jobs in one of these states, commas between; active: in any that is no end",
    "kind": "jobs of one of these kinds, commas between",
    "project": "jobs of this project: those that you may see",
    "tag": "jobs with all of these tags, commas between; or with one tag that has those commas in it",
    "whose": "mine: only your own, of those that you may see",
    "owner": "jobs of this user: those that you may see",
    "archived": "archived jobs only, or too; left out by default",
}


class Listed(NamedTuple):
    """A page of jobs; `next_query` asks for the one after it, None where this is the last."""

    jobs: list[JobBrief]
    next_query: str | None


def narrowed(request: Request) -> Listed:
    """The newest jobs that the user may see and asked for.

    Raises:
        BadParameterError: naming every parameter that makes no sense.
    """
    asked = request.query_params
    problems = []
    limit = whole_number(asked.get("limit", str(PAGE)), 1, PAGE_LIMIT)
    offset = whole_number(asked.get("offset", "0"), 0, MOST_SKIPPED)
    if limit is None:
        problems.append(Problem("limit", f"must be a whole number from 1 to {PAGE_LIMIT}"))
    if offset is None:
        problems.append(Problem("offset", f"must be a whole number from 0 to {MOST_SKIPPED}"))
    after = _place(asked["cursor"]) if "cursor" in asked else None
    if "cursor" in asked and after is None:
        problems.append(Problem("cursor", "is none that a page of this list gave"))
    if "cursor" in asked and "offset" in asked:
        problems.append(Problem("offset", "cannot be given beside a cursor"))
    problems += [Problem(name, "is empty") for name in HELP if name in asked and not asked[name].strip()]
    filters = JobFilter(asked, queryset=visible_jobs(request.user), user=request.user)
    problems += [Problem(name, " ".join(told)) for name, told in filters.form.errors.items()]
    if problems or limit is None or offset is None:
        raise BadParameterError(problems)
    found: QuerySet[Job] = filters.qs.order_by("-created", "-id")
    if after is not None:
        created, job = after
        found = found.filter(Q(created__lt=created) | Q(created=created, id__lt=job))
    jobs = job_briefs(found[offset : offset + limit + 1])
    return Listed(jobs[:limit], _behind(asked, jobs[limit - 1]) if len(jobs) > limit else None)


def _behind(asked: QueryDict, last: JobBrief) -> str:
    """The query of the page behind a job: jobs that come meanwhile move nothing."""
    following = asked.copy()
    following.pop("offset", None)
    following["cursor"] = urlsafe_b64encode(f"{last['created']} {last['id']}".encode()).decode().rstrip("=")
    return following.urlencode()


def _place(cursor: str) -> tuple[datetime, str] | None:
    """The creation and id of the last job before it; None for what is no cursor."""
    if not CURSOR.fullmatch(cursor):
        return None
    try:
        told = urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode("ascii")
        created, _, job = told.partition(" ")
        found = datetime.fromisoformat(created)
        if found.tzinfo is None or not storable(job):
            return None
        return found.astimezone(UTC), job
    except (ValueError, OverflowError):  # the latter of what is no year in UTC
        return None


def _schema(known: django_filters.Filter) -> dict[str, Any]:
    choices = known.extra.get("choices")
    if isinstance(known, SeveralFilter):
        names = [name for name, _ in choices]
        word = f"({'|'.join([*names, *known.extra['stands_for']])})"
        one, several = {"enum": names}, {"pattern": f"^{word}(,{word})*$"}
        return {"anyOf": [{"type": "string", **one}, {"type": "string", **several}]}
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
        description=f"how many of the newest to leave out; {OFFSET.words}",
        deprecated=True,
    ),
    OpenApiParameter(
        "cursor",
        {"type": "string", "pattern": f"^{CURSOR.pattern}$"},
        description='a page as the Link header, rel="next", of the one before it has it; to be taken as it is',
    ),
    *(OpenApiParameter(name, _schema(known), description=HELP[name]) for name, known in JobFilter.base_filters.items()),
]
