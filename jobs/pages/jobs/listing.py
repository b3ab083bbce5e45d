"""Show the list of jobs with filters and columns, and act on several jobs."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from django.contrib import messages
from django.core.paginator import Paginator
from django.db.models import Count
from django.forms import Select
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_GET, require_POST

from jobs.core.access import can_see_jobs_of_others, get_changeable_jobs, get_listable_jobs, get_visible_projects
from jobs.core.filters import JobFilter
from jobs.core.kinds import format_layout, get_kind
from jobs.models import DEFAULT_PROJECT, LIVE, TERMINAL, Host, Job, Status
from jobs.pages.jobs.live_figures import get_progress
from jobs.pages.jobs.measures import NO_CHANGES, NOT_MEASURED, format_measures, read_measured, read_runs
from jobs.pages.view_helpers import join_job_sentences
from jobs.planning.schemas import validate_request
from jobs.queue.bulk_actions import INVERSE_ACTIONS, JobsActionRequest, apply_action
from planner.facts.validation import Problem, SpecError

JOBS_PER_PAGE = 50
COLUMNS = {
    "status": "Status",
    "workload": "Workload",
    "layout": "Layout",
    "steps": "Steps",
    "duration": "Duration",
    "step_time": "Step time",
    "loss": "Loss",
    "reason": "Reason",
    "owner": "Owner",
    "created": "Created",
    "ended": "Ended",
    "speed": "Tokens/s",
    "project": "Project",
    "priority": "Priority",
    "slots": "Slots",
    "attempt": "Attempt",
}
OPTIONAL = {"ended", "speed", "project", "priority", "slots", "attempt"}
DEFAULT_COLUMNS = tuple(name for name in COLUMNS if name not in OPTIONAL)
MAX_PROJECT_CHOICES = 20  # in a select box, more projects are a text field with suggestions
SEPARATE_FILTERS = {"status", "kind", "whose"}  # filters that the template shows outside the common fields
DONE = {
    "cancel": "asked to stop",
    "archive": "archived",
    "restore": "restored",
    "tag": "tagged",
    "untag": "untagged",
}

SAMPLE_SLOTS = 4  # slots of the layout of the tutorial


class Sample(NamedTuple):
    """The whole spec of the sample run, and its layout in words."""

    spec: dict[str, Any]
    layout: str


@require_GET
def job_list(request: HttpRequest) -> HttpResponse:
    """Show a page of the jobs that the user can see, with the filters of `jobs.core.filters`.

    `?part=rows` returns only the table. Each parameter `col` adds a column.
    """
    filters = JobFilter(request.GET, user=request.user, queryset=get_listable_jobs(request.user))
    counts = dict(filters.with_any_status.order_by().values_list("status").annotate(Count("id")))
    page = _CountedPages(filters, counts).get_page(request.GET.get("page"))
    others = can_see_jobs_of_others(request.user)
    # Users who see only their own jobs get no owner column.
    chosen = [name for name in request.GET.getlist("col") if name in COLUMNS] or DEFAULT_COLUMNS
    columns = [name for name in COLUMNS if name in chosen and (others or name != "owner")]
    context = {
        "rows": list_rows(list(page), columns),
        "page": page,
        "counts": [(status, counts[status]) for status in Status.values if status in counts],
        "total": sum(counts.values()),
        "active": sum(counts.get(status, 0) for status in LIVE),
        "only_active": filters.form.cleaned_data.get("status") == list(LIVE),
        "query": filters.form.cleaned_data,
        "narrows": filters.is_narrowed,
        "columns": columns,
        "sample": None if counts or filters.is_narrowed else build_sample(),
    }
    if request.GET.get("part") == "rows":
        return render(request, "jobs/rows.html", context)
    hidden = SEPARATE_FILTERS if others else SEPARATE_FILTERS | {"owner"}
    # A former member may still own jobs in the requested project.
    known = {DEFAULT_PROJECT, *get_visible_projects(request.user).values_list("name", flat=True)}
    projects = sorted(known | {filters.form.cleaned_data.get("project") or DEFAULT_PROJECT})
    if len(projects) < 2:
        hidden = hidden | {"project"}
    few = len(projects) <= MAX_PROJECT_CHOICES
    if few:
        choices = [("", "any"), *((name, name) for name in projects)]
        filters.form.fields["project"].widget = Select({"autocomplete": "off"}, choices)
    else:
        filters.form.fields["project"].widget.attrs["list"] = "projects"
    context |= {
        "sees_others": others,
        "filters": [field for field in filters.form if field.name not in hidden],
        "problems": [error for name in sorted(hidden) for error in filters.form.errors.get(name, ())],
        "projects": [] if few else projects,
        "all_columns": COLUMNS,
        "several": [(filters.form[name], filters.form.cleaned_data.get(name, [])) for name in ("kind", "status")],
        "undo": request.session.pop("undo", None),
        "sample_json": json.dumps(context["sample"].spec) if context["sample"] else "",
    }
    return render(request, "jobs/list.html", context)


class _CountedPages(Paginator):  # type: ignore[type-arg]  # Django 5.2's cannot be subscripted
    """Pages of jobs whose number is known, so that no query counts the jobs again."""

    def __init__(self, filters: JobFilter, counts: dict[str, int]) -> None:
        super().__init__(filters.qs.prefetch_related("tags"), JOBS_PER_PAGE)
        statuses = filters.form.cleaned_data.get("status") or counts
        self._count = sum(counts.get(status, 0) for status in statuses)

    @property
    def count(self) -> int:
        return self._count


def list_rows(jobs: list[Job], columns: list[str]) -> list[dict[str, Any]]:
    """Return the rows of the table. `step` is None if it is not known, `steps` if the job has no number of steps."""
    live = get_progress(jobs)
    measured, runs = read_measured(jobs, columns), read_runs(jobs, columns)
    return [
        {
            "id": job.id,
            "name": job.name,
            "owner": job.owner.get_username(),
            "kind": get_kind(job.spec).title,
            "subject": get_kind(job.spec).subject(job.spec),
            "layout": format_layout(job.spec),
            "status": job.status,
            "wait_reason": job.wait_reason,
            "step": live[job.id].step if job.id in live else measured.get(job.id, NOT_MEASURED).steps,
            "steps": get_kind(job.spec).get_requested_steps(job.spec),
            "created": job.created,
            "project": job.project,
            "priority": job.priority,
            "slots": job.num_slots,
            "attempt": job.attempt,
            "archived": job.archived,
            "tags": [tag.name for tag in job.tags.all()],
            **format_measures(job, measured.get(job.id, NOT_MEASURED), runs.get(job.id, NO_CHANGES), live.get(job.id)),
        }
        for job in jobs
    ]


@require_POST
def jobs_act(request: HttpRequest) -> HttpResponse:
    """Act on the selected jobs, then return to the list. A cancel asks for confirmation first."""
    parameters = QueryDict(request.POST.get("back", "")[:2000], mutable=True)
    parameters.pop("part", None)
    back = reverse("job-list", query=parameters or None)
    ids, action = request.POST.getlist("job"), request.POST.get("action", "")
    if action == "compare":
        return redirect(reverse("compare", query={"jobs": ",".join(ids)}))
    tags = [name.strip() for name in request.POST.get("tags", "").split(",")]
    try:
        bulk = _check_bulk({"action": action, "jobs": ids, "tags": [name for name in tags if name]})
        if bulk.action == "cancel" and "confirmed" not in request.POST:
            live = get_changeable_jobs(request.user).filter(id__in=bulk.jobs).exclude(status__in=TERMINAL)
            named = live.only("id", "name", "owner__username", "status")
            return render(request, "jobs/confirm.html", {"jobs": named, "back": request.POST.get("back", "")})
        done = apply_action(bulk, request.user)
    except SpecError as error:
        messages.error(request, join_job_sentences(error))
        return redirect(back)
    message = f"{len(done)} of {len(bulk.jobs)} jobs {DONE[bulk.action]}."
    if done and bulk.action in INVERSE_ACTIONS:
        undo = {"action": INVERSE_ACTIONS[bulk.action], "jobs": done, "tags": ", ".join(bulk.tags)}
        request.session["undo"] = {**undo, "message": message}
    else:
        messages.success(request, message)
    return redirect(back)


def _check_bulk(data: dict[str, Any]) -> JobsActionRequest:
    bulk = validate_request(JobsActionRequest, data)
    if bulk.action in ("tag", "untag") and not bulk.tags:
        raise SpecError([Problem("tags", "`tags` is empty. Enter a tag in the field next to the button.")])
    return bulk


def build_sample() -> Sample:
    """Return the run of the tutorial, on two slots if the largest connected CPU host has fewer than four.

    Without a CPU host the run gets the full layout and waits for a host.
    """
    slots = Host.objects.accepting_jobs().filter(device="cpu").values_list("slots", flat=True)
    fits = max(slots, default=SAMPLE_SLOTS) >= SAMPLE_SLOTS
    spec = {
        "name": "sample run",
        "model": {"preset": "gpt-tiny"},
        "layout": {"dp": 2, "tp": 2, "zero": 1} if fits else {"dp": 2, "zero": 1},
        "train": {"steps": 80, "global_batch": 16, "micro_batches": 2, "seq_len": 128},
        "resources": {"device": "cpu"},
    }
    return Sample(spec, "dp 2, tp 2, and ZeRO stage 1" if fits else "dp 2 and ZeRO stage 1")
