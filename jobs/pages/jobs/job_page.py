"""The page of one job, its actions, its notice, and its wait in the queue."""

from __future__ import annotations

from typing import Any, NamedTuple

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_GET, require_POST
from typing_extensions import TypedDict

from jobs.core.access import find_job, find_job_to_change, find_job_to_run, get_visible_job, may_change, may_submit_to
from jobs.core.job_details import JobDetail, serialize_job
from jobs.core.kinds import TABS, Tabs, format_layout, get_external_tabs, get_kind
from jobs.models import EXTERNAL_ENGINE, TERMINAL, Host, Job, Status
from jobs.pages.view_helpers import catch_busy_planner, get_user, get_username, submit_once
from jobs.people.notifications import email_settings
from jobs.planning.auto_layout import NoOfferError, is_stranded
from jobs.queue import actions, derived_jobs
from jobs.queue.inbound.reconcile import RunConnectedError, mark_run_lost
from jobs.queue.view import build_rows, load_queue_snapshot
from jobs.runs.script_prediction import predict_script
from planner.facts.kinds import get_kind_rules
from planner.facts.validation import SpecError

REQUEUEABLE = (Status.FAILED, Status.LOST, Status.CANCELLED)
MAX_REASON_LENGTH = 160  # characters, in a notice


class Notice(NamedTuple):
    """A message with its color."""

    tone: str
    text: str


class Waiting(TypedDict):
    """The queue entry of one job."""

    place: int | None  # position from 1, None if another scheduler queues the job
    total: int  # queued jobs
    reason: str  # empty before the first evaluation
    starts: str | None  # estimated start in ISO 8601, None if unknown
    starts_when: str  # the event that the estimated start depends on
    next: str  # the action of the reader


@require_GET
def job_page(request: HttpRequest, job_id: str) -> HttpResponse:
    """Show one job. `?part=waiting` returns only the queue entry, as JSON."""
    job = find_job(request.user, job_id)
    if request.GET.get("part") == "waiting":
        return JsonResponse(describe_wait(request.user, job))
    kind, external = get_kind(job.spec), job.engine == EXTERNAL_ENGINE
    data, queued, terminal = serialize_job(job), job.status == Status.QUEUED, job.status in TERMINAL
    started = job.history.filter(attempt=job.attempt, status=Status.STARTING).exists()
    tabs = _list_tabs(
        job, data, get_external_tabs(kind) if external else kind.tabs, is_bare=queued or (terminal and not started)
    )
    panels = {name for tab in tabs for name in tab["panels"]}
    context = {
        "job": job,
        "data": data,
        "kind": kind,
        "subject": kind.subject(job.spec),
        "layout": format_layout(job.spec),
        "tabs": tabs,
        "is_single": sum(tab["shown"] for tab in tabs) == 1,
        "has_verdict": "first/health" in panels,
        "has_charts": "first/traffic" in panels,
        "notice": make_notice(data, has_verdict="first/health" in panels and started),
        "states": [change for change in data["history"] if change["attempt"] == job.attempt],
        "earlier": [change for change in data["history"] if change["attempt"] != job.attempt],
        "waiting": describe_wait(request.user, job) if queued else None,
        "queued": queued,
        "terminal": terminal,
        "started": started,
        "elsewhere": external,
        "upload": job.upload,
        "upload_sha256": (job.spec.get("script") or {}).get("upload"),
        "is_owner": job.owner_id == request.user.pk,
        "again": job.status in REQUEUEABLE and not external and not job.has_failed_verification(),
        "stranded": queued and is_stranded(job),
        "may_change": may_change(request.user, job),
        "end_mail": email_settings.get_end_email(get_user(request), job),
        "check_of": get_visible_job(request.user, job.check_of_id or ""),
        "check": derived_jobs.get_newest_check(request.user, job),
        "check_offer": derived_jobs.describe_check_offer(request.user, job),
        "may_hear": may_submit_to(request.user, job.project),
        "may_run": may_change(request.user, job) and may_submit_to(request.user, job.project),
    }
    return render(request, "jobs/detail.html", context)


@require_GET
def timeline_page(request: HttpRequest, job_id: str) -> HttpResponse:
    """Render the timeline of every rank at full width, with heat maps."""
    job = find_job(request.user, job_id)
    context = {
        "job": job,
        "data": serialize_job(job),
        "layout": format_layout(job.spec),
        "alone": True,
        "may_change": may_change(request.user, job),
    }
    return render(request, "timeline/page.html", context)


def _list_tabs(job: Job, data: JobDetail, tabs: Tabs, *, is_bare: bool) -> list[dict[str, Any]]:
    """List the tabs with their panels. A bare job has nothing to show outside its overview yet."""
    found = []
    for tab, names in tabs.items():
        panels = [name for name in names if _has_content(job, name)]
        has_hosts = "first/places" in panels or len(data["members"]) > 1
        shown = tab == "overview" or (not is_bare and (tab != "hosts" or has_hosts))
        found.append({"name": tab, "label": TABS[tab], "panels": panels, "shown": shown})
    return found


def _has_content(job: Job, panel: str) -> bool:
    """Return whether a job can fill a panel that other jobs of its kind leave out."""
    match panel:
        case "chosen":
            return bool(job.chosen)
        case "script-prediction":
            return bool(job.spec["script"].get("plan"))
        case _:
            return True


@require_GET
@catch_busy_planner
def job_prediction(request: HttpRequest, job_id: str) -> HttpResponse:
    """Render the prediction of a script, without the page around it."""
    job = find_job(request.user, job_id)
    prediction = predict_script(job)
    layout = format_layout({"layout": prediction["layout"]}) if prediction["layout"] else ""
    return render(request, "jobs/script_prediction.html", {"prediction": prediction, "layout": layout})


