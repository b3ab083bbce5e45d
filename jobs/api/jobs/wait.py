"""REST that waits: until a job comes into a state (long poll), and its events as they come (server-sent)."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from jobs.api.document import schema
from jobs.api.http.negotiation import WhateverIsAccepted
from jobs.api.http.parameters import Parameters
from jobs.api.http.views import APIView
from jobs.api.shared import refusals, refuse, user_of
from jobs.core.access import find_job
from jobs.core.job_details import serialize_job
from jobs.models import TERMINAL, Job, StateChange, Status
from jobs.runs.live import held_requests
from jobs.runs.live.held_requests import FollowEvents, JobState, Position, WaitForChange, get_held_request

FINISHED, STARTED = "finished", "started"
WANTED = (FINISHED, STARTED, *Status.values)
LONGEST_S, USUALLY_S = 300, 60
LONGEST_LIVE_S = 60
RESUME = OpenApiParameter(
    "Last-Event-ID",
    {"type": "string", "pattern": held_requests.ID_PATTERN},
    OpenApiParameter.HEADER,
    description="Id of the last event received. The stream continues after this event.",
)
STREAM = OpenApiResponse({"type": "string"}, "Server-sent events. An idle stream sends a comment every 15 s.")


class Wait(APIView):
    """Long poll."""

    @extend_schema(
        operation_id="waitForJob",
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
                {"type": "integer", "minimum": 0, "maximum": LONGEST_S, "default": USUALLY_S},
                description="Maximum wait in seconds.",
            ),
        ],
        responses={200: schema.of("WaitResult"), **refusals(404, 429)},
    )
    def get(self, request: Request, job_id: str) -> Response:
        """The job once its current attempt has come into a state, once it no longer can, or after `timeout` seconds.
        What ends the right to see it ends the wait with 401 or 404 within 10 s."""
        asked = Parameters(request)
        wanted = asked.one_of("for", FINISHED, WANTED)
        timeout_s = asked.number("timeout", USUALLY_S, 0, LONGEST_S)
        asked.check()
        job = find_job(request.user, job_id)
        reached, held = _has_reached(job, wanted), get_held_request(request)
        may_come = not reached and job.status not in TERMINAL and timeout_s > 0
        if held is not None and not held.is_last and may_come:
            held.user = user_of(request).pk
            held.wait = WaitForChange(job.id, JobState(job.status, job.attempt), timeout_s)
            return Response(status=204)
        return Response({"reached": reached, "job": serialize_job(job)})


def _has_reached(job: Job, wanted: str) -> bool:
    if wanted == FINISHED:
        return job.status in TERMINAL
    status = Status.STARTING if wanted == STARTED else wanted
    return StateChange.objects.filter(job=job, attempt=job.attempt, status=status).exists()


class Events(APIView):
    """Server-sent events."""

    content_negotiation_class = WhateverIsAccepted

    @extend_schema(
        operation_id="followJob",
        parameters=[
            RESUME,
            OpenApiParameter(
                "live",
                {"type": "integer", "minimum": 1, "maximum": LONGEST_LIVE_S},
                description="Start the stream N seconds ago. It sends `traffic` every second, and no `log` events.",
            ),
        ],
        responses={(200, "text/event-stream"): STREAM, **refusals(404, 429)},
    )
    def get(self, request: Request, job_id: str) -> Response | HttpResponse:
        """What happens to a job, from its submit on, until it has ended: `state` (a change of status), `step` (one of
        the ranks that told of it), `verdict` (a sentence, its reason, what to do next), `log` (lines of a rank), `gap`
        (a part of a log that is gone), `traffic` (payload bytes of all ranks by second and axis, with `live` alone) and
        `end`. Each has JSON as its data. `error` has the problem details of a refusal where the right to see the job
        ended meanwhile."""
        asked = Parameters(request)
        live_s = asked.number("live", None, 1, LONGEST_LIVE_S)
        asked.check()
        return followed(request, find_job(request.user, job_id), live_s=live_s)


def followed(request: Request, job: Job, **only: Any) -> Response | HttpResponse:
    """The answer to who follows a job, or `log` of it, or follows it `live_s`."""
    told = request.headers.get("Last-Event-ID")
    after = Position() if told is None else held_requests.parse_position(told)
    if after is None:
        return refuse(
            400,
            RESUME.name,
            f"`{RESUME.name}` is not an event id of this stream. Use the id of the last event received.",
            "header",
        )
    held = get_held_request(request)
    if held is None:  # nobody would go on telling: the reader comes again
        return HttpResponse(held_requests.RETRY, content_type="text/event-stream; charset=utf-8")
    held.user = user_of(request).pk
    held.wait = FollowEvents(job.id, JobState(job.status, job.attempt), after, **only)
    return Response(status=204)
