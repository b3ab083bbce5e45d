"""REST views of the queue and the audit log."""

from __future__ import annotations

from django.http import HttpResponse
from django.http.response import HttpResponseBase
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse
from rest_framework.permissions import IsAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response

from jobs.api import openapi
from jobs.api.errors import refuse, reject_body
from jobs.api.openapi import operation
from jobs.api.parameters import BadParameterError, Parameters, describe_page_parameters, get_page
from jobs.api.parsers import FixedMediaType
from jobs.api.views import APIView, MayOperate, QueueStaffView
from jobs.core.access import get_visible_jobs
from jobs.core.audit import CSV_CONTENT_TYPE, format_csv, serialize_entries
from jobs.core.errors import NotFoundError
from jobs.core.text import is_storable
from jobs.models import AuditEntry, Job, Pool, Status
from jobs.planning.schemas import validate_request
from jobs.queue import staff_actions
from jobs.queue.bulk_actions import MoveRequest, QueueActionRequest, apply_action, explain_unmoved, list_unchanged
from jobs.queue.staff_actions import MAX_PRIORITY, MIN_PRIORITY
from jobs.queue.start_predictions import MAX_SLOTS, QUESTION_FIELDS, list_starts, parse_question
from jobs.queue.view import build_rows, load_queue_snapshot
from planner.facts.validation import Problem, SpecError

MOST_ROWS = 200
LAST_ID = 2**63 - 1
AUDIT_FORMATS = ("json", "csv")


def _entry(name: str, words: str) -> OpenApiParameter:
    return OpenApiParameter(name, {"type": "integer", "minimum": 1, "maximum": LAST_ID}, description=words)


class QueueView(APIView):
    @operation("getQueue", "QueueDetail")
    def get(self, request: Request) -> Response:
        """List your queued jobs in starting order, at most 200.

        Each job has its position in the whole queue, its points, the reason why it waits, and its estimated start.
        Members also see jobs of their projects, and staff see all jobs.
        """
        seen = load_queue_snapshot()
        ids = [queued.job.id for queued in seen.queue]
        mine = set(get_visible_jobs(request.user).filter(id__in=ids).values_list("id", flat=True))
        shown = [queued for queued in seen.queue if queued.job.id in mine][:MOST_ROWS]
        rows = [
            {
                **row,
                "starts": row["starts"].isoformat() if row["starts"] else None,
                "created": row["created"].isoformat(),
            }
            for row in build_rows(seen, request.user, shown)
        ]
        return Response({"paused": seen.paused, "queued": len(seen.queue), "jobs": rows})


class WhatIfView(QueueStaffView):
    @operation(
        "whatWouldStart",
        "WhatIfResult",
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
    )
    def get(self, request: Request) -> Response:
        """Simulate the scheduler and return the jobs that would start now. Staff only."""
        params = request.query_params
        problems = [
            Problem(name, f"`{name}` is empty. Give a value, or omit the parameter.")
            for name in QUESTION_FIELDS
            if name in params and not params[name].strip()
        ]
        if problems:
            raise BadParameterError(problems)
        seen = load_queue_snapshot()
        try:
            started = list_starts(seen, parse_question({name: params[name] for name in params}, seen))
        except SpecError as error:
            raise BadParameterError(error.problems) from None
        names = {queued.job.id: queued.job.name for queued in seen.queue}
        return Response({"jobs": [{"id": id, "name": names[id]} for id in started]})


class QueueActionView(APIView):
    permission_classes = [IsAuthenticated, MayOperate]

    @operation(
        "actOnQueue",
        "ActionResult",
        415,
        422,
        request=openapi.request_body(openapi.ref("QueueActionRequest"), {"action": "hold", "jobs": ["abcdefghij"]}),
    )
    def post(self, request: Request) -> Response:
        """Hold, release, cancel, or prioritize queued jobs.

        The response lists the changed jobs, and why other jobs did not change. For staff, and for operators on jobs
        of their projects. Only staff can set priorities.
        """
        body = validate_request(QueueActionRequest, request.data)
        if body.action == "priority" and body.priority is None:
            raise SpecError([Problem("priority", "is required")])
        changed = apply_action(body, request.user)
        return Response({"changed": changed, "unchanged": list_unchanged(body, changed, request.user)})


