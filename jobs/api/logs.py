"""REST for whole logs."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

from django.http import Http404, StreamingHttpResponse
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError
from rest_framework.negotiation import BaseContentNegotiation
from rest_framework.parsers import BaseParser
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from jobs.access import find_job
from jobs.api.errors import LATER
from jobs.api.views import refusals, refuse
from jobs.logs import whole
from jobs.logs.places import NOT_STARTED, NoLogError, place_of
from jobs.text import whole_number

log = logging.getLogger(__name__)

MOST_RANKS = 65535
MOST_ATTEMPTS = 2**31 - 1
SIZE_HEADER = "Meshboard-Log-Bytes"
ATTEMPT = OpenApiParameter(
    "attempt", {"type": "integer", "minimum": 1, "maximum": MOST_ATTEMPTS}, description="by default the current one"
)
FILE = OpenApiParameter(
    "file",
    {"type": "string", "enum": ["stdout", "stderr"]},
    description="of a rank; by default both, one after the other",
)
TEXT = OpenApiResponse(
    OpenApiTypes.STR, description=f"the log as its host keeps it; {SIZE_HEADER}: about how many bytes will come"
)


class WhateverIsAccepted(BaseContentNegotiation):
    """A log is text, and a refusal JSON, whoever asks."""

    def select_parser(self, request: Request, parsers: list[BaseParser]) -> BaseParser | None:  # type: ignore[override]
        return parsers[0]

    def select_renderer(  # type: ignore[override]
        self, request: Request, renderers: list[BaseRenderer], format_suffix: str | None = None
    ) -> tuple[BaseRenderer, str]:
        return renderers[0], renderers[0].media_type


class Log(APIView):
    """A whole log."""

    content_negotiation_class = WhateverIsAccepted

    @extend_schema(
        operation_id="readLog",
        parameters=[ATTEMPT, FILE],
        responses={(200, "text/plain"): TEXT, **refusals(404, 409)},
    )
    def get(self, request: Request, job_id: str, rank: str) -> Response | StreamingHttpResponse:
        """All that the host keeps of a rank's log; -1 is the launcher of the first host, -2 that of the second. Where
        a log outgrew its bound, its middle is gone, and a line says how much. The connection breaks where the host
        falls silent before the end. 409: the log lies where the board does not read."""
        job = find_job(request.user, job_id)
        told = request.query_params.get("attempt", str(job.attempt))
        number = whole_number(told, 1, MOST_ATTEMPTS)
        if number is None:
            return refuse(400, "attempt", f"a whole number from 1, got {told[:40]!r}", "query")
        file = request.query_params.get("file")
        if file not in (None, "stdout", "stderr"):
            return refuse(400, "file", f"stdout or stderr, got {file[:40]!r}", "query")
        wanted = _rank(rank)
        if wanted is None or number > job.attempt:
            missing = f"attempt {number}" if wanted is not None else f"rank {rank[:40]!r}"
            raise Http404(f"this job has no {missing}")
        attempt = job.attempts.filter(number=number).first()
        if attempt is None:
            return refuse(409, "log", NOT_STARTED)
        try:
            place = place_of(attempt, wanted)
            begun = whole.begin(place, tuple(one for one in place.files if file in (None, one)))
        except NoLogError as error:
            return refuse(error.status, "log", str(error), headers=LATER if error.status == 503 else None)
        except whole.BusyError as error:
            return refuse(503, "log", str(error), headers=LATER)
        except (RedisError, OperationalError) as error:
            log.warning("a log cannot be asked for: %s", error)
            return refuse(503, "log", "Redis does not answer just now: hosts cannot be asked", headers=LATER)
        name = f"{job.id}-{number}-" + (f"rank{wanted}" if wanted >= 0 else f"launcher{-1 - wanted}")
        headers = {
            "Content-Disposition": f'attachment; filename="{name}.log"',
            "Cache-Control": "no-store",
            SIZE_HEADER: str(whole.num_bytes(begun)),
        }
        text = "text/plain; charset=utf-8"
        return StreamingHttpResponse(
            _until_it_breaks(whole.parts(place, begun), name), content_type=text, headers=headers
        )


async def _until_it_breaks(parts: AsyncIterator[bytes], name: str) -> AsyncIterator[bytes]:
    try:
        async for part in parts:
            yield part
    except Exception as error:
        log.warning("log %s breaks off: %s", name, error)
        yield f"\n[the log breaks off here: {error}]\n".encode()
        raise


def _rank(text: str) -> int | None:
    """A rank, or a launcher as -1 and below."""
    number = whole_number(text.removeprefix("-"), 0, MOST_RANKS)
    if number is None or text == "-0":
        return None
    return -number if text.startswith("-") else number
