"""REST of imports: traces of runs from elsewhere, sent file by file in parts, then read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any

from django.http import HttpResponse
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework.parsers import BaseParser
from rest_framework.request import Request
from rest_framework.response import Response

from jobs.api.document import schema
from jobs.api.http.negotiation import WhateverIsAccepted
from jobs.api.http.parameters import Parameters
from jobs.api.http.parsers import TooLargeError
from jobs.api.http.views import APIView
from jobs.api.runs.traces import COLUMNS, FORMAT
from jobs.api.shared import refusals, refuse, refuse_body, user_of
from jobs.core.errors import NotFoundError
from jobs.core.text import is_storable, parse_whole_number
from jobs.models import ImportedTrace
from jobs.planning.schemas import validate_request
from jobs.runs.traces.export import FORMATS
from jobs.runs.traces.imports import store
from jobs.runs.traces.imports.common import ImportProblemError
from jobs.runs.traces.imports.store import ImportRequest, check_import_query, serialize_import
from jobs.runs.traces.traced_steps import MAX_STEP, serialize_trace

PART = {"application/octet-stream": {"type": "string", "format": "binary", "maxLength": store.MAX_PART_BYTES}}
EXAMPLE = {"name": "a run", "files": [{"name": "trace_rank0.json", "size": 120000}]}
OFFSET = OpenApiParameter(
    "offset",
    {"type": "integer", "minimum": 0, "maximum": store.MAX_FILE_BYTES},
    required=True,
    description="Byte offset of this part in the file, equal to the number of bytes received so far.",
)
STEP = OpenApiParameter("step", {"type": "integer", "minimum": 0, "maximum": MAX_STEP, "default": 0})
PLACE = OpenApiParameter(
    "place",
    {"type": "string", "pattern": "^[0-9]{1,2}$"},
    OpenApiParameter.PATH,
    description="Number of the file in the import, starting at 0.",
)


class PartParser(BaseParser):
    """The bytes themselves."""

    media_type = "application/octet-stream"

    def parse(
        self, stream: IO[Any], media_type: str | None = None, parser_context: Mapping[str, Any] | None = None
    ) -> Any:
        raw: bytes = stream.read(store.MAX_PART_BYTES + 1)
        if len(raw) > store.MAX_PART_BYTES:
            raise TooLargeError(f"The uploaded part is larger than {store.MAX_PART_BYTES:,} bytes. Send smaller parts.")
        return raw


class Imports(APIView):
    """All of one's own."""

    @extend_schema(operation_id="listImports", responses={200: schema.list_of("ImportDetail"), **refusals()})
    def get(self, request: Request) -> Response:
        """Your imports, the newest first; each is kept for 30 days."""
        mine = ImportedTrace.objects.filter(owner=user_of(request)).order_by("-created")
        return Response([serialize_import(made) for made in mine])

    @extend_schema(
        operation_id="openImport",
        request=schema.request_body(schema.ref("ImportRequest"), EXAMPLE),
        responses={201: schema.of("ImportDetail"), **refusals(403, 409, 415, 422)},
    )
    def post(self, request: Request) -> Response:
        """Announce the files: flight recorder dumps, NCCL Inspector logs or Kineto traces. 409: you have 20."""
        try:
            made = store.create_import(
                user_of(request), *check_import_query(validate_request(ImportRequest, request.data))
            )
        except store.TooManyImportsError as error:
            return refuse(409, "import", str(error))
        return Response(serialize_import(made), status=201)


class Import(APIView):
    """One of them."""

    @extend_schema(operation_id="getImport", responses={200: schema.of("ImportDetail"), **refusals(404)})
    def get(self, request: Request, key: str) -> Response:
        """What it is to hold and, once it was read, its steps."""
        return Response(serialize_import(_find(request, key)))

    @extend_schema(
        operation_id="deleteImport",
        request=None,
        responses={204: OpenApiResponse(description="Deleted."), **refusals(403, 404, 415, 422)},
    )
    def delete(self, request: Request, key: str) -> Response:
        """Forget it, with what was sent."""
        made = _find(request, key, change=True)
        refuse_body(request)
        store.delete_import(made)
        return Response(status=204)


class Part(APIView):
    """Some bytes."""

    parser_classes = [PartParser]

    @extend_schema(
        operation_id="sendPart",
        request=PART,
        parameters=[OFFSET, PLACE],
        responses={200: schema.of("UploadedFile"), **refusals(403, 404, 409, 415)},
    )
    def put(self, request: Request, key: str, place: str) -> Response:
        """The next bytes of a file, at most 512 KiB. 409: they do not go on where it ends."""
        given = Parameters(request)
        offset = given.number(OFFSET.name, None, 0, store.MAX_FILE_BYTES)
        given.check()
        made = _find(request, key, change=True)
        number = parse_whole_number(place, 0, store.MAX_FILES)
        if number is None or number >= len(made.files):
            raise NotFoundError("file")
        if offset is None:
            return refuse(
                400, OFFSET.name, f"`{OFFSET.name}` is missing. Set it to the number of bytes sent so far.", "query"
            )
        if made.format:
            return refuse(409, "import", "The import is complete. Start a new import.")
        told: Any = request.data
        part = told if isinstance(told, bytes) else b""
        try:
            return Response({"size": store.append_part(made, number, offset, part)})
        except ImportProblemError as error:
            return refuse(409, error.field, f"{error.file}: {error.message}")
        except store.ImportInUseError as error:
            return refuse(409, "import", str(error))


class Read(APIView):
    """All was sent."""

    @extend_schema(
        operation_id="readImport",
        request=None,
        responses={200: schema.of("ImportDetail"), **refusals(403, 404, 409, 415, 422)},
    )
    def post(self, request: Request, key: str) -> Response:
        """Read what was sent. 422: it is none of the known formats, or a file is not whole; the import is gone."""
        made = _find(request, key, change=True)
        refuse_body(request)
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


class Trace(APIView):
    """Its events."""

    content_negotiation_class = WhateverIsAccepted

    @extend_schema(
        operation_id="getImportedTrace",
        parameters=[STEP, FORMAT],
        responses={
            (200, "application/octet-stream"): OpenApiResponse({"type": "string", "format": "binary"}, "for Perfetto"),
            (200, "application/json"): OpenApiResponse(
                {"anyOf": [schema.ref("ChromeTrace"), schema.ref("StepColumns")]},
                "Chrome trace JSON, or the events as columns.",
            ),
            **refusals(404),
        },
    )
    def get(self, request: Request, key: str) -> Response | HttpResponse:
        """A step event by event, as /jobs/ID/trace has it of a run of ours."""
        given = Parameters(request)
        step = given.number(STEP.name, 0, 0, MAX_STEP)
        chosen = given.one_of(FORMAT.name, "perfetto", (*FORMATS, COLUMNS))
        given.check()
        made = _find(request, key)
        if step not in made.steps:
            return refuse(404, STEP.name, f"The import has no step {step}.", "query")
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


def _find(request: Request, key: str, *, change: bool = False) -> ImportedTrace:
    """The import; 404 alike for what is not there and what is not theirs. Staff may look at others' alone."""
    seen = ImportedTrace.objects.visible_to(request.user)
    if change:
        seen = seen.filter(owner=user_of(request))
    found = seen.select_related("owner").filter(pk=key).first() if is_storable(key) else None
    if found is None:
        raise NotFoundError("import")
    return found
