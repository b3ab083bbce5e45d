"""The pages: thin views over actions."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, cast

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from jobs.access import (
    find_job,
    find_job_to_change,
    find_job_to_run,
    may_change,
    may_submit_to,
    projects_to_submit_to,
    visible_job,
)
from jobs.api.http.errors import LATER, of_request, refused_page
from jobs.kinds import elsewhere_panels, kind_of, layout_words
from jobs.missing import MissingError
from jobs.models import ELSEWHERE, TERMINAL, Job, Status, stands
from jobs.pages.forms import once, software, spec_form
from jobs.planning import answers
from jobs.planning.elastic import NoOfferError, is_stranded
from jobs.planning.hardware import hardware
from jobs.planning.planners import BusyError
from jobs.planning.work import told
from jobs.present import job_detail
from jobs.queue import actions, check
from jobs.queue.heard.silence import HeardError, give_up
from jobs.queue.tries import disproved
from jobs.telling import ends
from jobs.text import parse_json
from planner.facts.spec import Problem, SpecError
from planner.teaching.templates import TEMPLATES

P = ParamSpec("P")
AGAIN = (Status.FAILED, Status.LOST, Status.CANCELLED)
FIRST_RUN = {
    "name": "my first run",
    "layout": {"dp": 2, "tp": 2},
    "train": {"steps": 200, "eval_every": 50},
}


@require_http_methods(["GET", "POST"])
@login_required
def job_new(request: HttpRequest) -> HttpResponse:
    """The form, filled in from an earlier job (`?from=ID`, with `&resume=CHECKPOINT` to go on from one of its
    checkpoints), a template (`?template=NAME`) or JSON (`?spec=...`).

    Posted as its fields, or as the JSON of a whole spec in the one field `spec`.
    """
    if request.method == "GET":
        return _filled_form(request)
    data, broken = _posted_spec(request)
    if broken:
        return _form(request, FIRST_RUN, broken)
    cluster = request.POST.get("cluster", "")
    try:
        return once.submitted(request, data)
    except SpecError as error:
        return _form(request, data, error.problems, cluster=cluster)
    except BusyError as error:
        return _form(request, data, [Problem("layout", str(error))], cluster=cluster)


def _filled_form(request: HttpRequest) -> HttpResponse:
    asked = request.GET
    if "from" in asked:
        source = find_job(request.user, asked["from"])
        return _form(request, _resuming(source.spec, asked.get("resume")), [], source=source)
    if "template" in asked:
        template = TEMPLATES.get(asked["template"])
        if template is None:
            raise MissingError("template")
        twin = "twin" in asked
        return _form(request, template.twin if twin else template.spec, [], cluster="" if twin else template.cluster)
    if "spec" in asked:
        try:
            return _form(request, parse_json(asked["spec"]), [], cluster=asked.get("cluster", ""))
        except ValueError:
            return _form(request, FIRST_RUN, [Problem("spec", "the link holds no readable layout")])
    return _form(request, FIRST_RUN, [])


def _resuming(spec: dict[str, Any], checkpoint: str | None) -> dict[str, Any]:
    """The spec, to go on from a checkpoint where one is named."""
    return spec if checkpoint is None else {**spec, "train": {**spec.get("train", {}), "resume": checkpoint}}


def _posted_spec(request: HttpRequest) -> tuple[Any, list[Problem]]:
    if "spec" not in request.POST:
        return spec_form.spec_from_form(request.POST), []
    try:
        return parse_json(request.POST["spec"]), []
    except ValueError:
        return None, [Problem("spec", "the form arrived empty or broken; please try again")]


def _form(
    request: HttpRequest, spec: Any, problems: list[Problem], *, source: Job | None = None, cluster: str = ""
) -> HttpResponse:
    values = spec_form.values_from_spec(spec)
    errors, other_errors = spec_form.errors_by_field(problems)
    context = {
        "values": values,
        "options": spec_form.options_for(values),
        "parts": spec_form.PARTS,
        "constraints": spec_form.constraints(values),
        "limits": spec_form.limits(),
        "errors": errors,
        "other_errors": other_errors,
        "presets": spec_form.preset_cards(),
        "source": source,
        "templates": TEMPLATES,
        "hardware": hardware(),
        "cluster": cluster,
        "stacks_of": software.STACKS_OF,
        "values_of": software.VALUES_OF,
        "folds": spec_form.folds(values, errors, FIRST_RUN),
        "projects": projects_to_submit_to(request.user),
        "slurm": settings.SLURM is not None,
    }
    return render(request, "jobs/new.html", context, status=422 if problems else 200)


def _or_busy(view: Callable[P, HttpResponse]) -> Callable[P, HttpResponse]:
    """503 where too much is planned at once."""

    @wraps(view)
    def answered(*args: P.args, **named: P.kwargs) -> HttpResponse:
        try:
            return view(*args, **named)
        except BusyError as error:
            return refused_page(of_request(503, str(error)), LATER)

    return answered


@require_POST
@login_required
@_or_busy
def plan(request: HttpRequest) -> HttpResponse:
    """What a draft would cost, as `jobs.planning.answers.plan` says it, with the spec as it was understood.

    The draft is a JSON body, or the fields of the submit form. `cluster` may name hardware to plan for.
    """
    if request.content_type != "application/json":
        data: Any = spec_form.spec_from_form(request.POST)
        return JsonResponse({**answers.plan(data, request.POST.get("cluster"), user=request.user), "spec": data})
    data, broken = _json_body(request)
    if broken:
        return broken
    return JsonResponse({**answers.plan(data, request.GET.get("cluster"), user=request.user), "spec": data})


@require_POST
@login_required
@_or_busy
def plan_search(request: HttpRequest) -> HttpResponse:
    """Every layout on so many ranks, ranked: `jobs.planning.answers.searched` of a JSON body."""
    return _answered(request, answers.searched)


@require_POST
@login_required
@_or_busy
def plan_explain(request: HttpRequest) -> HttpResponse:
    """Every term of a draft's figures: a JSON body of `spec`, `cluster` and `stage`."""
    return _answered(request, answers.explained)


