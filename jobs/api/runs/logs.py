"""REST for whole logs."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import NamedTuple, cast

from django.contrib.auth.models import User
from django.http import StreamingHttpResponse
from django.http.response import HttpResponseBase
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError
from rest_framework.request import Request

from jobs.api.http.errors import LATER
from jobs.api.http.negotiation import WhateverIsAccepted
from jobs.api.http.parameters import Parameters
from jobs.api.http.views import APIView
from jobs.api.jobs.wait import RESUME, STREAM, followed
from jobs.api.shared import refusals, refuse
from jobs.core.access import find_job
from jobs.core.text import parse_whole_number
from jobs.runs import logs
from jobs.runs.live.held_requests import LogSelector
from jobs.runs.logs import LAUNCHER, NOT_STARTED, LogLocation, NoLogError, find_member, locate_log

log = logging.getLogger(__name__)

MOST_RANKS = 65535
MOST_ATTEMPTS = 2**31 - 1
LAST_BYTE = 2**53 - 1
FILES = ("stdout", "stderr")
FOLLOWED_WHOLE = "`{name}` cannot be used with `follow`, which sends both files. Omit `{name}`, or set `follow` to 0."
SIZE_HEADER = "Meshboard-Log-Bytes"
ATTEMPT = OpenApiParameter(
    "attempt", {"type": "integer", "minimum": 1, "maximum": MOST_ATTEMPTS}, description="Default: the current attempt."
)
FILE = OpenApiParameter(
    "file",
    {"type": "string", "enum": list(FILES)},
    description="`stdout` or `stderr` of the rank. Default: both files, `stdout` first.",
)
FROM = OpenApiParameter(
    "from", {"type": "integer", "minimum": 0, "maximum": LAST_BYTE, "default": 0}, description="First byte to return."
)
BYTES = OpenApiParameter(
    "bytes",
    {"type": "integer", "minimum": 1, "maximum": LAST_BYTE},
    description="Maximum number of bytes to return. Default: all.",
)
FOLLOW = OpenApiParameter(
    "follow",
    {"type": "string", "enum": ["0", "1"], "default": "0"},
    description="`1` follows the log as it grows, with both files in one stream. Omit `file`, `from`, and `bytes`.",
)
TEXT = OpenApiResponse(
    OpenApiTypes.STR,
    description=f"The log as stored on the host. The header {SIZE_HEADER} has the approximate size in bytes.",
)


class Asked(NamedTuple):
    """What of a log. `rank`: None where there is no such one; `first`, `most`: bytes."""

    rank: int | None
    attempt: int | None
    file: str | None
    first: int
    most: int | None
    follow: bool


class Log(APIView):
    """A whole log."""

    content_negotiation_class = WhateverIsAccepted

    @extend_schema(
        operation_id="readLog",
        parameters=[ATTEMPT, FILE, FROM, BYTES, FOLLOW, RESUME],
        responses={(200, "text/plain"): TEXT, (200, "text/event-stream"): STREAM, **refusals(404, 409, 422)},
    )
    def get(self, request: Request, job_id: str, rank: str) -> HttpResponseBase:
        """All that the host keeps of a rank's log, or a range of it; -1 is the launcher of the first host, -2 that of
        the second. Where a log outgrew its bound, its middle is gone, and a line says how much. The connection breaks
        where the host falls silent before the end. 409: the log lies where the board does not read. With `follow` its
        newest lines, and each further one as it comes, as the events `log`, `gap` and `end` of /events."""
        job = find_job(request.user, job_id)
        asked = _asked(request, rank)
        number = asked.attempt or job.attempt
        if asked.rank is None:
            return refuse(404, "rank", f"The job has no rank {rank[:40]!r}.", "path")
        if number > job.attempt:
            return refuse(404, "attempt", f"The job has no attempt {number}.", "query")
        attempt = job.attempts.filter(number=number).first()
        if attempt is None:
            return refuse(409, "log", NOT_STARTED)
        try:
            if asked.follow:
                node = find_member(attempt, asked.rank).node
                return followed(request, job, log=LogSelector(number, node, max(asked.rank, LAUNCHER)))
            return _read(locate_log(attempt, asked.rank), asked.rank, asked, cast(User, request.user).pk)
        except NoLogError as error:
            return refuse(error.status, "log", str(error), headers=LATER if error.status == 503 else None)
        except logs.TooManyDownloadsError as error:
            return refuse(503, "log", str(error), headers=LATER)
        except (RedisError, OperationalError) as error:
            log.warning("Cannot request a log: %s", error)
            return refuse(
                503, "log", "Meshboard cannot reach Redis, so it cannot request logs from hosts.", headers=LATER
            )


def _asked(request: Request, rank: str) -> Asked:
    """Raises BadParameterError, SpecError."""
    given = Parameters(request)
    asked = Asked(
        rank=_rank(rank),
        attempt=given.number("attempt", None, 1, MOST_ATTEMPTS),
        file=given.one_of("file", None, FILES),
        first=given.number("from", 0, 0, LAST_BYTE),
        most=given.number("bytes", None, 1, LAST_BYTE),
        follow=given.one_of("follow", "0", ("0", "1")) == "1",
    )
    is_range = asked.first > 0 or asked.most is not None
    if asked.follow:
        ranged = {"file": asked.file is not None, "from": asked.first > 0, "bytes": asked.most is not None}
        for name in (name for name, told in ranged.items() if told):
            given.clash(name, FOLLOWED_WHOLE.format(name=name))
    elif is_range and asked.file is None and asked.rank is not None and asked.rank > LAUNCHER:
        given.clash("file", "`file` is missing. To read a range of bytes, set `file` to `stdout` or `stderr`.")
    given.check()
    return asked


def _read(place: LogLocation, rank: int, asked: Asked, person: int) -> StreamingHttpResponse:
    """Raises NoLogError, TooManyDownloadsError, RedisError, OperationalError."""
    begun = logs.start_download(
        place, tuple(one for one in place.files if asked.file in (None, one)), person, asked.first
    )
    name = f"{place.job}-{place.attempt}-" + (f"rank{rank}" if rank > LAUNCHER else f"launcher{LAUNCHER - rank}")
    told, size = logs.stream_log(place, begun), max(0, logs.estimate_num_bytes(begun) - asked.first)
    if asked.most is not None:
        told, size = logs.limit_bytes(told, asked.most), min(size, asked.most)
    headers = {
        "Content-Disposition": f'attachment; filename="{name}.log"',
        "Cache-Control": "no-store",
        SIZE_HEADER: str(size),
    }
    text = "text/plain; charset=utf-8"
    return StreamingHttpResponse(_until_it_breaks(told, name), content_type=text, headers=headers)


async def _until_it_breaks(parts: AsyncIterator[bytes], name: str) -> AsyncIterator[bytes]:
    try:
        async for part in parts:
            yield part
    except Exception as error:
        log.warning("Log %s ends early: %s", name, error)
        yield f"\n[The rest of the log could not be read: {error}]\n".encode()
        raise


def _rank(text: str) -> int | None:
    """A rank, or a launcher as -1 and below."""
    number = parse_whole_number(text.removeprefix("-"), 0, MOST_RANKS)
    if number is None or text == "-0":
        return None
    return -number if text.startswith("-") else number
