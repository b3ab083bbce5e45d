"""REST for what attempts sent: what is kept, tables of it to read or to keep, and all that the job page shows."""

from __future__ import annotations

import re

from django.http import FileResponse, HttpResponseBase
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from jobs.api.document import schema
from jobs.api.http.parameters import BadParameterError
from jobs.api.http.views import APIView
from jobs.api.shared import refusals, refuse
from jobs.core.access import find_job, get_visible_job
from jobs.models import Job
from jobs.runs.history.exports import get_event_file_name, make_event_file
from jobs.runs.history.queries import tables
from jobs.runs.history.queries.comparison import MAX_RUNS, MIN_RUNS, compare_jobs
from jobs.runs.history.queries.snapshot import get_snapshot
from jobs.runs.history.queries.step_breakdown import NoStepsError, explain_slow_steps, parse_step_range
from jobs.runs.history.queries.tables import (
    FORMATS,
    MAX_ATTEMPT,
    MAX_BINS,
    MAX_STEP,
    NoTableError,
    TableQuery,
    parse_table_query,
)
from jobs.runs.history.store.folder import NoHistoryError
from jobs.runs.history.store.schema import TABLES
from planner.facts.validation import Problem, SpecError

RANGES = {"type": "string", "pattern": "^[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*$"}
TIME = {"type": "number", "minimum": 0, "exclusiveMaximum": 2**40}
ATTEMPT = OpenApiParameter(
    "attempt", {"type": "integer", "minimum": 1, "maximum": MAX_ATTEMPT}, description="Default: the current attempt."
)
TABLE = OpenApiParameter("table", str, OpenApiParameter.PATH, enum=list(TABLES))
PARAMETERS = [
    TABLE,
    ATTEMPT,
    OpenApiParameter("from", TIME, description="unix seconds"),
    OpenApiParameter("to", TIME, description="unix seconds"),
    OpenApiParameter("steps", RANGES, description='Ranges of steps, such as "0,3,8-15". Only for tables with steps.'),
    OpenApiParameter("ranks", RANGES, description='Ranges of ranks, such as "0,3,8-15".'),
    OpenApiParameter(
        "bins",
        {"type": "integer", "minimum": 1, "maximum": MAX_BINS},
        description=(
            "Number of time bins. Default: raw rows. Traffic bins contain sums, and other bins contain means."
        ),
    ),
    OpenApiParameter("by", str, description="Columns that split each time bin into groups, separated by commas."),
    OpenApiParameter("format", str, enum=list(FORMATS), default="json"),
]
ID = "[a-z0-9-]{1,64}"
IDS = f"{ID}(,{ID}){{{MIN_RUNS - 1},{MAX_RUNS - 1}}}"
EVENT_FILE = "application/octet-stream"
FILES = {"csv": "text/csv", "parquet": "application/vnd.apache.parquet"}


class History(APIView):
    """What is kept."""

    @extend_schema(operation_id="getHistory", responses={200: schema.of("History"), **refusals(404)})
    def get(self, request: Request, job_id: str) -> Response:
        """Attempts with their tables: rows, bytes, times, and what had to go."""
        job = find_job(request.user, job_id)
        return Response({"job": job.id, "attempts": tables.list_attempts(job.id)})


class HistoryTable(APIView):
    """One table."""

    @extend_schema(
        operation_id="getHistoryTable",
        parameters=PARAMETERS,
        responses={
            (200, "application/json"): schema.of("TableRows"),
            (200, FILES["csv"]): OpenApiResponse({"type": "string"}, "With a header row."),
            (200, FILES["parquet"]): OpenApiResponse({"type": "string", "format": "binary"}),
            **refusals(404, 422),
        },
    )
    def get(self, request: Request, job_id: str, table: str) -> HttpResponseBase:
        """Its rows, or bins of them. 422 where parameters make no sense for the table or together, or the rows are too
        many for JSON: as a file all of them are told."""
        job = find_job(request.user, job_id)
        try:
            query = parse_table_query(table, dict(request.query_params.lists()))
        except NoTableError as error:
            return refuse(404, "table", str(error), "path")
        attempt = query.attempt or job.attempt
        try:
            if query.format == "json":
                return Response(tables.read_rows(job.id, attempt, table, query))
            return as_file(job, attempt, table, query)
        except NoHistoryError as error:
            return refuse(404, "attempt", str(error), "query")


