"""REST views of traced steps and imported traces."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse, JsonResponse
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse
from rest_framework.request import Request
from rest_framework.response import Response

from jobs.api import openapi
from jobs.api.errors import RETRY_LATER, make_problem_response, refuse, reject_body
from jobs.api.openapi import operation
from jobs.api.parameters import Parameters
from jobs.api.parsers import FixedMediaType, PartParser
from jobs.api.problems import build_request_problem
from jobs.api.views import APIView, get_user
from jobs.core.access import find_job, find_job_to_change
from jobs.core.errors import NotFoundError
from jobs.core.received_files import MAX_PART_BYTES
from jobs.core.text import is_storable, parse_whole_number
from jobs.models import TERMINAL, ImportedTrace, Job, describe_status
from jobs.planning.schemas import validate_request
from jobs.runs.history.queries.results import explain_untraceable, list_traced_steps, read_traced_step
from jobs.runs.history.queries.tables import MAX_ATTEMPT
from jobs.runs.traces import traced_steps
from jobs.runs.traces.export import FORMATS
from jobs.runs.traces.imports import store
from jobs.runs.traces.imports.common import ImportProblemError
from jobs.runs.traces.imports.store import ImportRequest, check_import_query, serialize_import
from jobs.runs.traces.trace_events import EventTrace, serialize_trace
from jobs.runs.traces.traced_steps import (
    MAX_STEP,
    RedisUnreachableError,
    TooManyRequestedStepsError,
    parse_step_request,
    request_step,
)

COLUMNS = "columns"
TRACED_STEP = OpenApiParameter(
    "step",
    {"type": "integer", "minimum": 0, "maximum": MAX_STEP},
    description="Default: the latest traced step.",
)
TRACE_ATTEMPT = OpenApiParameter(
    "attempt", {"type": "integer", "minimum": 1, "maximum": MAX_ATTEMPT}, description="Default: the current attempt."
)
FORMAT = OpenApiParameter(
    "format",
    str,
    enum=[*FORMATS, COLUMNS],
    default="perfetto",
    description="`columns` returns the events as columns, as in the history tables.",
)


class TracedStepsView(APIView):
    @operation("listTracedSteps", "TracedSteps", 404, parameters=[TRACE_ATTEMPT])
    def get(self, request: Request, job_id: str) -> Response:
        """List the stored traced steps of an attempt, in order."""
        job = find_job(request.user, job_id)
        query = Parameters(request)
        attempt = query.read_number("attempt", None, 1, MAX_ATTEMPT) or job.attempt
        query.check()
        stored_steps = list_traced_steps(job.id, attempt)
        try:
            found = stored_steps or traced_steps.read_traced_steps(job, attempt)
        except RedisUnreachableError:
            return _away()
        return Response({"steps": found})


class StepTraceView(APIView):
    @operation(
        "getTrace",
        {
            (200, "application/octet-stream"): OpenApiResponse({"type": "string", "format": "binary"}, "for Perfetto"),
            (200, "application/json"): OpenApiResponse(
                {"anyOf": [openapi.ref("ChromeTrace"), openapi.ref("StepColumns")]},
                "Chrome trace JSON, or the events as columns.",
            ),
        },
        404,
        parameters=[TRACED_STEP, TRACE_ATTEMPT, FORMAT],
    )
    def get(self, request: Request, job_id: str) -> HttpResponse:
        """Return compute and collectives of every rank in a step, with a track per rank and axis.

        The notes of an event separate waiting from transfer. 404: the step was not traced.
        """
        job = find_job(request.user, job_id)
        query = Parameters(request)
        step = query.read_number("step", None, 0, MAX_STEP)
        attempt = query.read_number("attempt", None, 1, MAX_ATTEMPT) or job.attempt
        chosen = query.read_choice("format", "perfetto", (*FORMATS, COLUMNS))
        query.check()
        try:
            found = _find_trace(job, attempt, step)
        except RedisUnreachableError:
            return _away()
        if found is None:
            words = f"No step was traced in attempt {attempt}."
            if step is not None:
                words = f"Step {step} was not traced in attempt {attempt}."
            return refuse(404, "step", f"{words} Request a trace of a step while the job runs.", "query")
        traced_step, trace = found
        if chosen == COLUMNS:
            return JsonResponse({"step": traced_step, **serialize_trace(trace)})
        writer = FORMATS[chosen]
        answer = HttpResponse(writer.write(trace, f"{job.name}, step {traced_step}"), content_type=writer.content_type)
        answer["Content-Disposition"] = f'attachment; filename="{job.id}-{attempt}-step-{traced_step}.{writer.suffix}"'
        return answer

    @operation(
        "askForTrace",
        {202: openapi.describe_response("RequestedSteps")},
        404,
        409,
        415,
        422,
        request=openapi.WANTED_STEP,
    )
    def post(self, request: Request, job_id: str) -> Response:
        """Request a trace of a step of a running job that you may change.

        422: the job will not reach this step, or its hosts no longer have the step.
        """
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


def _find_trace(job: Job, attempt: int, step: int | None) -> tuple[int, EventTrace] | None:
    """Return a traced step from the history, or from the live stream if the history does not have it yet."""
    stored_steps = list_traced_steps(job.id, attempt)
    wanted = max(stored_steps, default=None) if step is None else step
    trace = read_traced_step(job.id, attempt, wanted) if wanted in stored_steps and wanted is not None else None
    if trace is not None and wanted is not None and (step is not None or job.status in TERMINAL):
        return wanted, trace
    return traced_steps.read_step(job, attempt, step) or (None if trace is None or wanted is None else (wanted, trace))


def _away() -> Response:
    return make_problem_response(
        build_request_problem(503, "Meshboard cannot reach Redis. Try again later."), RETRY_LATER
    )


PART = {"application/octet-stream": {"type": "string", "format": "binary", "maxLength": MAX_PART_BYTES}}
IMPORT_EXAMPLE = {"name": "a run", "files": [{"name": "trace_rank0.json", "size": 120000}]}
PART_OFFSET = OpenApiParameter(
    "offset",
    {"type": "integer", "minimum": 0, "maximum": store.MAX_FILE_BYTES},
    required=True,
    description="Byte offset of this part in the file, equal to the number of bytes received so far.",
)
IMPORT_STEP = OpenApiParameter("step", {"type": "integer", "minimum": 0, "maximum": MAX_STEP, "default": 0})
PLACE = OpenApiParameter(
    "place",
    {"type": "string", "pattern": "^[0-9]{1,2}$"},
    OpenApiParameter.PATH,
    description="Number of the file in the import, starting at 0.",
)


class ImportsView(APIView):
    @operation("listImports", openapi.describe_list("ImportDetail"))
    def get(self, request: Request) -> Response:
        """List your imports, newest first. Meshboard stores each import for 30 days."""
        mine = ImportedTrace.objects.filter(owner=get_user(request)).order_by("-created")
        return Response([serialize_import(made) for made in mine])

    @operation(
        "openImport",
        {201: openapi.describe_response("ImportDetail")},
        409,
        415,
        422,
        request=openapi.request_body(openapi.ref("ImportRequest"), IMPORT_EXAMPLE),
    )
    def post(self, request: Request) -> Response:
        """Announce the files of an import: flight recorder dumps, NCCL Inspector logs, or Kineto traces.

        409: you have 20 imports.
        """
        made = store.create_import(
            get_user(request), *check_import_query(validate_request(ImportRequest, request.data))
        )
        return Response(serialize_import(made), status=201)


class ImportView(APIView):
    @operation("getImport", "ImportDetail", 404)
    def get(self, request: Request, key: str) -> Response:
        """Show the files of an import, and its steps after the files were read."""
        return Response(serialize_import(_find_import(request, key)))

    @operation("deleteImport", {204: OpenApiResponse(description="Deleted.")}, 404, 415, 422)
    def delete(self, request: Request, key: str) -> Response:
        """Delete an import with its files."""
        made = _find_import(request, key, change=True)
        reject_body(request)
        store.delete_import(made)
        return Response(status=204)


class ImportPartView(APIView):
    parser_classes = [PartParser]

    @operation("sendPart", "UploadedFile", 404, 409, 415, request=PART, parameters=[PART_OFFSET, PLACE])
    def put(self, request: Request, key: str, place: str) -> Response:
        """Send the next bytes of a file, at most 512 KiB. 409: the offset differs from the number of received bytes."""
        query = Parameters(request)
        offset = query.read_number(PART_OFFSET.name, None, 0, store.MAX_FILE_BYTES)
        query.check()
        made = _find_import(request, key, change=True)
        number = parse_whole_number(place, 0, store.MAX_FILES)
        if number is None or number >= len(made.files):
            raise NotFoundError("file")
        if offset is None:
            return refuse(
                400,
                PART_OFFSET.name,
                f"`{PART_OFFSET.name}` is missing. Set it to the number of bytes sent so far.",
                "query",
            )
        if made.format:
            return refuse(409, "import", "The import is complete. Start a new import.")
        data: Any = request.data
        part = data if isinstance(data, bytes) else b""
        try:
            return Response({"size": store.append_part(made, number, offset, part)})
        except ImportProblemError as error:
            return refuse(409, error.field, f"{error.file}: {error.message}")
        except store.ImportInUseError as error:
            return refuse(409, "import", str(error))


class ReadImportView(APIView):
    @operation("readImport", "ImportDetail", 404, 409, 415, 422)
    def post(self, request: Request, key: str) -> Response:
        """Read the files of an import.

        422: the format is unknown or a file is incomplete, so Meshboard deleted the import.
        """
        made = _find_import(request, key, change=True)
        reject_body(request)
        if made.format:
            return refuse(409, "import", "The import is complete. Start a new import.")
        try:
            store.finish_import(made)
        except ImportProblemError as error:
            return refuse(422, error.field, f"{error.file}: {error.message}")
        except store.ImportInUseError as error:
            return refuse(409, "import", str(error))
        made.refresh_from_db()
        return Response(serialize_import(made))


class ImportedTraceView(APIView):
    content_negotiation_class = FixedMediaType

    @operation(
        "getImportedTrace",
        {
            (200, "application/octet-stream"): OpenApiResponse({"type": "string", "format": "binary"}, "for Perfetto"),
            (200, "application/json"): OpenApiResponse(
                {"anyOf": [openapi.ref("ChromeTrace"), openapi.ref("StepColumns")]},
                "Chrome trace JSON, or the events as columns.",
            ),
        },
        404,
        parameters=[IMPORT_STEP, FORMAT],
    )
    def get(self, request: Request, key: str) -> Response | HttpResponse:
        """Return a step like /jobs/ID/trace."""
        query = Parameters(request)
        step = query.read_number(IMPORT_STEP.name, 0, 0, MAX_STEP)
        chosen = query.read_choice(FORMAT.name, "perfetto", (*FORMATS, COLUMNS))
        query.check()
        made = _find_import(request, key)
        if step not in made.steps:
            return refuse(404, IMPORT_STEP.name, f"The import has no step {step}.", "query")
        try:
            trace = store.read_import_step(made, step)
        except store.ImportInUseError:
            raise NotFoundError("import") from None
        if chosen == COLUMNS:
            return Response({"step": step, **serialize_trace(trace)})
        writer = FORMATS[chosen]
        answer = HttpResponse(writer.write(trace, f"{made.name}, step {step}"), content_type=writer.content_type)
        answer["Content-Disposition"] = f'attachment; filename="{made.id}-step-{step}.{writer.suffix}"'
        return answer


def _find_import(request: Request, key: str, *, change: bool = False) -> ImportedTrace:
    """Return an import, or 404 if it is missing or not visible. Staff can view, but not change, imports of others."""
    seen = ImportedTrace.objects.visible_to(request.user)
    if change:
        seen = seen.filter(owner=get_user(request))
    found = seen.select_related("owner").filter(pk=key).first() if is_storable(key) else None
    if found is None:
        raise NotFoundError("import")
    return found
