"""REST of the queue: what its page shows and what staff do there."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from django.http.response import HttpResponseBase
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework.permissions import BasePermission, IsAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response

from jobs.api.document import schema
from jobs.api.http.negotiation import WhateverIsAccepted
from jobs.api.http.paged import paged, parameters
from jobs.api.http.parameters import BadParameterError, Parameters
from jobs.api.http.views import APIView
from jobs.api.shared import refusals, refuse, refuse_body
from jobs.core.access import get_visible_jobs, may_change_all_jobs, may_operate_any_project
from jobs.core.audit import CSV_CONTENT_TYPE, format_csv, serialize_entries
from jobs.core.errors import NotFoundError
from jobs.core.text import is_storable
from jobs.models import AuditEntry, Job, Pool, Status
from jobs.planning.schemas import validate_request
from jobs.queue import staff_actions
from jobs.queue.bulk_actions import MoveRequest, QueueActionRequest, apply_action, explain_unmoved, list_unchanged
from jobs.queue.staff_actions import MAX_PRIORITY, MIN_PRIORITY
from jobs.queue.start_predictions import MAX_SLOTS, QUESTION_FIELDS, list_starts, parse_question
from jobs.queue.view import build_rows, load_view
from planner.facts.validation import Problem, SpecError

MOST_ROWS = 200
LAST_ID = 2**63 - 1
AUDIT_FORMATS = ("json", "csv")


def _entry(name: str, words: str) -> OpenApiParameter:
    return OpenApiParameter(name, {"type": "integer", "minimum": 1, "maximum": LAST_ID}, description=words)


class MayRunQueue(BasePermission):
    def has_permission(self, request: Request, view: Any) -> bool:
        return may_change_all_jobs(request.user)


class Queue(APIView):
    """What waits."""

    @extend_schema(operation_id="getQueue", responses={200: schema.of("QueueDetail"), **refusals()})
    def get(self, request: Request) -> Response:
        """Your queued jobs in the order in which they start, at most 200, each with its place in the whole queue, its
        points, why it waits and when it should start (an estimate); members see their projects', staff everybody's."""
        seen = load_view()
        ids = [queued.job.id for queued in seen.queue]
        mine = set(get_visible_jobs(request.user).filter(id__in=ids).values_list("id", flat=True))
        shown = [queued for queued in seen.queue if queued.job.id in mine][:MOST_ROWS]
        told = [
            {
                **row,
                "starts": row["starts"].isoformat() if row["starts"] else None,
                "created": row["created"].isoformat(),
            }
            for row in build_rows(seen, request.user, shown)
        ]
        return Response({"paused": seen.paused, "queued": len(seen.queue), "jobs": told})


class StaffView(APIView):
    permission_classes = [IsAuthenticated, MayRunQueue]


class WouldStart(StaffView):
    """Scheduler simulation."""

    @extend_schema(
        operation_id="whatWouldStart",
        parameters=[
            OpenApiParameter(
                "slots",
                {"type": "integer", "minimum": 0, "maximum": MAX_SLOTS},
                description="Number of slots of the simulated additional hosts. Each device model gets one such host.",
            ),
            OpenApiParameter("pool", {"type": "string"}, description="Paused pool to resume."),
            OpenApiParameter("job", {"type": "string"}, description="Id of the queued job whose priority changes."),
            OpenApiParameter("priority", {"type": "integer", "minimum": MIN_PRIORITY, "maximum": MAX_PRIORITY}),
        ],
        responses={200: schema.of("WhatIfResult"), **refusals(403)},
    )
    def get(self, request: Request) -> Response:
        """Simulate the scheduler and return the jobs that would start now. Staff only."""
        given = request.query_params
        problems = [
            Problem(name, f"`{name}` is empty. Give a value, or omit the parameter.")
            for name in QUESTION_FIELDS
            if name in given and not given[name].strip()
        ]
        if problems:
            raise BadParameterError(problems)
        seen = load_view()
        try:
            started = list_starts(seen, parse_question({name: given[name] for name in given}, seen))
        except SpecError as error:
            raise BadParameterError(error.problems) from None
        names = {queued.job.id: queued.job.name for queued in seen.queue}
        return Response({"jobs": [{"id": id, "name": names[id]} for id in started]})


class MayOperate(BasePermission):
    def has_permission(self, request: Request, view: Any) -> bool:
        return may_operate_any_project(request.user)


class Act(APIView):
    """Several jobs at once."""

    permission_classes = [IsAuthenticated, MayOperate]

    @extend_schema(
        operation_id="actOnQueue",
        request=schema.request_body(schema.ref("QueueActionRequest"), {"action": "hold", "jobs": ["abcdefghij"]}),
        responses={200: schema.of("ActionResult"), **refusals(403, 415, 422)},
    )
    def post(self, request: Request) -> Response:
        """Hold, release, cancel or prioritise queued jobs; tells which it changed, and why not others. Staff, and
        operators of a project on its jobs, who set no priority."""
        requested = validate_request(QueueActionRequest, request.data)
        if requested.action == "priority" and requested.priority is None:
            raise SpecError([Problem("priority", "is required")])
        changed = apply_action(requested, request.user)
        return Response({"changed": changed, "unchanged": list_unchanged(requested, changed, request.user)})


class Move(StaffView):
    """Another place."""

    @extend_schema(
        operation_id="moveInQueue",
        request=schema.request_body(schema.ref("MoveRequest"), {"to": "top"}),
        responses={200: schema.of("MoveResult"), **refusals(403, 404, 409, 415, 422)},
    )
    def post(self, request: Request, job_id: str) -> Response:
        """Move a queued job among those of its priority: up, down, to the top, or before another. Staff only."""
        requested = validate_request(MoveRequest, request.data)
        if (requested.to is None) == (requested.before is None):
            raise SpecError([Problem("to", "Set either `to` or `before`, not both.")])
        if not is_storable(job_id) or not Job.objects.filter(id=job_id).exists():
            raise NotFoundError("job")
        if not Job.objects.filter(id=job_id, status=Status.QUEUED).exists():
            return refuse(409, "status", "The job is not queued.")
        by = request.user.get_username()
        if requested.before is not None:
            moved = staff_actions.move_before(job_id, requested.before, by)
        else:
            assert requested.to is not None, "either `to` or `before` is set"
            moved = staff_actions.move(job_id, requested.to, by)
        return Response({"moved": moved, "reason": "" if moved else explain_unmoved(job_id, requested.before)})


class Pause(StaffView):
    """Start nothing."""

    paused = True

    @extend_schema(
        operation_id="pauseQueue", request=None, responses={200: schema.of("PauseResult"), **refusals(403, 415, 422)}
    )
    def post(self, request: Request) -> Response:
        """Start no job until the queue is resumed; what runs goes on. Staff only."""
        return _pause(request, paused=True)


class Resume(StaffView):
    """Go on."""

    @extend_schema(
        operation_id="resumeQueue", request=None, responses={200: schema.of("PauseResult"), **refusals(403, 415, 422)}
    )
    def post(self, request: Request) -> Response:
        """Start jobs again. Staff only."""
        return _pause(request, paused=False)


class PausePool(StaffView):
    """A pool's hosts take no new jobs."""

    @extend_schema(
        operation_id="pausePool",
        request=None,
        responses={200: schema.of("PauseResult"), **refusals(403, 404, 415, 422)},
    )
    def post(self, request: Request, name: str) -> Response:
        """The hosts of a pool take no new jobs until it is resumed. Staff only."""
        return _pause(request, paused=True, pool=name)


