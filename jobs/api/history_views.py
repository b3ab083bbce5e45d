"""REST views of stored histories, measurements, comparisons, and baselines."""

from __future__ import annotations

import re

from django.http import FileResponse, HttpResponseBase
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse
from rest_framework.request import Request
from rest_framework.response import Response

from jobs.api import openapi
from jobs.api.errors import refuse, reject_body
from jobs.api.openapi import describe_problems, operation
from jobs.api.parameters import BadParameterError, Parameters
from jobs.api.parsers import FixedMediaType
from jobs.api.views import APIView, get_user
from jobs.core.access import find_job, get_visible_job
from jobs.core.errors import NotFoundError
from jobs.core.text import is_storable
from jobs.models import Job
from jobs.models.validators import MAX_BRANCH_CHARACTERS, find_branch_problem
from jobs.planning.schemas import validate_request
from jobs.runs import baselines
from jobs.runs.history.exports import get_event_file_name, make_event_file
from jobs.runs.history.queries import tables
from jobs.runs.history.queries.comparison import MAX_RUNS, MIN_RUNS, compare_jobs
from jobs.runs.history.queries.results import get_results
from jobs.runs.history.queries.snapshot import get_snapshot
from jobs.runs.history.queries.step_breakdown import explain_slow_steps, parse_step_range
from jobs.runs.history.queries.tables import (
    FORMATS,
    MAX_ATTEMPT,
    MAX_BINS,
    MAX_STEP,
    TableQuery,
    parse_table_query,
    parse_time,
)
from jobs.runs.history.store.schema import TABLES
from jobs.runs.script_prediction import predict_script
from planner.facts.validation import Problem, SpecError

