"""Show the list of jobs with filters and columns, and act on several jobs."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlencode

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.paginator import Paginator
from django.db.models import Count
from django.forms import Select
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_GET, require_POST

from jobs.core.access import changeable_jobs, listed_jobs, sees_others, visible_projects
from jobs.core.job_filters import JobFilter
from jobs.core.kinds import kind_of, layout_words
from jobs.models import DEFAULT_PROJECT, LIVE, TERMINAL, Job, Status
from jobs.pages.jobs.measures import NO_RUN, NOT_MEASURED, read_measured, read_runs, show_measures
from jobs.pages.jobs.progress import newest_of
from jobs.pages.jobs.sample import build_sample
from jobs.planning.queries import checked
from jobs.queue.bulk_actions import UNDONE_BY, Several, apply
from planner.facts.validation import Problem, SpecError

PAGE_SIZE = 50
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
USUAL = tuple(name for name in COLUMNS if name not in OPTIONAL)
MOST_CHOICES = 20  # projects in a select box; more projects are a text field with suggestions
BY_THEMSELVES = {"status", "kind", "whose"}  # filters that the template shows outside the common fields
DONE = {
    "cancel": "asked to stop",
    "archive": "archived",
    "restore": "restored",
    "tag": "tagged",
    "untag": "untagged",
}


@require_GET
@login_required
def job_list(request: HttpRequest) -> HttpResponse:
    """Show a page of the jobs that the user can see, with the filters of `jobs.core.job_filters`.

    `?part=rows` returns only the table. Each parameter `col` adds a column.
    """
    filters = JobFilter(request.GET, user=request.user, queryset=listed_jobs(request.user))
    counts = _counts(filters)
    page = _CountedPages(filters, counts).get_page(request.GET.get("page"))
    others = sees_others(request.user)
    columns = columns_of(request, others)
    context = {
        "rows": list_rows(list(page), columns),
        "page": page,
        "counts": [(status, counts[status]) for status in Status.values if status in counts],
        "total": sum(counts.values()),
        "active": sum(counts.get(status, 0) for status in LIVE),
        "active_asked": filters.form.cleaned_data.get("status") == list(LIVE),
        "asked": filters.form.cleaned_data,
        "narrows": filters.narrows,
        "columns": columns,
        "sample": None if counts or filters.narrows else build_sample(),
    }
    if request.GET.get("part") == "rows":
        return render(request, "jobs/rows.html", context)
    hidden = BY_THEMSELVES if others else BY_THEMSELVES | {"owner"}
    projects = _projects(filters, request.user)
    if len(projects) < 2:
        hidden = hidden | {"project"}
    few = len(projects) <= MOST_CHOICES
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


def _projects(filters: JobFilter, user: Any) -> list[str]:
    """Return the projects of the user, and the requested project, where a former member may still own jobs."""
    asked = filters.form.cleaned_data.get("project")
    return sorted(
        {DEFAULT_PROJECT, *visible_projects(user).values_list("name", flat=True), *([asked] if asked else [])}
    )


def columns_of(request: HttpRequest, others: bool) -> list[str]:
    """Return the requested columns in the order of COLUMNS, or the usual columns.

    Users who see only their own jobs get no owner column.
    """
    asked = [name for name in request.GET.getlist("col") if name in COLUMNS] or list(USUAL)
    return [name for name in COLUMNS if name in asked and (others or name != "owner")]


def _counts(filters: JobFilter) -> dict[str, int]:
    """Count jobs by status, without the filter by status."""
    return dict(filters.of_any_status.order_by().values_list("status").annotate(Count("id")))


class _CountedPages(Paginator):  # type: ignore[type-arg]  # Django 5.2's cannot be subscripted
    """Pages of jobs whose number is known, so that no query counts the jobs again."""

    def __init__(self, filters: JobFilter, counts: dict[str, int]) -> None:
        super().__init__(filters.qs.prefetch_related("tags"), PAGE_SIZE)
        asked = filters.form.cleaned_data.get("status") or counts
        self._count = sum(counts.get(status, 0) for status in asked)

    @property
    def count(self) -> int:
        return self._count


def list_rows(jobs: list[Job], columns: list[str]) -> list[dict[str, Any]]:
    """Return the rows of the table. `step` is None if it is not known, `steps` if the job has no number of steps."""
    live = newest_of(jobs)
    measured, runs = read_measured(jobs, columns), read_runs(jobs, columns)
    return [
        {
            "id": job.id,
            "name": job.name,
            "owner": job.owner.get_username(),
            "kind": kind_of(job.spec).title,
            "subject": kind_of(job.spec).subject(job.spec),
            "layout": layout_words(job.spec),
            "status": job.status,
            "wait_reason": job.wait_reason,
            "step": live[job.id].step if job.id in live else measured.get(job.id, NOT_MEASURED).steps,
            "steps": kind_of(job.spec).steps_asked(job.spec),
            "created": job.created,
            "project": job.project,
            "priority": job.priority,
            "slots": job.num_slots,
            "attempt": job.attempt,
            "archived": job.archived,
            "tags": [tag.name for tag in job.tags.all()],
            **show_measures(job, measured.get(job.id, NOT_MEASURED), runs.get(job.id, NO_RUN), live.get(job.id)),
        }
        for job in jobs
    ]


@require_POST
@login_required
def jobs_act(request: HttpRequest) -> HttpResponse:
    """Act on the selected jobs, then return to the list. A cancel asks for confirmation first."""
    back = _list_url(request.POST.get("back", ""))
    ids, action = request.POST.getlist("job"), request.POST.get("action", "")
    if action == "compare":
        return redirect(f"{reverse('compare')}?{urlencode({'jobs': ','.join(ids)})}")
    tags = [name.strip() for name in request.POST.get("tags", "").split(",")]
    try:
        asked = _checked({"action": action, "jobs": ids, "tags": [name for name in tags if name]})
        if asked.action == "cancel" and "confirmed" not in request.POST:
            return _confirm(request, asked)
        done = apply(asked, request.user)
    except SpecError as error:
        messages.error(request, _refusal(error))
        return redirect(back)
    told = f"{len(done)} of {len(asked.jobs)} jobs {DONE[asked.action]}."
    if done and asked.action in UNDONE_BY:
        undo = {"action": UNDONE_BY[asked.action], "jobs": done, "tags": ", ".join(asked.tags)}
        request.session["undo"] = {**undo, "told": told}
    else:
        messages.success(request, told)
    return redirect(back)


def _checked(data: dict[str, Any]) -> Several:
    asked = checked(Several, data)
    if asked.action in ("tag", "untag") and not asked.tags:
        raise SpecError([Problem("tags", "`tags` is empty. Enter a tag in the field next to the button.")])
    return asked


def _confirm(request: HttpRequest, asked: Several) -> HttpResponse:
    live = changeable_jobs(request.user).filter(id__in=asked.jobs).exclude(status__in=TERMINAL)
    named = live.only("id", "name", "owner__username", "status")
    return render(request, "jobs/confirm.html", {"jobs": named, "back": request.POST.get("back", "")})


def _list_url(query: str) -> str:
    """Return the address of the list with its parameters."""
    asked = QueryDict(query[:2000], mutable=True)
    asked.pop("part", None)
    return f"{reverse('job-list')}?{asked.urlencode()}" if asked else reverse("job-list")


def _refusal(error: SpecError) -> str:
    if any(problem.field.startswith("jobs") for problem in error.problems):
        return "Select jobs first."
    return " ".join(problem.sentence for problem in error.problems)
