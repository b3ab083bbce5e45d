"""The page Collectives with its benchmark form, and a page for each collective."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET, require_http_methods

from jobs.core.access import find_job, listed_jobs, visible_jobs
from jobs.core.errors import MissingError
from jobs.models import LIVE, Host, Job
from jobs.pages import collectives_form
from jobs.pages.forms import once
from jobs.runs.collectives import picture
from jobs.runs.collectives.descriptions import BOOKKEEPING, BY_NAME, PRIMITIVES
from jobs.runs.collectives.example import SETTING, example
from jobs.runs.collectives.results import find_newest, list_hosts, pick_host
from jobs.runs.collectives.stages import Setting
from planner.facts.collectives import MAX_STEP_RANKS, LabStep
from planner.facts.validation import Problem, SpecError

NEWEST_JOBS = 5


@require_http_methods(["GET", "POST"])
@login_required
def lab(request: HttpRequest) -> HttpResponse:
    """Show all collectives and the benchmark form. `?from=ID` fills the form from a job."""
    hosts = list_hosts()
    if request.method == "GET":
        usual = collectives_form.usual(pick_host(hosts))
        spec = find_job(request.user, request.GET["from"]).spec if "from" in request.GET else usual
        return _form(request, spec, [], hosts)
    spec = collectives_form.spec_from_form(request.POST)
    if spec["resources"]["host"] is None:
        return _form(request, spec, [Problem("resources.host", "Choose a connected host.")], hosts)
    try:
        return once.submitted(request, spec)
    except SpecError as error:
        return _form(request, spec, error.problems, hosts)


def _form(request: HttpRequest, spec: dict[str, Any], problems: list[Problem], hosts: list[Host]) -> HttpResponse:
    errors, other_errors = collectives_form.errors_by_field(problems)
    values = collectives_form.values_from_spec(spec)
    context = {
        "primitives": [(words, picture.make_mini_picture(SETTING, example(words.name))) for words in PRIMITIVES],
        "values": values,
        "options": collectives_form.options_for(values),
        "limits": collectives_form.limits(),
        "defaults": collectives_form.defaults(),
        "errors": errors,
        "other_errors": other_errors,
        "hosts": hosts,
        "runs": listed_jobs(request.user).filter(kind="lab")[:NEWEST_JOBS],
    }
    return render(request, "lab/index.html", context, status=422 if problems else 200)


@require_GET
@login_required
def primitive(request: HttpRequest, slug: str) -> HttpResponse:
    """Show a collective: its picture, PyTorch call, cost, uses, and benchmark results."""
    words = BY_NAME.get(slug.replace("-", "_"))
    if words is None or words.slug != slug:
        raise MissingError("primitive")
    measured, captured, wrong = find_newest(visible_jobs(request.user), words.name)
    host = pick_host(list_hosts())
    context = {
        "words": words,
        "primitives": PRIMITIVES,
        "bookkeeping": BOOKKEEPING,
        "reducing": words.name in picture.REDUCING,
        "measured": measured,
        "shown": captured,
        "setting": captured.result if captured else SETTING,
        "wrong": wrong,
        "most_drawn": MAX_STEP_RANKS,
        "running": None if captured else _running(request.user),
        "host": host,
        "usual": collectives_form.values_from_spec(collectives_form.usual(host)),
        **(_drawn(captured.result, captured.step) if captured else _drawn(SETTING, example(words.name), timed=False)),
    }
    return render(request, "lab/primitive.html", context)


def _drawn(setting: Setting, step: LabStep, *, timed: bool = True) -> dict[str, Any]:
    film = picture.make_film(setting, step, timed=timed)
    if step.primitive == "barrier":
        return {"spans": picture.get_barrier_spans(step), "film": film}
    return {"picture": picture.make_picture(setting, step), "film": film}


def _running(user: Any) -> Job | None:
    """Return a benchmark that has not ended."""
    return visible_jobs(user).filter(kind="lab", status__in=LIVE).first()
