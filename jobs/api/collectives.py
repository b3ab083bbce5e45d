"""REST of collectives: their description, their latest results, and a benchmark of one."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from jobs.api.document import schema
from jobs.api.http.throttling import SubmitThrottle
from jobs.api.http.views import APIView
from jobs.api.shared import refusals, refuse, user_of
from jobs.core.access import get_visible_jobs
from jobs.core.errors import NotFoundError
from jobs.core.job_details import serialize_job
from jobs.models import Host
from jobs.planning.schemas import FailedBenchmark, LabRequest, PrimitiveBrief, PrimitiveDetail, validate_request
from jobs.queue import actions
from jobs.runs.collectives.descriptions import BY_NAME, PRIMITIVES, CollectiveDescription
from jobs.runs.collectives.results import DEFAULT_RANKS, WrongResult, find_newest, list_hosts, pick_host

NAME = OpenApiParameter("name", str, OpenApiParameter.PATH, enum=[words.name for words in PRIMITIVES])


class Primitives(APIView):
    """The list of collectives."""

    @extend_schema(operation_id="listPrimitives", responses={200: schema.list_of("PrimitiveBrief"), **refusals()})
    def get(self, request: Request) -> Response:
        """List all collectives with description and cost formulas."""
        return Response([_told(words) for words in PRIMITIVES])


class Primitive(APIView):
    """One collective."""

    places = {"resources.host": "/host", "layout": "/ranks", "layout.dp": "/ranks"}
    throttle_classes = [SubmitThrottle]

    @extend_schema(
        operation_id="getPrimitive", parameters=[NAME], responses={200: schema.of("PrimitiveDetail"), **refusals(404)}
    )
    def get(self, request: Request, name: str) -> Response:
        """Show a collective with the results of the newest benchmark that you can see.

        `failed` names a newer benchmark that found wrong elements.
        """
        words = _find(name)
        measured, _, wrong = find_newest(get_visible_jobs(request.user), words.name)
        told: PrimitiveDetail = {
            **_told(words),
            "job": measured.attempt.job_id if measured else None,
            "points": [point.model_dump(mode="json") for point in measured.points] if measured else [],
            "failed": _failed(wrong) if wrong else None,
        }
        return Response(told)

    @extend_schema(
        operation_id="runPrimitive",
        request=schema.request_body(schema.ref("LabRequest"), {"ranks": 2}),
        parameters=[NAME],
        responses={201: schema.of("JobDetail"), **refusals(403, 404, 409, 415, 422, 429)},
    )
    def post(self, request: Request, name: str) -> Response:
        """Queue a benchmark of one collective. 409: no host with two slots is connected."""
        words = _find(name)
        asked = validate_request(LabRequest, request.data)
        host = _host(asked.host)
        if host is None:
            if asked.host is None:
                return refuse(409, "host", "No connected host has two slots. Add a host with two or more slots.")
            message = f"No connected host named {asked.host} accepts jobs. Use a host from `GET /hosts`."
            return refuse(422, "host", message, "body")
        ranks = asked.ranks or min(DEFAULT_RANKS, host.slots)
        spec = {
            "kind": "lab",
            "name": f"{words.title} on {host.name}"[:100],
            "layout": {"dp": ranks},
            "resources": {"device": host.device, "host": host.name},
            "lab": {**asked.lab.model_dump(), "primitives": [words.name]},
        }
        job, queued = actions.submit(user_of(request), spec)
        return Response(serialize_job(job, queued), status=201)


def _find(name: str) -> CollectiveDescription:
    words = {str(known): words for known, words in BY_NAME.items()}.get(name)
    if words is None:
        raise NotFoundError("primitive")
    return words


def _host(name: str | None) -> Host | None:
    if name is None:
        return pick_host(list_hosts())
    return next((host for host in list_hosts() if host.name == name), None)


def _failed(found: WrongResult) -> FailedBenchmark:
    return {"job": found.attempt.job_id, "wrong": found.wrong, "checked": found.checked}


def _told(words: CollectiveDescription) -> PrimitiveBrief:
    told: dict[str, Any] = {name: getattr(words, name) for name in ("name", "title", "meaning", "call", "time", "sent")}
    uses = [f"{use.strategy}: {use.words}" for use in words.uses]
    return {**told, "used_by": uses}  # type: ignore[typeddict-item]
