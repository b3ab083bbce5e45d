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

from jobs.api.http.deprecation import OFFSET
from jobs.api.http.parameters import BadParameterError
from jobs.core.access import get_visible_jobs
from jobs.core.filters import JobFilter, MultiValueFilter
from jobs.core.job_details import JobBrief, get_job_briefs
from jobs.core.text import format_number_problem, is_storable, parse_whole_number
from jobs.models import Job
from planner.facts.validation import Problem

PAGE, PAGE_LIMIT = 50, 200
MOST_SKIPPED = 1_000_000
CURSOR = re.compile(r"[A-Za-z0-9_-]{1,200}")
HELP = {
    "q": "Text in the job name, or a complete job id.",
    "status": "Statuses, separated by commas. `active` stands for all statuses of jobs that have not ended.",
    "kind": "Kinds, separated by commas.",
    "project": "Project.",
    "tag": "Tags, separated by commas. The jobs have all of these tags, or one tag that contains the commas.",
    "whose": "`mine` returns only your own jobs.",
    "owner": "User name of the owner.",
    "archived": "`only` returns archived jobs, and `too` returns all jobs. Default: jobs that are not archived.",
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
    limit = parse_whole_number(asked.get("limit", str(PAGE)), 1, PAGE_LIMIT)
    offset = parse_whole_number(asked.get("offset", "0"), 0, MOST_SKIPPED)
    if limit is None:
        problems.append(Problem("limit", format_number_problem("limit", asked["limit"], 1, PAGE_LIMIT)))
    if offset is None:
        problems.append(Problem("offset", format_number_problem("offset", asked["offset"], 0, MOST_SKIPPED)))
    after = _place(asked["cursor"]) if "cursor" in asked else None
    if "cursor" in asked and after is None:
        problems.append(
            Problem("cursor", "`cursor` is invalid. Use the cursor in the Link header of the previous page.")
        )
    if "cursor" in asked and "offset" in asked:
        problems.append(
            Problem("offset", "`offset` and `cursor` cannot be used together. Use only one of these parameters.")
        )
    problems += [
        Problem(name, f"`{name}` is empty. Give a value, or omit the parameter.")
        for name in HELP
        if name in asked and not asked[name].strip()
    ]
    filters = JobFilter(asked, queryset=get_visible_jobs(request.user), user=request.user)
    problems += [Problem(name, " ".join(told)) for name, told in filters.form.errors.items()]
    if problems or limit is None or offset is None:
        raise BadParameterError(problems)
    found: QuerySet[Job] = filters.qs.order_by("-created", "-id")
    if after is not None:
        created, job = after
        found = found.filter(Q(created__lt=created) | Q(created=created, id__lt=job))
    jobs = get_job_briefs(found[offset : offset + limit + 1])
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
        if found.tzinfo is None or not is_storable(job):
            return None
        return found.astimezone(UTC), job
    except (ValueError, OverflowError):  # the latter of what is no year in UTC
        return None


def _schema(known: django_filters.Filter) -> dict[str, Any]:
    choices = known.extra.get("choices")
    if isinstance(known, MultiValueFilter):
        names = [name for name, _ in choices]
        word = f"({'|'.join([*names, *known.extra['aliases']])})"
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
        description="Maximum number of jobs to return, newest first.",
    ),
    OpenApiParameter(
        "offset",
        {"type": "integer", "minimum": 0, "maximum": MOST_SKIPPED, "default": 0},
        description=f"Number of newest jobs to skip. {OFFSET.words}",
        deprecated=True,
    ),
    OpenApiParameter(
        "cursor",
        {"type": "string", "pattern": f"^{CURSOR.pattern}$"},
        description='Start of the page. Use the cursor in the Link header (rel="next") of the previous page.',
    ),
    *(OpenApiParameter(name, _schema(known), description=HELP[name]) for name, known in JobFilter.base_filters.items()),
]