class ResumePool(StaffView):
    """A pool's hosts take jobs again."""

    @extend_schema(
        operation_id="resumePool",
        request=None,
        responses={200: schema.of("PauseResult"), **refusals(403, 404, 415, 422)},
    )
    def post(self, request: Request, name: str) -> Response:
        """The hosts of a pool take jobs again. Staff only."""
        return _pause(request, paused=False, pool=name)


def _pause(request: Request, *, paused: bool, pool: str | None = None) -> Response:
    found = Pool.objects.filter(name=pool).first() if pool is not None and is_storable(pool) else None
    if pool is not None and found is None:
        raise NotFoundError("pool")
    refuse_body(request)
    by = request.user.get_username()
    changed = staff_actions.pause_queue(paused, by) if found is None else staff_actions.pause_pool(found, paused, by)
    return Response({"paused": paused, "changed": changed})


class Audit(StaffView):
    """Who did what."""

    content_negotiation_class = WhateverIsAccepted

    @extend_schema(
        operation_id="listAudit",
        parameters=[
            *parameters(MOST_ROWS),
            _entry("before", "Return only entries older than the entry with this id."),
            _entry("after", "Return only entries newer than the entry with this id."),
            OpenApiParameter("format", {"type": "string", "enum": list(AUDIT_FORMATS), "default": "json"}),
        ],
        responses={
            (200, "application/json"): schema.list_of("AuditRow"),
            (200, "text/csv"): OpenApiResponse({"type": "string"}, "With a header row."),
            **refusals(403),
        },
    )
    def get(self, request: Request) -> HttpResponseBase:
        """Who did what to which object, when (UTC) and from where; the newest first, 200 of them or `limit`, page by
        page. CSV has the same lines, and an apostrophe before what a spreadsheet would carry out. Staff only."""
        given = Parameters(request)
        before = given.number("before", LAST_ID, 1, LAST_ID)
        after = given.number("after", 0, 1, LAST_ID)
        form = given.one_of("format", "json", AUDIT_FORMATS)
        given.check()
        page = paged(request, AuditEntry.objects.filter(id__lt=before, id__gt=after), "-id", usual=MOST_ROWS)
        told = serialize_entries(page.rows)
        if form == "csv":
            return HttpResponse(format_csv(told), content_type=CSV_CONTENT_TYPE, headers=page.headers)
        return Response(told, headers=page.headers)