def _answered(request: HttpRequest, answer: Callable[[Any], Any]) -> HttpResponse:
    data, broken = _json_body(request)
    if broken:
        return broken
    try:
        return JsonResponse(answer(data), safe=False)
    except SpecError as error:
        return JsonResponse(
            {"errors": told(error.problems)}
        )  # an answer, not a failure: the page shows it beside the field


def _json_body(request: HttpRequest) -> tuple[Any, HttpResponse | None]:
    try:
        return parse_json(request.body), None
    except ValueError as error:
        return None, refused_page(of_request(400, f"not JSON: {error}"))


@require_GET
@login_required
def what_if(request: HttpRequest) -> HttpResponse:
    """Layouts side by side, and the search for better ones."""
    values = spec_form.values_from_spec(None)
    context = {
        "presets": spec_form.preset_cards(),
        "hardware": hardware(),
        "precisions": answers.precisions(),
        "values": values,
        "options": spec_form.options_for(values),
        "stacks_of": software.STACKS_OF,
        "values_of": software.VALUES_OF,
    }
    return render(request, "jobs/what_if.html", context)


@require_GET
@login_required
def job_page(request: HttpRequest, job_id: str) -> HttpResponse:
    """One job, live."""
    job = find_job(request.user, job_id)
    kind, elsewhere = kind_of(job.spec), job.engine == ELSEWHERE
    first, below = elsewhere_panels(kind) if elsewhere else (kind.first, kind.panels)
    context = {
        "job": job,
        "data": job_detail(job),
        "kind": kind,
        "subject": kind.subject(job.spec),
        "layout": layout_words(job.spec),
        "first": [f"jobs/panels/first/{name}.html" for name in first],
        "panels": [f"jobs/panels/{name}.html" for name in below],
        "terminal": job.status in TERMINAL,
        "started": job.history.filter(attempt=job.attempt, status=Status.STARTING).exists(),
        "elsewhere": elsewhere,
        "again": job.status in AGAIN and not elsewhere and not disproved(job),
        "stranded": job.status == Status.QUEUED and is_stranded(job),
        "may_change": may_change(request.user, job),
        "end_mail": ends.told(cast(User, request.user), job),
        "check_of": visible_job(request.user, job.check_of_id or ""),
        "check": check.newest(request.user, job),
        "check_offer": check.offer(request.user, job),
        "may_hear": may_submit_to(request.user, job.project),
        "may_run": may_change(request.user, job) and may_submit_to(request.user, job.project),
    }
    return render(request, "jobs/detail.html", context)


@require_POST
@login_required
def job_cancel(request: HttpRequest, job_id: str) -> HttpResponse:
    """Cancel, then back to the job."""
    job = find_job_to_change(request.user, job_id)
    if not actions.cancel(job, request.user.get_username()):
        messages.info(request, "The job had already ended.")
    return redirect("job-detail", job_id)


@require_POST
@login_required
def job_give_up(request: HttpRequest, job_id: str) -> HttpResponse:
    """Wait no longer for a silent run from elsewhere, then back to it."""
    job = find_job_to_change(request.user, job_id)
    try:
        give_up(job, request.user.get_username())
    except HeardError:
        messages.info(request, f"The run is {job.status} and not silent: it can be cancelled.")
    return redirect("job-detail", job_id)


@require_POST
@login_required
@_or_busy
def job_run_smaller(request: HttpRequest, job_id: str) -> HttpResponse:
    """Queue the job again in the layout that fits the hosts that are left."""
    job = find_job_to_run(request.user, job_id)
    try:
        if not actions.run_smaller(job, request.user.get_username()):
            messages.info(request, f"A job that {stands(job.status)} cannot be queued again.")
    except NoOfferError as error:
        messages.info(request, f"There is no other layout to run in: {error}.")
    except actions.DisprovedError as error:
        messages.info(request, f"{error}.".capitalize())
    except SpecError as error:
        messages.info(request, "; ".join(problem.message for problem in error.problems))
    return redirect("job-detail", job_id)


@require_POST
@login_required
@_or_busy
def job_check(request: HttpRequest, job_id: str) -> HttpResponse:
    """Queue a short copy of the job that one process computes too, and on to it."""
    job = find_job(request.user, job_id)
    offered = check.offer(request.user, job)
    if offered is None:
        raise Http404("there is nothing to check")
    if not offered["may"]:
        raise PermissionDenied(f"you may not submit to project {job.project}")
    try:
        return once.submitted(request, check.spec_of(job), check_of=job)
    except SpecError as error:
        messages.info(request, "; ".join(problem.message for problem in error.problems))
    return redirect("job-detail", job_id)


@require_POST
@login_required
def job_requeue(request: HttpRequest, job_id: str) -> HttpResponse:
    """Queue the same job again as a new attempt."""
    job = find_job_to_run(request.user, job_id)
    try:
        if not actions.requeue(job, request.user.get_username()):
            messages.info(request, f"A job that {stands(job.status)} cannot be queued again.")
    except actions.DisprovedError as error:
        messages.info(request, f"{error}.".capitalize())
    return redirect("job-detail", job_id)
