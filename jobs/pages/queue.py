"""The page Queue: the order, reasons, and estimated starts of waiting jobs, and the actions of staff."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_GET, require_POST

from jobs.api.http.errors import refused_page
from jobs.api.http.problems import details
from jobs.core.access import may_operate, may_run_queue, operated_jobs, sees_others, visible_jobs
from jobs.core.audit import FORMATS, from_where
from jobs.core.pagination import page_of
from jobs.core.text import parse_json, storable, whole_number
from jobs.models import AuditEntry, Pool, Project
from jobs.planning.queries import checked
from jobs.queue import staff_actions
from jobs.queue.bulk_actions import Bulk, MoveTo, apply
from jobs.queue.scheduling.waiting_reasons import with_fact_first
from jobs.queue.view import View, rows, view
from jobs.queue.what_if import NAMES, would_start
from jobs.queue.what_if import asked as question
from planner.facts.validation import Problem, SpecError

PAGE_SIZE = 100
AUDIT_PAGE = 100
SOON = timedelta(minutes=1)


def _operators_only(request: HttpRequest) -> None:
    if not may_operate(request.user):
        raise PermissionDenied("Only staff and project operators can change the queue.")


def _staff_only(request: HttpRequest) -> str:
    if not may_run_queue(request.user):
        raise PermissionDenied("Only staff can change the queue.")
    return request.user.get_username()


def _why_unknown(*, paused: bool, held: bool) -> str:
    """Return why the start of a job is not estimated."""
    if paused:
        return "The queue is paused."
    return "The job is held." if held else "The time of enough free slots is not predictable."


@require_GET
@login_required
def queue(request: HttpRequest) -> HttpResponse:
    """Everybody's jobs for staff, for others their own and their projects' with their places. `?part=rows` gives the
    table alone."""
    seen = view()
    mine = set(visible_jobs(request.user).filter(id__in=[q.job.id for q in seen.queue]).values_list("id", flat=True))
    page = Paginator([q for q in seen.queue if q.job.id in mine], PAGE_SIZE).get_page(request.GET.get("page"))
    shown = [queued.job.id for queued in page]
    operated = set(operated_jobs(request.user).filter(id__in=shown).values_list("id", flat=True))
    lines = rows(seen, request.user, list(page))
    for line in lines:
        left = line["starts"] - seen.now if line["starts"] else None
        line["starts_in_s"] = left.total_seconds() if left is not None else None
        # The page shows minutes, so a start within a minute would soon be in the past.
        line["starts_soon"] = left is not None and left < SOON
        line["short_reason"] = with_fact_first(line["reason"])
        line["bonus"] = line["points"] - line["priority"]
        line["unknown_why"] = _why_unknown(paused=seen.paused, held=line["held"])
    context = {
        "rows": lines,
        "page": page,
        "total": len(seen.queue),
        "paused": seen.paused,
        "pools": Pool.objects.all(),
        "projects": page_of(request, _projects(seen), "projects"),
        "may_run": may_run_queue(request.user),
        "may_operate": may_operate(request.user),
        "operated": operated,
        "sees_others": sees_others(request.user),
    }
    if request.GET.get("part") == "rows":
        return render(request, "queue/rows.html", context)
    return render(request, "queue/index.html", {**context, **_what_if(request, seen)})


def _projects(seen: View) -> list[dict[str, Any]]:
    """Those that wait for most first, then those that used most."""
    waiting: dict[str, int] = {}
    for queued in seen.queue:
        waiting[queued.job.project] = waiting.get(queued.job.project, 0) + 1
    lines = [
        {"project": project, "waiting": waiting.get(project.name, 0), "quota": seen.quotas.get(project.name)}
        for project in Project.objects.all()
    ]
    return sorted(lines, key=lambda line: (-line["waiting"], -line["project"].used))


def _what_if(request: HttpRequest, seen: View) -> dict[str, Any]:
    """Return the scheduler simulation of the request, without an answer if the user may not run the queue."""
    asked = {name: request.GET.get(name, "").strip() for name in NAMES}
    if not may_run_queue(request.user) or not any(asked.values()):
        return {"asked": asked}
    try:
        started = would_start(seen, question(asked, seen))
    except SpecError as error:
        return {"asked": asked, "problem": _refusal(error)}
    known = {queued.job.id: queued.job.name for queued in seen.queue}
    return {"asked": asked, "started": [{"id": id, "name": known[id]} for id in started]}


@require_POST
@login_required
def act(request: HttpRequest) -> HttpResponse:
    """Ask first, showing whom it hits; with `confirmed`, do it and go back."""
    _operators_only(request)
    data: dict[str, Any] = {"action": request.POST.get("action", ""), "jobs": request.POST.getlist("job")}
    if data["action"] == "priority":
        text = request.POST.get("priority", "").strip()
        data["priority"] = int(text) if re.fullmatch(r"-?[0-9]{1,5}", text) else text
    try:
        asked = checked(Bulk, data)
        _needs_priority(asked)
    except SpecError as error:
        messages.error(request, _refusal(error))
        return redirect("queue")
    if "confirmed" not in request.POST:
        named = operated_jobs(request.user).filter(id__in=asked.jobs).only("id", "name", "owner__username")
        return render(request, "queue/confirm.html", {"asked": asked, "jobs": named})
    done = apply(asked, request.user)
    words = {"hold": "held", "release": "released", "cancel": "cancelled", "priority": "updated"}
    messages.success(request, f"{len(done)} of {len(asked.jobs)} jobs {words[asked.action]}.")
    return redirect("queue")


def _needs_priority(asked: Bulk) -> None:
    if asked.action == "priority" and asked.priority is None:
        raise SpecError([Problem("priority", "`priority` is missing. Add it.")])


def _refusal(error: SpecError) -> str:
    if any(problem.field.startswith("jobs") for problem in error.problems):
        return "Select jobs first."
    return " ".join(problem.sentence for problem in error.problems)


@require_POST
@login_required
def move(request: HttpRequest) -> HttpResponse:
    """JSON of `job` and where it goes: `to` up, down or top, or `before` another job."""
    by = _staff_only(request)
    try:
        data = parse_json(request.body)
        job = data.pop("job", "") if isinstance(data, dict) else ""
        asked = checked(MoveTo, data)
    except ValueError as error:
        problems = (
            error.problems
            if isinstance(error, SpecError)
            else [Problem("request", f"The request body is not JSON: {error}")]
        )
        return refused_page(details(400, problems, "body"))
    if not storable(job):
        return refused_page(details(400, [Problem("job", "`job` is not a job id.")], "body"))
    if asked.before is not None:
        return JsonResponse({"moved": staff_actions.move_before(job, asked.before, by)})
    return JsonResponse({"moved": staff_actions.move(job, asked.to or "top", by)})


@require_POST
@login_required
def pause(request: HttpRequest) -> HttpResponse:
    """Pause the whole queue or one pool if `on` is "true", else resume the queue or pool."""
    by, on = _staff_only(request), request.POST.get("on") == "true"
    name = request.POST.get("pool", "")
    if not name:
        staff_actions.pause_queue(on, by)
    elif storable(name) and (pool := Pool.objects.filter(name=name).first()):
        staff_actions.pause_pool(pool, on, by)
    return redirect("queue")


@require_GET
@login_required
def audit_export(request: HttpRequest) -> HttpResponse:
    """Entries after the one of the id `after`, the oldest first, as a file: `format` is csv or jsonl."""
    _staff_only(request)
    form, after = request.GET.get("format", "csv"), whole_number(request.GET.get("after", "0"), 0, 2**63 - 1)
    if form not in FORMATS or after is None:
        return HttpResponse(
            "Set `format` to csv or jsonl, and `after` to the id of an audit entry.",
            status=400,
            content_type="text/plain",
        )
    text, content_type = FORMATS[form]
    answer = HttpResponse(text(from_where(after)), content_type=content_type)
    answer["Content-Disposition"] = f'attachment; filename="audit.{form}"'
    return answer


@require_GET
@login_required
def audit(request: HttpRequest) -> HttpResponse:
    """Who did what, newest first."""
    _staff_only(request)
    page = Paginator(AuditEntry.objects.all(), AUDIT_PAGE).get_page(request.GET.get("page"))
    return render(request, "queue/audit.html", {"page": page})
