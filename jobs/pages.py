"""The pages: thin views over actions."""

from __future__ import annotations

import json
import logging
import secrets
from typing import Any, cast

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from jobs import actions, planning
from jobs.api.views import find_job, visible_jobs
from jobs.models import TERMINAL, Status
from jobs.present import job_detail
from planner.collectives import bus_factor
from planner.spec import Problem, SpecError

log = logging.getLogger(__name__)

SHOWN_JOBS = 100
AGAIN = (Status.FAILED, Status.LOST, Status.CANCELLED)
OPS: tuple[Any, ...] = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send", "recv", "barrier")


@require_GET
@login_required
def job_list(request: HttpRequest) -> HttpResponse:
    """Jobs of the user, or everybody's for staff. `?part=rows` gives the table alone, for refreshing."""
    jobs = visible_jobs(request.user)[:SHOWN_JOBS]
    template = "jobs/rows.html" if request.GET.get("part") == "rows" else "jobs/list.html"
    return render(request, template, {"jobs": jobs, "shown_jobs": SHOWN_JOBS})


@require_http_methods(["GET", "POST"])
@login_required
def job_new(request: HttpRequest) -> HttpResponse:
    """The form. `?from=ID` starts from an earlier job's spec. Posted as the JSON of a spec in the field `spec`."""
    if request.method == "GET":
        earlier = find_job(request.user, request.GET["from"]).spec if "from" in request.GET else None
        return _form(request, earlier, [])
    try:
        data = json.loads(request.POST.get("spec", ""))
    except (ValueError, RecursionError):
        return _form(request, None, [Problem("spec", "the form arrived empty or broken; please try again")])
    try:
        job, _ = actions.submit(cast(User, request.user), data)
    except SpecError as error:
        return _form(request, data, error.problems)
    return redirect("job-detail", job.id)


def _form(request: HttpRequest, spec: Any, problems: list[Problem]) -> HttpResponse:
    data = {"presets": planning.presets(), "spec": spec, "problems": [p._asdict() for p in problems]}
    return render(request, "jobs/new.html", {"data": data}, status=422 if problems else 200)


@require_POST
@login_required
def plan(request: HttpRequest) -> HttpResponse:
    """What the draft in the body would cost, as `jobs.planning.plan` says it."""
    try:
        data = json.loads(request.body)
    except (ValueError, RecursionError) as error:
        return JsonResponse({"errors": [{"field": "request", "message": f"not JSON: {error}"}]}, status=400)
    return JsonResponse(planning.plan(data))


@require_GET
@login_required
def job_page(request: HttpRequest, job_id: str) -> HttpResponse:
    """One job, live."""
    job = find_job(request.user, job_id)
    factors = {op: {n: bus_factor(op, n) for n in _group_sizes(job.spec)} for op in OPS}
    data = {"job": job_detail(job), "busFactors": factors}
    context = {"job": job, "data": data, "terminal": job.status in TERMINAL, "again": job.status in AGAIN}
    return render(request, "jobs/detail.html", context)


def _group_sizes(spec: dict[str, Any]) -> set[int]:
    layout = spec["layout"]
    world = layout["dp"] * layout["pp"] * layout["tp"]
    return {2, world, layout["dp"], layout["pp"], layout["tp"]}


@require_POST
@login_required
def job_cancel(request: HttpRequest, job_id: str) -> HttpResponse:
    """Cancel, then back to the job."""
    job = find_job(request.user, job_id)
    if not actions.cancel(job, request.user.get_username()):
        messages.info(request, "The job had already ended.")
    return redirect("job-detail", job_id)


@require_POST
@login_required
def job_requeue(request: HttpRequest, job_id: str) -> HttpResponse:
    """Queue the same job again as a new attempt."""
    job = find_job(request.user, job_id)
    if not actions.requeue(job, request.user.get_username()):
        messages.info(request, f"A job that is {job.status} cannot be queued again.")
    return redirect("job-detail", job_id)


def server_error(request: HttpRequest) -> HttpResponse:
    """A page with an id to quote; the log has the same id beside the traceback."""
    reference = secrets.token_hex(4)
    log.error("error page %s for %s", reference, request.path)
    return render(request, "500.html", {"reference": reference}, status=500)