@require_POST
def job_cancel(request: HttpRequest, job_id: str) -> HttpResponse:
    """Cancel a job and return to its page."""
    job = find_job_to_change(request.user, job_id)
    if not actions.cancel(job, get_username(request)):
        messages.info(request, "The job has already ended.")
    return redirect("job-detail", job_id)


@require_POST
def job_mark_lost(request: HttpRequest, job_id: str) -> HttpResponse:
    """Mark a silent external run as lost and return to its page."""
    job = find_job_to_change(request.user, job_id)
    try:
        mark_run_lost(job, get_username(request))
    except RunConnectedError:
        messages.info(request, f"The run is {job.status} and still sends reports. Cancel the run instead.")
    return redirect("job-detail", job_id)


@require_POST
@catch_busy_planner
def job_run_smaller(request: HttpRequest, job_id: str) -> HttpResponse:
    """Queue the job again in the layout that fits the connected hosts."""
    job = find_job_to_run(request.user, job_id)
    try:
        if not actions.requeue_smaller(job, get_username(request)):
            _refuse_requeue(request, job)
    except (NoOfferError, actions.DisprovedError) as error:
        messages.info(request, str(error))
    except SpecError as error:
        messages.info(request, "; ".join(problem.message for problem in error.problems))
    return redirect("job-detail", job_id)


@require_POST
@catch_busy_planner
def job_check(request: HttpRequest, job_id: str) -> HttpResponse:
    """Queue a reference check of the job and open its page."""
    job = find_job(request.user, job_id)
    offer = derived_jobs.describe_check_offer(request.user, job)
    if offer is None:
        raise Http404("This job has no results that a reference check can compare.")
    if not offer["may"]:
        raise PermissionDenied(f"You are not allowed to submit jobs to project {job.project}.")
    try:
        return submit_once(request, derived_jobs.build_check_spec(job), check_of=job)
    except SpecError as error:
        messages.info(request, "; ".join(problem.message for problem in error.problems))
    return redirect("job-detail", job_id)


@require_POST
def job_requeue(request: HttpRequest, job_id: str) -> HttpResponse:
    """Queue a new attempt of the job."""
    job = find_job_to_run(request.user, job_id)
    try:
        if not actions.requeue(job, get_username(request)):
            _refuse_requeue(request, job)
    except actions.DisprovedError as error:
        messages.info(request, str(error))
    return redirect("job-detail", job_id)


def _refuse_requeue(request: HttpRequest, job: Job) -> None:
    text = f"The job is {job.status}. Only jobs that failed, were lost, or were cancelled can be queued again."
    messages.info(request, text)


def make_notice(job: JobDetail, *, has_verdict: bool) -> Notice | None:
    """Return how a job ended or lost contact, or None. `js/job/header.js` updates the notice.

    Args:
        has_verdict: A verdict on the page shows failures.
    """
    last = job["history"][-1]["reason"] if job["history"] else ""
    status = job["status"]
    if status == Status.CANCELLING and job["wait_reason"]:
        return Notice("info", f"Canceling: {job['wait_reason']}")
    if status == Status.UNREACHABLE:
        return Notice("warn", f"{_capitalize(last)}. Training may continue. The page updates when contact returns.")
    reason = (job["exit"] or {}).get("reason") or last or "the run ended without a report"
    if status == Status.CANCELLED:
        text = reason if reason.startswith(status) else f"{status}: {reason}"
        return Notice("warn", _capitalize(text))
    if status in (Status.FAILED, Status.LOST) and not has_verdict:
        return Notice("bad", _describe_failure(job, status, reason))
    return None


def _describe_failure(job: JobDetail, status: str, reason: str) -> str:
    report = job["exit"] or {}
    facts = [] if report.get("rank") is None else [f"rank {report['rank']}"]
    if report.get("signal"):
        facts.append(str(report["signal"]))
    elif report.get("exit_code"):
        facts.append(f"exit code {report['exit_code']}")
    short = reason if len(reason) <= MAX_REASON_LENGTH else f"{reason[: MAX_REASON_LENGTH - 1]}…"
    return f"{_capitalize(status)}: {short}" + (f" ({', '.join(facts)})" if facts else "")


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def describe_wait(user: Any, job: Job) -> Waiting:
    """Describe the wait of a queued job."""
    seen = load_queue_snapshot()
    own = [queued for queued in seen.queue if queued.job.id == job.id]
    row = next(iter(build_rows(seen, user, own)), None)
    total = len(seen.queue)
    if row is None:
        return Waiting(place=None, total=total, reason=job.wait_reason, starts=None, starts_when="", next="")
    return Waiting(
        place=row["place"],
        total=total,
        reason=row["reason"],
        starts=row["starts"].isoformat() if row["starts"] else None,
        starts_when=row["starts_when"],
        next=_find_next_action(job, paused=seen.paused, held=row["held"], starts=row["starts"] is not None),
    )


def _find_next_action(job: Job, *, paused: bool, held: bool, starts: bool) -> str:
    if paused:
        return "Ask an administrator to resume the queue."
    if held:
        return "Ask an operator of the project to release the job."
    if is_stranded(job):
        if Host.objects.filter(device=job.device, drained=True).exists():
            return "Undrain a host, or add a host with enough slots for the job."
        smaller = "use fewer ranks" if get_kind_rules(job.spec).dp_only else "find a smaller layout"
        return f"Add a host with enough slots for the job, or {smaller}."
    if starts:
        return "You do not need to do anything. The job starts by itself."
    return "Open the queue to see the jobs ahead of this job."
