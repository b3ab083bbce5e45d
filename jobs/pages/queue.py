"""The page Queue: the order, reasons, and estimated starts of waiting jobs, and the actions of staff."""

from __future__ import annotations

import re
from collections import Counter
from datetime import timedelta
from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_GET, require_POST

from jobs.api.errors import make_page_problem_response
from jobs.api.problems import build_problem
from jobs.core.access import (
    can_see_jobs_of_others,
    get_operable_jobs,
    get_visible_jobs,
    may_change_all_jobs,
    may_operate_any_project,
)
from jobs.core.filters import get_page
from jobs.core.text import is_storable, parse_json
from jobs.models import Pool, Project
from jobs.pages.view_helpers import join_job_sentences, require_queue_staff
from jobs.planning.schemas import validate_request
from jobs.queue import staff_actions
from jobs.queue.bulk_actions import MoveRequest, QueueActionRequest, apply_action
from jobs.queue.scheduling.waiting_reasons import put_fact_first
from jobs.queue.start_predictions import QUESTION_FIELDS, list_starts
from jobs.queue.start_predictions import parse_question as question
from jobs.queue.view import QueueSnapshot, build_rows, load_queue_snapshot
from planner.facts.validation import Problem, SpecError

JOBS_PER_PAGE = 100
SOON = timedelta(minutes=1)  # the page shows minutes, so an earlier start would soon be in the past


@require_GET
def queue(request: HttpRequest) -> HttpResponse:
    """Show the waiting jobs that the user can see. `?part=rows` returns only the table."""
    seen = load_queue_snapshot()
    mine = set(
        get_visible_jobs(request.user).filter(id__in=[q.job.id for q in seen.queue]).values_list("id", flat=True)
    )
    page = Paginator([q for q in seen.queue if q.job.id in mine], JOBS_PER_PAGE).get_page(request.GET.get("page"))
    shown = [queued.job.id for queued in page]
    operated = set(get_operable_jobs(request.user).filter(id__in=shown).values_list("id", flat=True))
    lines = build_rows(seen, request.user, list(page))
    for line in lines:
        left = line["starts"] - seen.now if line["starts"] else None
        line["starts_in_s"] = left.total_seconds() if left is not None else None
        line["starts_soon"] = left is not None and left < SOON
        line["short_reason"] = put_fact_first(line["reason"])
        line["bonus"] = line["points"] - line["priority"]
        line["unknown_why"] = (
            "The queue is paused."
            if seen.paused
            else "The job is held."
            if line["held"]
            else "The time of enough free slots is not predictable."
        )
    context = {
        "rows": lines,
        "page": page,
        "total": len(seen.queue),
        "paused": seen.paused,
        "pools": Pool.objects.all(),
        "projects": get_page(request, _list_projects(seen), "projects"),
        "may_run": may_change_all_jobs(request.user),
        "may_operate": may_operate_any_project(request.user),
        "operated": operated,
        "sees_others": can_see_jobs_of_others(request.user),
    }
    if request.GET.get("part") == "rows":
        return render(request, "queue/rows.html", context)
    return render(request, "queue/index.html", {**context, **_simulate(request, seen)})


def _list_projects(seen: QueueSnapshot) -> list[dict[str, Any]]:
    """List projects by waiting jobs, then by usage."""
    waiting = Counter(queued.job.project for queued in seen.queue)
    lines = [
        {"project": project, "waiting": waiting[project.name], "quota": seen.quotas.get(project.name)}
        for project in Project.objects.all()
    ]
    return sorted(lines, key=lambda line: (-line["waiting"], -line["project"].used))


def _simulate(request: HttpRequest, seen: QueueSnapshot) -> dict[str, Any]:
    """Return the scheduler simulation of the request, without a result if the user may not run the queue."""
    query = {name: request.GET.get(name, "").strip() for name in QUESTION_FIELDS}
    if not may_change_all_jobs(request.user) or not any(query.values()):
        return {"query": query}
    try:
        started = list_starts(seen, question(query, seen))
    except SpecError as error:
        return {"query": query, "problem": join_job_sentences(error)}
    names = {queued.job.id: queued.job.name for queued in seen.queue}
    return {"query": query, "started": [{"id": id, "name": names[id]} for id in started]}


@require_POST
def act(request: HttpRequest) -> HttpResponse:
    """Ask for confirmation with the names of the jobs. With `confirmed`, act and return to the queue."""
    if not may_operate_any_project(request.user):
        raise PermissionDenied("Only staff and project operators can change the queue.")
    data: dict[str, Any] = {"action": request.POST.get("action", ""), "jobs": request.POST.getlist("job")}
    if data["action"] == "priority":
        text = request.POST.get("priority", "").strip()
        data["priority"] = int(text) if re.fullmatch(r"-?[0-9]{1,5}", text) else text
    try:
        bulk = _check_bulk(data)
    except SpecError as error:
        messages.error(request, join_job_sentences(error))
        return redirect("queue")
    if "confirmed" not in request.POST:
        named = get_operable_jobs(request.user).filter(id__in=bulk.jobs).only("id", "name", "owner__username")
        return render(request, "queue/confirm.html", {"bulk": bulk, "jobs": named})
    done = apply_action(bulk, request.user)
    words = {"hold": "held", "release": "released", "cancel": "cancelled", "priority": "updated"}
    messages.success(request, f"{len(done)} of {len(bulk.jobs)} jobs {words[bulk.action]}.")
    return redirect("queue")


def _check_bulk(data: dict[str, Any]) -> QueueActionRequest:
    bulk = validate_request(QueueActionRequest, data)
    if bulk.action == "priority" and bulk.priority is None:
        raise SpecError([Problem("priority", "`priority` is missing. Add it.")])
    return bulk


@require_POST
def move(request: HttpRequest) -> HttpResponse:
    """Move a job, from JSON of `job` and either `to` (up, down or top) or `before` (a job)."""
    by = require_queue_staff(request)
    try:
        data = parse_json(request.body)
        job = data.pop("job", "") if isinstance(data, dict) else ""
        target = validate_request(MoveRequest, data)
    except SpecError as error:
        return make_page_problem_response(build_problem(400, error.problems, "body"))
    except ValueError as error:
        return make_page_problem_response(
            build_problem(400, [Problem("request", f"The request body is not JSON: {error}")], "body")
        )
    if not is_storable(job):
        return make_page_problem_response(build_problem(400, [Problem("job", "`job` is not a job id.")], "body"))
    if target.before is not None:
        return JsonResponse({"moved": staff_actions.move_before(job, target.before, by)})
    return JsonResponse({"moved": staff_actions.move(job, target.to or "top", by)})


@require_POST
def pause(request: HttpRequest) -> HttpResponse:
    """Pause the whole queue or one pool if `on` is "true", else resume the queue or pool."""
    by, on = require_queue_staff(request), request.POST.get("on") == "true"
    name = request.POST.get("pool", "")
    if not name:
        staff_actions.pause_queue(on, by)
    elif is_storable(name) and (pool := Pool.objects.filter(name=name).first()):
        staff_actions.pause_pool(pool, on, by)
    return redirect("queue")
