"""REST views that wait for a state of a job, stream its events, or return whole logs."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any, NamedTuple, cast

from django.contrib.auth.models import User
from django.http import HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError
from rest_framework.request import Request
from rest_framework.response import Response

from jobs.api.errors import RETRY_LATER, refuse
from jobs.api.openapi import operation
from jobs.api.parameters import Parameters
from jobs.api.parsers import FixedMediaType
from jobs.api.views import APIView, get_user
from jobs.core.access import find_job
from jobs.core.job_details import serialize_job
from jobs.core.text import parse_whole_number
from jobs.models import TERMINAL, Job, StateChange, Status
from jobs.runs import logs
from jobs.runs.live import held_requests
from jobs.runs.live.held_requests import FollowEvents, JobState, LogSelector, Position, WaitForChange, get_held_request
from jobs.runs.logs import LAUNCHER, NOT_STARTED, LogLocation, NoLogError, find_member, locate_log

FINISHED, STARTED = "finished", "started"
WANTED = (FINISHED, STARTED, *Status.values)
MAX_WAIT_S, DEFAULT_WAIT_S = 300, 60
MAX_LIVE_S = 60
RESUME = OpenApiParameter(
    "Last-Event-ID",
    {"type": "string", "pattern": held_requests.ID_PATTERN},
    OpenApiParameter.HEADER,
    description="Id of the last event received. The stream continues after this event.",
)
STREAM = OpenApiResponse({"type": "string"}, "Server-sent events. An idle stream sends a comment every 15 s.")


class WaitView(APIView):
    @operation(
        "waitForJob",
        "WaitResult",
        404,
        parameters=[
            OpenApiParameter(
                "for",
                {"type": "string", "enum": list(WANTED), "default": FINISHED},
                description=(
                    "`finished` waits until the job has ended, `started` until it has hosts. "
                    "Any other value is a status to wait for."
                ),
            ),
            OpenApiParameter(
                "timeout",
                {"type": "integer", "minimum": 0, "maximum": MAX_WAIT_S, "default": DEFAULT_WAIT_S},
                description="Maximum wait in seconds.",
            ),
        ],
    )
    def get(self, request: Request, job_id: str) -> Response:
        """Return the job when its current attempt reaches a state, cannot reach it any more, or after `timeout`
        seconds.

        The wait ends with 401 or 404 within 10 s after you lose access to the job.
        """
        query = Parameters(request)
        wanted = query.read_choice("for", FINISHED, WANTED)
        timeout_s = query.read_number("timeout", DEFAULT_WAIT_S, 0, MAX_WAIT_S)
        query.check()
        job = find_job(request.user, job_id)
        reached, held = _has_reached(job, wanted), get_held_request(request)
        may_come = not reached and job.status not in TERMINAL and timeout_s > 0
        if held is not None and not held.is_last and may_come:
            held.user = get_user(request).pk
            held.wait = WaitForChange(job.id, JobState(job.status, job.attempt), timeout_s)
            return Response(status=204)
        return Response({"reached": reached, "job": serialize_job(job)})


def _has_reached(job: Job, wanted: str) -> bool:
    if wanted == FINISHED:
        return job.status in TERMINAL
    status = Status.STARTING if wanted == STARTED else wanted
    return StateChange.objects.filter(job=job, attempt=job.attempt, status=status).exists()


class EventsView(APIView):
    content_negotiation_class = FixedMediaType

    @operation(
        "followJob",
        {(200, "text/event-stream"): STREAM},
        404,
        parameters=[
            RESUME,
            OpenApiParameter(
                "live",
                {"type": "integer", "minimum": 1, "maximum": MAX_LIVE_S},
                description="Start the stream N seconds ago. It sends `traffic` every second, and no `log` events.",
            ),
        ],
    )
    def get(self, request: Request, job_id: str) -> Response | HttpResponse:
        """Stream the events of a job from its submit until its end.

        The events are `state` (change of status), `step` (step on one of the ranks), `loss` (loss that a script
        reported, with its source), `verdict` (sentence, reason, and next step), `log` (lines of a rank), `gap` (missing
        part of a log), `traffic` (payload bytes of all ranks by second and axis, only with `live`), and `end`. The data
        of each event is JSON. The event `error` has problem details after you lose access to the job.
        """
        query = Parameters(request)
        live_s = query.read_number("live", None, 1, MAX_LIVE_S)
        query.check()
        return follow_job(request, find_job(request.user, job_id), live_s=live_s)


def follow_job(request: Request, job: Job, **only: Any) -> Response | HttpResponse:
    """Return the event stream of a job, or of one `log`, with live figures every `live_s` seconds."""
    last_event_id = request.headers.get("Last-Event-ID")
    after = Position() if last_event_id is None else held_requests.parse_position(last_event_id)
    if after is None:
        return refuse(
            400,
            RESUME.name,
            f"`{RESUME.name}` is not an event id of this stream. Use the id of the last event received.",
            "header",
        )
    held = get_held_request(request)
    if held is None:  # without a publisher, the client reconnects
        return HttpResponse(held_requests.RETRY, content_type="text/event-stream; charset=utf-8")
    held.user = get_user(request).pk
    held.wait = FollowEvents(job.id, JobState(job.status, job.attempt), after, **only)
    return Response(status=204)


log = logging.getLogger(__name__)

MAX_RANK = 65535
MAX_ATTEMPT = 2**31 - 1
MAX_OFFSET = 2**53 - 1
FILES = ("stdout", "stderr")
FOLLOWED_WHOLE = (
    "`{name}` cannot be used with `follow`, which sends the lines of both files. Omit `{name}`, or set `follow` to 0."
)
SIZE_HEADER = "Meshboard-Log-Bytes"
LOG_ATTEMPT = OpenApiParameter(
    "attempt", {"type": "integer", "minimum": 1, "maximum": MAX_ATTEMPT}, description="Default: the current attempt."
)
FILE = OpenApiParameter(
    "file",
    {"type": "string", "enum": list(FILES)},
    description="`stdout` or `stderr` of the rank. Default: both files, `stdout` first.",
)
FROM = OpenApiParameter(
    "from", {"type": "integer", "minimum": 0, "maximum": MAX_OFFSET, "default": 0}, description="First byte to return."
)
BYTES = OpenApiParameter(
    "bytes",
    {"type": "integer", "minimum": 1, "maximum": MAX_OFFSET},
    description="Maximum number of bytes to return. Default: all.",
)
AS_WRITTEN, AS_SHOWN = "raw", "terminal"
TEXT_FORM = OpenApiParameter(
    "text",
    {"type": "string", "enum": [AS_WRITTEN, AS_SHOWN], "default": AS_WRITTEN},
    description=(
        "`raw` returns the bytes as written, with every state of a progress bar. `terminal` returns lines as a "
        "terminal shows them, with the last state."
    ),
)
FOLLOW = OpenApiParameter(
    "follow",
    {"type": "string", "enum": ["0", "1"], "default": "0"},
    description=(
        "`1` follows the log as it grows, with both files in one stream. Omit `file`, `from`, `bytes`, and `text`."
    ),
)
TEXT = OpenApiResponse(
    OpenApiTypes.STR,
    description=(
        "The log as stored on the host, or its lines with `text=terminal`. "
        f"The header {SIZE_HEADER} has the approximate size in bytes."
    ),
)


class LogQuery(NamedTuple):
    """The requested part of a log. `rank` is None for an invalid rank. `first` and `most` are in bytes."""

    rank: int | None
    attempt: int | None
    file: str | None
    first: int
    most: int | None
    follow: bool
    text: str


class LogView(APIView):
    content_negotiation_class = FixedMediaType

    @operation(
        "readLog",
        {(200, "text/plain"): TEXT, (200, "text/event-stream"): STREAM},
        404,
        409,
        422,
        parameters=[LOG_ATTEMPT, FILE, FROM, BYTES, TEXT_FORM, FOLLOW, RESUME],
    )
    def get(self, request: Request, job_id: str, rank: str) -> HttpResponseBase:
        """Return the log of a rank from its host, or a range of it.

        Rank -1 is the launcher of the first host, -2 the launcher of the second. A line marks the missing middle of
        a log that exceeds its size limit. The connection breaks if the host becomes silent. 409: the board cannot
        read this log. With `follow`, the response streams the newest lines and further lines as the events `log`,
        `gap`, and `end` of /events. Their lines are those of `text=terminal`. Each event `log` has in `open` the
        lines after its `lines` that can still change, for example a progress bar.
        """
        job = find_job(request.user, job_id)
        log_query = _parse_log_query(request, rank)
        number = log_query.attempt or job.attempt
        if log_query.rank is None:
            return refuse(404, "rank", f"The job has no rank {rank[:40]!r}.", "path")
        if number > job.attempt:
            return refuse(404, "attempt", f"The job has no attempt {number}.", "query")
        attempt = job.attempts.filter(number=number).first()
        if attempt is None:
            return refuse(409, "log", NOT_STARTED)
        try:
            if log_query.follow:
                node = find_member(attempt, log_query.rank).node
                return follow_job(request, job, log=LogSelector(number, node, max(log_query.rank, LAUNCHER)))
            return _respond_with_log(
                locate_log(attempt, log_query.rank), log_query.rank, log_query, cast(User, request.user).pk
            )
        except NoLogError as error:
            return refuse(error.status, "log", str(error), headers=RETRY_LATER if error.status == 503 else None)
        except logs.TooManyDownloadsError as error:
            return refuse(503, "log", str(error), headers=RETRY_LATER)
        except (RedisError, OperationalError) as error:
            log.warning("Cannot request a log: %s", error)
            return refuse(
                503, "log", "Meshboard cannot reach Redis, so it cannot request logs from hosts.", headers=RETRY_LATER
            )


def _parse_log_query(request: Request, rank: str) -> LogQuery:
    """Return the query of a log. Raises BadParameterError, SpecError."""
    query = Parameters(request)
    log_query = LogQuery(
        rank=_parse_rank(rank),
        attempt=query.read_number("attempt", None, 1, MAX_ATTEMPT),
        file=query.read_choice("file", None, FILES),
        first=query.read_number("from", 0, 0, MAX_OFFSET),
        most=query.read_number("bytes", None, 1, MAX_OFFSET),
        follow=query.read_choice("follow", "0", ("0", "1")) == "1",
        text=query.read_choice("text", AS_WRITTEN, (AS_WRITTEN, AS_SHOWN)),
    )
    is_range = log_query.first > 0 or log_query.most is not None
    if log_query.follow:
        ranged = {"file": log_query.file is not None, "from": log_query.first > 0, "bytes": log_query.most is not None}
        ranged["text"] = log_query.text != AS_WRITTEN
        for name in (name for name, is_set in ranged.items() if is_set):
            query.add_clash(name, FOLLOWED_WHOLE.format(name=name))
    elif is_range and log_query.file is None and log_query.rank is not None and log_query.rank > LAUNCHER:
        query.add_clash("file", "`file` is missing. To read a range of bytes, set `file` to `stdout` or `stderr`.")
    query.check()
    return log_query


def _respond_with_log(place: LogLocation, rank: int, log_query: LogQuery, person: int) -> StreamingHttpResponse:
    """Return the log as a response. Raises NoLogError, TooManyDownloadsError, RedisError, OperationalError."""
    begun = logs.start_download(
        place, tuple(one for one in place.files if log_query.file in (None, one)), person, log_query.first
    )
    name = f"{place.job}-{place.attempt}-" + (f"rank{rank}" if rank > LAUNCHER else f"launcher{LAUNCHER - rank}")
    chunks = logs.stream_log(place, begun, as_terminal=log_query.text == AS_SHOWN)
    size = max(0, logs.estimate_num_bytes(begun) - log_query.first)
    if log_query.most is not None:
        chunks, size = logs.limit_bytes(chunks, log_query.most), min(size, log_query.most)
    headers = {
        "Content-Disposition": f'attachment; filename="{name}.log"',
        "Cache-Control": "no-store",
        SIZE_HEADER: str(size),
    }
    text = "text/plain; charset=utf-8"
    return StreamingHttpResponse(_mark_broken_end(chunks, name), content_type=text, headers=headers)


async def _mark_broken_end(parts: AsyncIterator[bytes], name: str) -> AsyncIterator[bytes]:
    try:
        async for part in parts:
            yield part
    except Exception as error:
        log.warning("Log %s ends early: %s", name, error)
        yield f"\n[The rest of the log could not be read: {error}]\n".encode()
        raise


def _parse_rank(text: str) -> int | None:
    """Return a rank, or a launcher as -1 and below."""
    number = parse_whole_number(text.removeprefix("-"), 0, MAX_RANK)
    if number is None or text == "-0":
        return None
    return -number if text.startswith("-") else number