RANGES = {"type": "string", "pattern": "^[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*$"}
TIME = {"type": "number", "minimum": 0, "exclusiveMaximum": 2**40}
ATTEMPT = OpenApiParameter(
    "attempt", {"type": "integer", "minimum": 1, "maximum": MAX_ATTEMPT}, description="Default: the current attempt."
)
TABLE = OpenApiParameter("table", str, OpenApiParameter.PATH, enum=list(TABLES))
TABLE_PARAMETERS = [
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


class HistoryView(APIView):
    @operation("getHistory", "History", 404)
    def get(self, request: Request, job_id: str) -> Response:
        """List the attempts of a job with their stored tables: rows, bytes, times, and deleted data."""
        job = find_job(request.user, job_id)
        return Response({"job": job.id, "attempts": tables.list_attempts(job.id)})


class HistoryTableView(APIView):
    @operation(
        "getHistoryTable",
        {
            (200, "application/json"): openapi.describe_response("TableRows"),
            (200, FILES["csv"]): OpenApiResponse({"type": "string"}, "With a header row."),
            (200, FILES["parquet"]): OpenApiResponse({"type": "string", "format": "binary"}),
        },
        404,
        422,
        parameters=TABLE_PARAMETERS,
    )
    def get(self, request: Request, job_id: str, table: str) -> HttpResponseBase:
        """Return rows of a table, or time bins.

        422: the parameters contradict the table or each other, or JSON would have too many rows. Files have no such
        limit.
        """
        job = find_job(request.user, job_id)
        query = parse_table_query(table, dict(request.query_params.lists()))
        attempt = query.attempt or job.attempt
        if query.format == "json":
            return Response(tables.read_rows(job.id, attempt, table, query))
        return as_file(job, attempt, table, query)


class SlowStepsView(APIView):
    @operation(
        "explainSlowSteps",
        "SlowSteps",
        404,
        parameters=[
            ATTEMPT,
            *(
                OpenApiParameter(
                    name, {"type": "integer", "minimum": 1, "maximum": MAX_STEP}, required=True, description=words
                )
                for name, words in (("from", "First step, from 1."), ("to", "Last step, included."))
            ),
        ],
    )
    def get(self, request: Request, job_id: str) -> Response:
        """Return which part, axis, rank, host, and collective took longer in these steps than in other steps.

        404: these steps or other steps do not exist.
        """
        job = find_job(request.user, job_id)
        attempt, first, last = parse_step_range(dict(request.query_params.lists()))
        return Response(explain_slow_steps(job.id, attempt or job.attempt, first, last))


class SnapshotView(APIView):
    @operation("getSnapshot", "Snapshot", 404, parameters=[ATTEMPT])
    def get(self, request: Request, job_id: str) -> Response:
        """Return the data of the job page for an attempt: curves, counters, traffic, marks, verdicts, gauges, and log
        ends.

        The data ends at a position in the stream of each host.
        """
        job = find_job(request.user, job_id)
        attempt = parse_table_query("marks", dict(request.query_params.lists()), "attempt").attempt or job.attempt
        return Response(get_snapshot(job.id, attempt))


class TensorBoardView(APIView):
    @operation(
        "getEventFile",
        {
            (200, EVENT_FILE): OpenApiResponse(
                {"type": "string", "format": "binary"}, "TensorBoard event file. Save the file in a new folder."
            )
        },
        404,
        parameters=[ATTEMPT],
    )
    def get(self, request: Request, job_id: str) -> HttpResponseBase:
        """Return the curves of an attempt as a TensorBoard event file: loss, rates, steps, and bytes."""
        job = find_job(request.user, job_id)
        attempt = parse_table_query("marks", dict(request.query_params.lists()), "attempt").attempt or job.attempt
        return as_event_file(job, attempt)


class CompareView(APIView):
    @operation(
        "compareJobs",
        "Comparison",
        404,
        422,
        parameters=[
            OpenApiParameter(
                "jobs",
                {"type": "string", "pattern": f"^{IDS}$"},
                required=True,
                description=f"{MIN_RUNS} to {MAX_RUNS} different job ids, separated by commas.",
            )
        ],
    )
    def get(self, request: Request) -> Response:
        """Compare jobs: spec differences, curves by step, time, and tokens, traffic, step parts, and plans."""
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
    """Return a table as a file. Raises GoneError, BusyError."""
    name = tables.get_file_name(job.id, attempt, table, query.format)
    content = tables.read_as_file(job.id, attempt, table, query)
    return FileResponse(content, as_attachment=True, filename=name, content_type=FILES[query.format])


def as_event_file(job: Job, attempt: int) -> FileResponse:
    """Return the curves as a TensorBoard event file. Raises GoneError, BusyError."""
    content = make_event_file(job.id, attempt, job.spec)
    return FileResponse(
        content, as_attachment=True, filename=get_event_file_name(job.id, attempt), content_type=EVENT_FILE
    )


USUAL_POINTS = 200
GROUPS: dict[str, dict[str, tuple[str, ...]]] = {
    "steps": {"job": (), "rank": ("rank",)},
    "traffic": {"job": (), "rank": ("rank",), "axis": ("axis",), "collective": ("axis", "op")},
}


def _describe_parameters(table: str) -> list[OpenApiParameter]:
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


TABLE_RESPONSES = {
    (200, "application/json"): openapi.describe_response("TableRows"),
    (200, FILES["csv"]): OpenApiResponse({"type": "string"}, "With a header row."),
    (200, FILES["parquet"]): OpenApiResponse({"type": "string", "format": "binary"}),
    **describe_problems(404, 422),
}


class BinnedTableView(APIView):
    table = ""
    content_negotiation_class = FixedMediaType

    def answer(self, request: Request, job_id: str) -> HttpResponseBase:
        query = Parameters(request)
        by = query.read_choice("by", "job", tuple(GROUPS[self.table]))
        attempt = query.read_number("attempt", None, 1, MAX_ATTEMPT)
        since = query.read("from", None, "`from` is not a valid time. Use Unix seconds.", parse_time)
        until = query.read("to", None, "`to` is not a valid time. Use Unix seconds.", parse_time)
        points = query.read_number("points", USUAL_POINTS, 1, MAX_BINS)
        form = query.read_choice("format", "json", FORMATS)
        if since is not None and until is not None and since > until:
            query.add_clash(
                "from", f"`from` is {since:g}, which is later than `to` ({until:g}). Use an earlier `from`."
            )
        query.check()
        job = find_job(request.user, job_id)
        number = attempt or job.attempt
        table_query = TableQuery(number, since, until, None, None, points, GROUPS[self.table][by], form)
        if form != "json":
            return as_file(job, number, self.table, table_query)
        return Response(tables.read_rows(job.id, number, self.table, table_query))


class MetricsView(BinnedTableView):
    table = "steps"

    @operation("getMetrics", TABLE_RESPONSES, parameters=_describe_parameters("steps"))
    def get(self, request: Request, job_id: str) -> HttpResponseBase:
        """Return step time, loss, gradient norm, learning rate, and data and optimizer time in time bins.

        Each column has minimum, mean, and maximum. For a running job, the last seconds are missing.
        """
        return self.answer(request, job_id)


class TrafficView(BinnedTableView):
    table = "traffic"

    @operation("getTraffic", TABLE_RESPONSES, parameters=_describe_parameters("traffic"))
    def get(self, request: Request, job_id: str) -> HttpResponseBase:
        """Return collectives in time bins: calls, completed calls, payload and algorithmic bytes, and busy seconds.

        Values are exact sums over all ranks, split with `by`. One bin (points=1) has the totals. For a running job,
        the last seconds are missing.
        """
        return self.answer(request, job_id)


class ResultsView(APIView):
    @operation("getResults", "Results", 404, parameters=[ATTEMPT])
    def get(self, request: Request, job_id: str) -> Response:
        """Return the checks of an attempt so far.

        The checks compare bytes with the prediction, replicas, and the first steps with a single-process reference.
        A dry run has results per rank, and a benchmark of collectives has its result.
        """
        query = Parameters(request)
        attempt = query.read_number("attempt", None, 1, MAX_ATTEMPT)
        query.check()
        job = find_job(request.user, job_id)
        return Response(get_results(job, attempt or job.attempt))


class ScriptPredictionView(APIView):
    @operation("getScriptPrediction", "ScriptPrediction", 404)
    def get(self, request: Request, job_id: str) -> Response:
        """Return the prediction of a script with `script.plan`, compared with the last attempt.

        Without `script.plan.layout`, the layout is inferred from the process groups of the run.
        """
        return Response(predict_script(find_job(request.user, job_id)))


PROJECT = OpenApiParameter("project", {"type": "string", "minLength": 1, "maxLength": 100}, OpenApiParameter.PATH)
BRANCH = OpenApiParameter(
    "branch",
    {"type": "string", "maxLength": MAX_BRANCH_CHARACTERS},
    OpenApiParameter.PATH,
    description="A valid Git branch name.",
)


class BaselinesView(APIView):
    @operation("listBaselines", openapi.describe_list("BranchBrief"), 404, parameters=[PROJECT])
    def get(self, request: Request, project: str) -> Response:
        """List the branches of a project that have a baseline.

        In the project `default`, each user has separate branches.
        """
        return Response(baselines.list_branches(get_user(request), _stored(project)))


class BaselineView(APIView):
    path_fields = ("branch",)

    @operation("getBaseline", "Baseline", 404, parameters=[PROJECT, BRANCH])
    def get(self, request: Request, project: str, branch: str) -> Response:
        """Return the measurements of the newest runs of a branch, at most 20."""
        return Response(baselines.get_baseline(get_user(request), _stored(project), _stored(branch, "baseline")))

    @operation(
        "setBaseline",
        "Baseline",
        404,
        409,
        415,
        422,
        request=openapi.request_body(openapi.ref("BaselineRequest"), {"job": "abcdefghij"}),
        parameters=[PROJECT, BRANCH],
    )
    def put(self, request: Request, project: str, branch: str) -> Response:
        """Add the run of a job to the baseline of a branch. Project operators only.

        The measurements stay if the job is deleted. The newest 20 runs of a branch measure the noise. 409: the job
        has not succeeded.
        """
        wish = validate_request(baselines.BaselineRequest, request.data)
        if words := find_branch_problem(branch):
            return refuse(422, "branch", words, "path")
        return Response(baselines.add_run(get_user(request), _stored(project), branch, wish.job))

    @operation("forgetBaseline", {204: None}, 404, 415, 422, parameters=[PROJECT, BRANCH])
    def delete(self, request: Request, project: str, branch: str) -> Response:
        """Delete all runs of a branch. Project operators only."""
        reject_body(request)
        baselines.delete_baseline(get_user(request), _stored(project), _stored(branch, "baseline"))
        return Response(status=204)


def _stored(name: str, what: str = "project") -> str:
    """Return a name that a database can store. Raises NotFoundError for another name."""
    if not is_storable(name):
        raise NotFoundError(what)
    return name