class MoveJobView(QueueStaffView):
    @operation(
        "moveInQueue",
        "MoveResult",
        404,
        409,
        415,
        422,
        request=openapi.request_body(openapi.ref("MoveRequest"), {"to": "top"}),
    )
    def post(self, request: Request, job_id: str) -> Response:
        """Move a queued job up, down, to the top, or before another job of its priority. Staff only."""
        body = validate_request(MoveRequest, request.data)
        if (body.to is None) == (body.before is None):
            raise SpecError([Problem("to", "Set either `to` or `before`, not both.")])
        if not is_storable(job_id) or not Job.objects.filter(id=job_id).exists():
            raise NotFoundError("job")
        if not Job.objects.filter(id=job_id, status=Status.QUEUED).exists():
            return refuse(409, "status", "The job is not queued.")
        by = request.user.get_username()
        if body.before is not None:
            moved = staff_actions.move_before(job_id, body.before, by)
        else:
            assert body.to is not None, "either `to` or `before` is set"
            moved = staff_actions.move(job_id, body.to, by)
        return Response({"moved": moved, "reason": "" if moved else explain_unmoved(job_id, body.before)})


class PauseQueueView(QueueStaffView):
    paused = True

    @operation("pauseQueue", "PauseResult", 415, 422)
    def post(self, request: Request) -> Response:
        """Pause the queue. Running jobs continue, and no job starts. Staff only."""
        return _pause(request, paused=True)


class ResumeQueueView(QueueStaffView):
    @operation("resumeQueue", "PauseResult", 415, 422)
    def post(self, request: Request) -> Response:
        """Resume the queue. Staff only."""
        return _pause(request, paused=False)


class PausePoolView(QueueStaffView):
    @operation("pausePool", "PauseResult", 404, 415, 422)
    def post(self, request: Request, name: str) -> Response:
        """Pause a pool. Its hosts accept no new jobs. Staff only."""
        return _pause(request, paused=True, pool=name)


class ResumePoolView(QueueStaffView):
    @operation("resumePool", "PauseResult", 404, 415, 422)
    def post(self, request: Request, name: str) -> Response:
        """Resume a pool. Staff only."""
        return _pause(request, paused=False, pool=name)


def _pause(request: Request, *, paused: bool, pool: str | None = None) -> Response:
    found = Pool.objects.filter(name=pool).first() if pool is not None and is_storable(pool) else None
    if pool is not None and found is None:
        raise NotFoundError("pool")
    reject_body(request)
    by = request.user.get_username()
    changed = staff_actions.pause_queue(paused, by) if found is None else staff_actions.pause_pool(found, paused, by)
    return Response({"paused": paused, "changed": changed})


class AuditView(QueueStaffView):
    content_negotiation_class = FixedMediaType

    @operation(
        "listAudit",
        {
            (200, "application/json"): openapi.describe_list("AuditRow"),
            (200, "text/csv"): OpenApiResponse({"type": "string"}, "With a header row."),
        },
        parameters=[
            *describe_page_parameters(MOST_ROWS),
            _entry("before", "Return only entries older than the entry with this id."),
            _entry("after", "Return only entries newer than the entry with this id."),
            OpenApiParameter("format", {"type": "string", "enum": list(AUDIT_FORMATS), "default": "json"}),
        ],
    )
    def get(self, request: Request) -> HttpResponseBase:
        """List the entries of the audit log, newest first. Staff only.

        CSV has the same columns. An apostrophe precedes values that a spreadsheet would execute.
        """
        query = Parameters(request)
        before = query.read_number("before", LAST_ID, 1, LAST_ID)
        after = query.read_number("after", 0, 1, LAST_ID)
        form = query.read_choice("format", "json", AUDIT_FORMATS)
        query.check()
        page = get_page(request, AuditEntry.objects.filter(id__lt=before, id__gt=after), "-id", default_limit=MOST_ROWS)
        entries = serialize_entries(page.rows)
        if form == "csv":
            return HttpResponse(format_csv(entries), content_type=CSV_CONTENT_TYPE, headers=page.headers)
        return Response(entries, headers=page.headers)
