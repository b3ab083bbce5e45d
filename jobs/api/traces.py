"""REST for steps event by event: as a trace to download, and which step to tell next."""

from __future__ import annotations

from django.http import HttpResponse
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from jobs.access import find_job
from jobs.api import schema
from jobs.api.errors import RETRY_AFTER_S, body
from jobs.api.listing import BadParameterError
from jobs.api.views import refusals, refuse
from jobs.models import TERMINAL
from jobs.text import whole_number
from jobs.traces import chrome, perfetto
from jobs.traces.requests import LARGEST_STEP, wanted_step
from jobs.traces.source import NoTraceError, find
from jobs.traces.stream import AwayError
from jobs.traces.wanted import FullError, ask
from planner.facts.spec import Problem

FORMATS = {"perfetto": perfetto, "chrome": chrome}
STEP = OpenApiParameter(
    "step",
    {"type": "integer", "minimum": 0, "maximum": LARGEST_STEP},
    description="by default the newest that was told",
)
ATTEMPT = OpenApiParameter(
    "attempt", {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}, description="by default the current one"
)
FORMAT = OpenApiParameter("format", str, enum=list(FORMATS), default="perfetto")


class StepTrace(APIView):
    """A step event by event."""

    @extend_schema(
        operation_id="getTrace",
        parameters=[STEP, ATTEMPT, FORMAT],
        responses={
            (200, "application/octet-stream"): OpenApiResponse({"type": "string", "format": "binary"}, "for Perfetto"),
            (200, "application/json"): schema.of("ChromeTrace"),
            **refusals(404),
        },
    )
    def get(self, request: Request, job_id: str) -> HttpResponse:
        """Compute and collectives of every rank in a step: a track for each rank and axis, waiting apart from transfer
        in each event's notes. 404 where the step was not told."""
        job = find_job(request.user, job_id)
        step = _number(request, "step", 0, LARGEST_STEP)
        attempt = _number(request, "attempt", 1, 2**31 - 1) or job.attempt
        chosen = request.query_params.get("format", "perfetto")
        if chosen not in FORMATS:
            raise BadParameterError([Problem("format", f"is none of {', '.join(FORMATS)}")])
        try:
            told, trace = find(job, attempt, step)
        except NoTraceError as error:
            return refuse(404, "step", str(error))
        except AwayError:
            return _away()
        writer = FORMATS[chosen]
        answer = HttpResponse(writer.write(trace, f"{job.name}, step {told}"), content_type=writer.CONTENT_TYPE)
        answer["Content-Disposition"] = f'attachment; filename="{job.id}-{attempt}-step-{told}.{writer.SUFFIX}"'
        return answer

    @extend_schema(
        operation_id="askForTrace",
        request=schema.WANTED_STEP,
        responses={202: schema.of("WantedSteps"), **refusals(403, 404, 409, 415, 422)},
    )
    def post(self, request: Request, job_id: str) -> Response:
        """Ask a run for the events of a step, when it comes or while its hosts still have it."""
        job = find_job(request.user, job_id)
        step = wanted_step(request.data)
        if job.status in TERMINAL:
            return refuse(409, "status", f"a job that is {job.status} tells no further step")
        try:
            return Response({"steps": ask(job, step)}, status=202)
        except FullError as error:
            return refuse(409, "step", str(error))
        except AwayError:
            return _away()


def _away() -> Response:
    told = body([Problem("request", "Redis cannot be reached just now")])
    return Response(told, status=503, headers={"Retry-After": str(RETRY_AFTER_S)})


def _number(request: Request, name: str, least: int, most: int) -> int | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    number = whole_number(text, least, most)
    if number is None:
        raise BadParameterError([Problem(name, f"must be a whole number from {least} to {most}")])
    return number
