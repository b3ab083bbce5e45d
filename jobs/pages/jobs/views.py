"""Serve the page of one job, and its actions."""

from __future__ import annotations

from typing import Any, cast

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_GET, require_POST

from jobs.core.access import find_job, find_job_to_change, find_job_to_run, may_change, may_submit_to, visible_job
from jobs.core.job_details import JobDetail, job_detail
from jobs.core.kinds import TABS, Tabs, external_tabs, kind_of, layout_words
from jobs.core.retries import disproved
from jobs.models import ELSEWHERE, TERMINAL, Job, Status
from jobs.pages.busy import busy_as_503
from jobs.pages.forms import once
from jobs.pages.jobs.notice import notice_of
from jobs.pages.jobs.waiting import describe_wait
from jobs.people.notifications import ends
from jobs.planning.elastic import NoOfferError, is_stranded
from jobs.queue import actions, derived_jobs
from jobs.queue.inbound.silence import HeardError, give_up
from planner.facts.validation import SpecError

AGAIN = (Status.FAILED, Status.LOST, Status.CANCELLED)


@require_GET
@login_required
def job_page(request: HttpRequest, job_id: str) -> HttpResponse:
    """Show one job. `?part=waiting` returns only the queue entry, as JSON."""
    job = find_job(request.user, job_id)
    if request.GET.get("part") == "waiting":
        return JsonResponse(describe_wait(request.user, job))
    kind, external = kind_of(job.spec), job.engine == ELSEWHERE
    data, queued, terminal = job_detail(job), job.status == Status.QUEUED, job.status in TERMINAL
    started = job.history.filter(attempt=job.attempt, status=Status.STARTING).exists()
    tabs = _tabs(
        job, data, external_tabs(kind) if external else kind.tabs, is_bare=queued or (terminal and not started)
    )
    panels = {name for tab in tabs for name in tab["panels"]}
    context = {
        "job": job,
        "data": data,
        "kind": kind,
        "subject": kind.subject(job.spec),
        "layout": layout_words(job.spec),
        "tabs": tabs,
        "is_single": sum(tab["shown"] for tab in tabs) == 1,
        "has_verdict": "first/health" in panels,
        "has_charts": "first/traffic" in panels,
        "notice": notice_of(data, has_verdict="first/health" in panels and started),
        "states": [change for change in data["history"] if change["attempt"] == job.attempt],
        "earlier": [change for change in data["history"] if change["attempt"] != job.attempt],
        "waiting": describe_wait(request.user, job) if queued else None,
        "queued": queued,
        "terminal": terminal,
        "started": started,
        "elsewhere": external,
        "again": job.status in AGAIN and not external and not disproved(job),
        "stranded": queued and is_stranded(job),
        "may_change": may_change(request.user, job),
        "end_mail": ends.told(cast(User, request.user), job),
        "check_of": visible_job(request.user, job.check_of_id or ""),
        "check": derived_jobs.newest(request.user, job),
        "check_offer": derived_jobs.offer(request.user, job),
        "may_hear": may_submit_to(request.user, job.project),
        "may_run": may_change(request.user, job) and may_submit_to(request.user, job.project),
    }
    return render(request, "jobs/detail.html", context)


def _tabs(job: Job, data: JobDetail, tabs: Tabs, *, is_bare: bool) -> list[dict[str, Any]]:
    """List the tabs with their panels. A bare job has nothing to show outside its overview yet."""
    found = []
    for tab, names in tabs.items():
        panels = [name for name in names if name != "chosen" or job.chosen]
        has_hosts = "first/places" in panels or len(data["members"]) > 1
        shown = tab == "overview" or (not is_bare and (tab != "hosts" or has_hosts))
        found.append({"name": tab, "label": TABS[tab], "panels": panels, "shown": shown})
    return found


@require_POST
@login_required
def job_cancel(request: HttpRequest, job_id: str) -> HttpResponse:
    """Cancel a job and return to its page."""
    job = find_job_to_change(request.user, job_id)
    if not actions.cancel(job, request.user.get_username()):
        messages.info(request, "The job has already ended.")
    return redirect("job-detail", job_id)


@require_POST
@login_required
def job_give_up(request: HttpRequest, job_id: str) -> HttpResponse:
    """Mark a silent external run as lost and return to its page."""
    job = find_job_to_change(request.user, job_id)
    try:
        give_up(job, request.user.get_username())
    except HeardError:
        messages.info(request, f"The run is {job.status} and still sends reports. Cancel the run instead.")
    return redirect("job-detail", job_id)


@require_POST
@login_required
@busy_as_503
def job_run_smaller(request: HttpRequest, job_id: str) -> HttpResponse:
    """Queue the job again in the layout that fits the connected hosts."""
    job = find_job_to_run(request.user, job_id)
    try:
        if not actions.run_smaller(job, request.user.get_username()):
            messages.info(
                request,
                f"The job is {job.status}. Only jobs that failed, were lost, or were cancelled can be queued again.",
            )
    except NoOfferError as error:
        messages.info(request, str(error))
    except actions.DisprovedError as error:
        messages.info(request, str(error))
    except SpecError as error:
        messages.info(request, "; ".join(problem.message for problem in error.problems))
    return redirect("job-detail", job_id)


@require_POST
@login_required
@busy_as_503
def job_check(request: HttpRequest, job_id: str) -> HttpResponse:
    """Queue a reference check of the job and open its page."""
    job = find_job(request.user, job_id)
    offered = derived_jobs.offer(request.user, job)
    if offered is None:
        raise Http404("This job has no results that a reference check can compare.")
    if not offered["may"]:
        raise PermissionDenied(f"You are not allowed to submit jobs to project {job.project}.")
    try:
        return once.submitted(request, derived_jobs.spec_of(job), check_of=job)
    except SpecError as error:
        messages.info(request, "; ".join(problem.message for problem in error.problems))
    return redirect("job-detail", job_id)


@require_POST
@login_required
def job_requeue(request: HttpRequest, job_id: str) -> HttpResponse:
    """Queue a new attempt of the job."""
    job = find_job_to_run(request.user, job_id)
    try:
        if not actions.requeue(job, request.user.get_username()):
            messages.info(
                request,
                f"The job is {job.status}. Only jobs that failed, were lost, or were cancelled can be queued again.",
            )
    except actions.DisprovedError as error:
        messages.info(request, str(error))
    return redirect("job-detail", job_id)
