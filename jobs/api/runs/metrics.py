"""REST of what a run measured: its metrics and its traffic, by time, and what it proved; as JSON or a file."""

from __future__ import annotations

from django.http.response import HttpResponseBase
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from jobs.api.document import schema
from jobs.api.http.negotiation import WhateverIsAccepted
from jobs.api.http.parameters import Parameters
from jobs.api.http.views import APIView
from jobs.api.runs.history import ATTEMPT, FILES, TIME, as_file
from jobs.api.shared import refusals, refuse
from jobs.core.access import find_job
from jobs.runs.history.queries import tables
from jobs.runs.history.queries.results import get_results
from jobs.runs.history.queries.tables import FORMATS, MAX_ATTEMPT, MAX_BINS, TableQuery, parse_time
from jobs.runs.history.store.folder import NoHistoryError

USUAL_POINTS = 200
GROUPS: dict[str, dict[str, tuple[str, ...]]] = {
    "steps": {"job": (), "rank": ("rank",)},
    "traffic": {"job": (), "rank": ("rank",), "axis": ("axis",), "collective": ("axis", "op")},
}


def parameters(table: str) -> list[OpenApiParameter]:
    return [
        OpenApiParameter("by", {"type": "string", "enum": list(GROUPS[table]), "default": "job"}),
        ATTEMPT,
        OpenApiParameter("from", TIME, description="Unix seconds. Default: start of the attempt."),
        OpenApiParameter("to", TIME, description="Unix seconds. Default: end of the attempt."),
        OpenApiParameter(
            "points",
            {"type": "integer", "minimum": 1, "maximum": MAX_BINS, "default": USUAL_POINTS},
            description="Number of equal time bins. Empty bins are omitted. With 1, one bin has all rows.",
        ),
        OpenApiParameter("format", {"type": "string", "enum": list(FORMATS), "default": "json"}),
    ]


ROWS = {
    (200, "application/json"): schema.of("TableRows"),
    (200, FILES["csv"]): OpenApiResponse({"type": "string"}, "With a header row."),
    (200, FILES["parquet"]): OpenApiResponse({"type": "string", "format": "binary"}),
    **refusals(404, 422),
}


class Binned(APIView):
    """A table by time."""

    table = ""
    content_negotiation_class = WhateverIsAccepted

    def answer(self, request: Request, job_id: str) -> HttpResponseBase:
        given = Parameters(request)
        by = given.one_of("by", "job", tuple(GROUPS[self.table]))
        attempt = given.number("attempt", None, 1, MAX_ATTEMPT)
        since = given.read("from", None, "`from` is not a valid time. Use Unix seconds.", parse_time)
        until = given.read("to", None, "`to` is not a valid time. Use Unix seconds.", parse_time)
        points = given.number("points", USUAL_POINTS, 1, MAX_BINS)
        form = given.one_of("format", "json", FORMATS)
        if since is not None and until is not None and since > until:
            given.clash("from", f"`from` is {since:g}, which is later than `to` ({until:g}). Use an earlier `from`.")
        given.check()
        job = find_job(request.user, job_id)
        number = attempt or job.attempt
        asked = TableQuery(number, since, until, None, None, points, GROUPS[self.table][by], form)
        try:
            if form != "json":
                return as_file(job, number, self.table, asked)
            return Response(tables.read_rows(job.id, number, self.table, asked))
        except NoHistoryError as error:
            return refuse(404, "attempt", str(error), "query")


class Metrics(Binned):
    """Steps."""

    table = "steps"

    @extend_schema(operation_id="getMetrics", parameters=parameters("steps"), responses=ROWS)
    def get(self, request: Request, job_id: str) -> HttpResponseBase:
        """Step time, loss, gradient norm, learning rate, time for data and for the optimiser by time: the least, mean
        and most of each. While it runs, up to some seconds ago."""
        return self.answer(request, job_id)


class Traffic(Binned):
    """Bytes."""

    table = "traffic"

    @extend_schema(operation_id="getTraffic", parameters=parameters("traffic"), responses=ROWS)
    def get(self, request: Request, job_id: str) -> HttpResponseBase:
        """Collectives by time: calls, completed ones, payload and algorithmic bytes, busy seconds: sums over all ranks,
        and exact. `by` tells them apart; points=1 has the totals. While it runs, up to some seconds ago."""
        return self.answer(request, job_id)


class OfAttempt(APIView):
    """What came of it."""

    @extend_schema(
        operation_id="getResults", parameters=[ATTEMPT], responses={200: schema.of("Results"), **refusals(404)}
    )
    def get(self, request: Request, job_id: str) -> Response:
        """What an attempt proved or found so far: predicted beside measured bytes, the checks of copies and of the
        first steps, what a dry run found of each rank, and a lab's result."""
        given = Parameters(request)
        attempt = given.number("attempt", None, 1, MAX_ATTEMPT)
        given.check()
        job = find_job(request.user, job_id)
        try:
            return Response(get_results(job, attempt or job.attempt))
        except NoHistoryError as error:
            return refuse(404, "attempt", str(error), "query")