class SlowSteps(APIView):
    """Some steps beside the others."""

    @extend_schema(
        operation_id="explainSlowSteps",
        parameters=[
            ATTEMPT,
            *(
                OpenApiParameter(
                    name, {"type": "integer", "minimum": 1, "maximum": MAX_STEP}, required=True, description=words
                )
                for name, words in (("from", "First step, from 1."), ("to", "Last step, included."))
            ),
        ],
        responses={200: schema.of("SlowSteps"), **refusals(404)},
    )
    def get(self, request: Request, job_id: str) -> Response:
        """Which part of a step, axis, rank, host and collective took longer in these steps than in the others, and by
        how much. 404 where there are no such steps, or no others."""
        job = find_job(request.user, job_id)
        try:
            attempt, first, last = parse_step_range(dict(request.query_params.lists()))
            return Response(explain_slow_steps(job.id, attempt or job.attempt, first, last))
        except NoStepsError as error:
            return refuse(404, "from", str(error), "query")
        except NoHistoryError as error:
            return refuse(404, "attempt", str(error), "query")


class HistorySnapshot(APIView):
    """All that the job page shows."""

    @extend_schema(
        operation_id="getSnapshot", parameters=[ATTEMPT], responses={200: schema.of("Snapshot"), **refusals(404)}
    )
    def get(self, request: Request, job_id: str) -> Response:
        """Curves, counters, traffic by bin, marks, verdicts, gauges and last log lines of an attempt, up to a position
        in each member's stream."""
        job = find_job(request.user, job_id)
        attempt = parse_table_query("marks", dict(request.query_params.lists()), "attempt").attempt or job.attempt
        try:
            return Response(get_snapshot(job.id, attempt))
        except NoHistoryError as error:
            return refuse(404, "attempt", str(error), "query")


class TensorBoard(APIView):
    """For another tool."""

    @extend_schema(
        operation_id="getEventFile",
        parameters=[ATTEMPT],
        responses={
            (200, EVENT_FILE): OpenApiResponse(
                {"type": "string", "format": "binary"}, "TensorBoard event file. Save the file in a new folder."
            ),
            **refusals(404),
        },
    )
    def get(self, request: Request, job_id: str) -> HttpResponseBase:
        """An attempt's curves as an event file of TensorBoard: loss, rates, each rank's steps, bytes by axis."""
        job = find_job(request.user, job_id)
        attempt = parse_table_query("marks", dict(request.query_params.lists()), "attempt").attempt or job.attempt
        try:
            return as_event_file(job, attempt)
        except NoHistoryError as error:
            return refuse(404, "attempt", str(error), "query")


class Compare(APIView):
    """Runs side by side."""

    @extend_schema(
        operation_id="compareJobs",
        parameters=[
            OpenApiParameter(
                "jobs",
                {"type": "string", "pattern": f"^{IDS}$"},
                required=True,
                description=f"{MIN_RUNS} to {MAX_RUNS} different job ids, separated by commas.",
            )
        ],
        responses={200: schema.of("Comparison"), **refusals(404, 422)},
    )
    def get(self, request: Request) -> Response:
        """Where their specs differ; curves by step, time and tokens; traffic, step parts and plan of each."""
        text = request.query_params.get("jobs", "")
        ids, words = text.split(","), f"`jobs` needs {MIN_RUNS} to {MAX_RUNS} different job ids, separated by commas."
        if not re.fullmatch(IDS, text):
            raise BadParameterError([Problem("jobs", words)])
        if len(set(ids)) < len(ids):
            raise SpecError([Problem("jobs", words)])
        found = [get_visible_job(request.user, job_id) for job_id in ids]
        if missing := [job_id for job_id, job in zip(ids, found, strict=True) if job is None]:
            return refuse(404, "jobs", f"Job not found: {', '.join(missing)}.", "query")
        return Response(compare_jobs([job for job in found if job is not None]))


def as_file(job: Job, attempt: int, table: str, query: TableQuery) -> FileResponse:
    """Raises GoneError, BusyError."""
    name = tables.get_file_name(job.id, attempt, table, query.format)
    told = tables.read_as_file(job.id, attempt, table, query)
    return FileResponse(told, as_attachment=True, filename=name, content_type=FILES[query.format])


def as_event_file(job: Job, attempt: int) -> FileResponse:
    """Raises GoneError, BusyError."""
    told = make_event_file(job.id, attempt, job.spec)
    return FileResponse(
        told, as_attachment=True, filename=get_event_file_name(job.id, attempt), content_type=EVENT_FILE
    )
