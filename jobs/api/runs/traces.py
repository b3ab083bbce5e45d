"""REST for steps event by event: which there are, each as a trace to download, and which step to tell next."""

from __future__ import annotations

from django.http import HttpResponse, JsonResponse
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from jobs.api.document import schema
from jobs.api.http.errors import LATER, of_request, refused
from jobs.api.http.parameters import Parameters
from jobs.api.http.views import APIView
from jobs.api.shared import refusals, refuse
from jobs.core.access import find_job, find_job_to_change
from jobs.models import TERMINAL, Job, describe_status
from jobs.runs.history.queries.results import explain_untraceable, list_traced_steps, read_traced_step
from jobs.runs.history.queries.tables import MAX_ATTEMPT
from jobs.runs.traces import traced_steps
from jobs.runs.traces.export import FORMATS
from jobs.runs.traces.traced_steps import (
    MAX_STEP,
    EventTrace,
    RedisUnreachableError,
    TooManyRequestedStepsError,
    parse_step_request,
    request_step,
    serialize_trace,
)

COLUMNS = "columns"
STEP = OpenApiParameter(
    "step",
    {"type": "integer", "minimum": 0, "maximum": MAX_STEP},
    description="Default: the latest traced step.",
)
ATTEMPT = OpenApiParameter(
    "attempt", {"type": "integer", "minimum": 1, "maximum": MAX_ATTEMPT}, description="Default: the current attempt."
)
FORMAT = OpenApiParameter(
    "format",
    str,
    enum=[*FORMATS, COLUMNS],
    default="perfetto",
    description="`columns` returns the events as columns, as in the history tables.",
)


class TracedSteps(APIView):
    """Which steps can be had event by event."""

    @extend_schema(
        operation_id="listTracedSteps",
        parameters=[ATTEMPT],
        responses={200: schema.of("TracedSteps"), **refusals(404)},
    )
    def get(self, request: Request, job_id: str) -> Response:
        """Steps of an attempt that its ranks told event by event and that are kept, in order."""
        job = find_job(request.user, job_id)
        given = Parameters(request)
        attempt = given.number("attempt", None, 1, MAX_ATTEMPT) or job.attempt
        given.check()
        kept = list_traced_steps(job.id, attempt)
        try:
            found = kept or traced_steps.read_traced_steps(job, attempt)
        except RedisUnreachableError:
            return _away()
        return Response({"steps": found})


class StepTrace(APIView):
    """A step event by event."""

    @extend_schema(
        operation_id="getTrace",
        parameters=[STEP, ATTEMPT, FORMAT],
        responses={
            (200, "application/octet-stream"): OpenApiResponse({"type": "string", "format": "binary"}, "for Perfetto"),
            (200, "application/json"): OpenApiResponse(
                {"anyOf": [schema.ref("ChromeTrace"), schema.ref("StepColumns")]},
                "Chrome trace JSON, or the events as columns.",
            ),
            **refusals(404),
        },
    )
    def get(self, request: Request, job_id: str) -> HttpResponse:
        """Compute and collectives of every rank in a step: a track for each rank and axis, waiting apart from transfer
        in each event's notes. 404 where the step was not told."""
        job = find_job(request.user, job_id)
        given = Parameters(request)
        step = given.number("step", None, 0, MAX_STEP)
        attempt = given.number("attempt", None, 1, MAX_ATTEMPT) or job.attempt
        chosen = given.one_of("format", "perfetto", (*FORMATS, COLUMNS))
        given.check()
        try:
            found = _find(job, attempt, step)
        except RedisUnreachableError:
            return _away()
        if found is None:
            words = f"No step was traced in attempt {attempt}."
            if step is not None:
                words = f"Step {step} was not traced in attempt {attempt}."
            return refuse(404, "step", f"{words} Request a trace of a step while the job runs.", "query")
        told, trace = found
        if chosen == COLUMNS:
            return JsonResponse({"step": told, **serialize_trace(trace)})
        writer = FORMATS[chosen]
        answer = HttpResponse(writer.write(trace, f"{job.name}, step {told}"), content_type=writer.content_type)
        answer["Content-Disposition"] = f'attachment; filename="{job.id}-{attempt}-step-{told}.{writer.suffix}"'
        return answer

    @extend_schema(
        operation_id="askForTrace",
        request=schema.WANTED_STEP,
        responses={202: schema.of("RequestedSteps"), **refusals(403, 404, 409, 415, 422)},
    )
    def post(self, request: Request, job_id: str) -> Response:
        """Ask a run for the events of a step, when it comes or while its hosts still have it. Who may change the job
        may. 422 of a step that it will not come to, or that its hosts no longer hold."""
        job = find_job_to_change(request.user, job_id)
        step = parse_step_request(request.data)
        if job.status in TERMINAL:
            return refuse(409, "status", f"No more steps can be traced because the job {describe_status(job.status)}.")
        if words := explain_untraceable(job, step):
            return refuse(422, "step", words, "body")
        try:
            return Response({"steps": request_step(job, step)}, status=202)
        except TooManyRequestedStepsError as error:
            return refuse(409, "step", str(error), "body")
        except RedisUnreachableError:
            return _away()


def _find(job: Job, attempt: int, step: int | None) -> tuple[int, EventTrace] | None:
    """Of the history, which is whole; what it does not have yet, of the stream."""
    kept = list_traced_steps(job.id, attempt)
    wanted = max(kept, default=None) if step is None else step
    trace = read_traced_step(job.id, attempt, wanted) if wanted in kept and wanted is not None else None
    if trace is not None and wanted is not None and (step is not None or job.status in TERMINAL):
        return wanted, trace
    return traced_steps.read_step(job, attempt, step) or (None if trace is None or wanted is None else (wanted, trace))


def _away() -> Response:
    return refused(of_request(503, "Meshboard cannot reach Redis. Try again later."), LATER)
