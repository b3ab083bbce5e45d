"""The collective lab: its form, and a page for each primitive drawn from a run."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET, require_http_methods

from jobs.access import find_job, listed_jobs, visible_jobs
from jobs.lab import form, picture
from jobs.lab.results import Captured, newest
from jobs.lab.words import BOOKKEEPING, BY_NAME, PRIMITIVES
from jobs.missing import MissingError
from jobs.models import LIVE, Host, Job
from jobs.pages.forms import once
from planner.facts.lab import MAX_STEP_RANKS
from planner.facts.spec import Problem, SpecError

NEWEST_JOBS = 5


@require_http_methods(["GET", "POST"])
@login_required
def lab(request: HttpRequest) -> HttpResponse:
    """The primitives, and the form that runs them; filled in from an earlier lab with `?from=ID`."""
    hosts = form.hosts()
    if request.method == "GET":
        usual = form.usual(form.first(hosts))
        spec = find_job(request.user, request.GET["from"]).spec if "from" in request.GET else usual
        return _form(request, spec, [], hosts)
    spec = form.spec_from_form(request.POST)
    if spec["resources"]["host"] is None:
        return _form(request, spec, [Problem("resources.host", "choose a host that is connected")], hosts)
    try:
        return once.submitted(request, spec)
    except SpecError as error:
        return _form(request, spec, error.problems, hosts)


def _form(request: HttpRequest, spec: dict[str, Any], problems: list[Problem], hosts: list[Host]) -> HttpResponse:
    errors, other_errors = form.errors_by_field(problems)
    values = form.values_from_spec(spec)
    context = {
        "primitives": PRIMITIVES,
        "values": values,
        "options": form.options_for(values),
        "limits": form.limits(),
        "errors": errors,
        "other_errors": other_errors,
        "hosts": hosts,
        "runs": listed_jobs(request.user).filter(kind="lab")[:NEWEST_JOBS],
    }
    return render(request, "lab/index.html", context, status=422 if problems else 200)


@require_GET
@login_required
def primitive(request: HttpRequest, slug: str) -> HttpResponse:
    """One primitive: in words, in a picture of a real run, and where it is needed."""
    words = BY_NAME.get(slug.replace("-", "_"))
    if words is None or words.slug != slug:
        raise MissingError("primitive")
    measured, captured, wrong = newest(visible_jobs(request.user), words.name)
    host = form.first(form.hosts())
    context = {
        "words": words,
        "primitives": PRIMITIVES,
        "bookkeeping": BOOKKEEPING,
        "reducing": words.name in picture.REDUCING,
        "measured": measured,
        "shown": captured,
        "wrong": wrong,
        "most_drawn": MAX_STEP_RANKS,
        "running": None if captured else _running(request.user),
        "host": host,
        "usual": form.values_from_spec(form.usual(host)),
        **(_drawn(captured) if captured else {}),
    }
    return render(request, "lab/primitive.html", context)


def _drawn(shown: Captured) -> dict[str, Any]:
    film = picture.film(shown.result, shown.step)
    if shown.step.primitive == "barrier":
        return {"spans": picture.spans(shown.step), "track": picture.TRACK, "film": film}
    return {"picture": picture.tensors(shown.result, shown.step), "film": film}


def _running(user: Any) -> Job | None:
    """A lab that has not ended, and will fill the empty page."""
    return visible_jobs(user).filter(kind="lab", status__in=LIVE).first()
