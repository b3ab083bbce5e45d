"""The form that runs your own training script."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_http_methods

from jobs.core.access import find_job, projects_to_submit_to
from jobs.pages.forms import derived, engines, once, turn_form
from planner.facts.resources import Resources, SlurmSpec
from planner.facts.spec import JobSpec, Layout, ScriptSpec
from planner.facts.validation import Problem, SpecError

EMPTY: dict[str, Any] = {"name": "my script", "layout": {"dp": 2}}
FIELDS = (
    derived.fields_of("", JobSpec, only=["name"])
    | derived.fields_of("script", ScriptSpec)
    | derived.fields_of("layout", Layout, only=["dp"])
    | derived.fields_of("resources", Resources, only=["device", "host", "engine"])
    | derived.fields_of("resources.slurm", SlurmSpec)
    | turn_form.FIELDS
)
_WORDS = {"resources.device": {"cpu": "CPU", "cuda": "GPU"}, "resources.engine": engines.WORDS, **turn_form.WORDS}


@require_http_methods(["GET", "POST"])
@login_required
def script_new(request: HttpRequest) -> HttpResponse:
    """Show the form, or submit it. `?from=ID` fills it in from a job."""
    if request.method == "GET":
        source = find_job(request.user, request.GET["from"]) if "from" in request.GET else None
        return _form(request, derived.values_of(FIELDS, EMPTY if source is None else source.spec), [])
    try:
        spec = {"kind": "script", **engines.without_others(derived.spec_from(FIELDS, request.POST))}
        return once.submitted(request, spec)
    except SpecError as error:
        return _form(request, {name: request.POST.get(name, "") for name in FIELDS}, error.problems)


def _form(request: HttpRequest, values: dict[str, Any], problems: list[Problem]) -> HttpResponse:
    beside, other = derived.errors_beside(problems, FIELDS, {"layout": "layout.dp", "script": "script.path"})
    context = {
        "values": values,
        "errors": beside,
        "other_errors": other,
        "options": derived.options_of(FIELDS, _WORDS, values),
        "limits": derived.limits_of(FIELDS),
        "defaults": derived.defaults_of(FIELDS),
        "projects": projects_to_submit_to(request.user),
        "slurm": settings.SLURM is not None,
        "turn": turn_form.has_changes(values),
    }
    return render(request, "jobs/script.html", context, status=422 if problems else 200)
