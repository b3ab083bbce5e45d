"""The job form."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_http_methods

from jobs.core.access import find_job, projects_to_submit_to
from jobs.core.errors import MissingError
from jobs.core.text import parse_json
from jobs.models import Job
from jobs.pages.forms import once, spec_form
from jobs.planning.fit import UnfitError
from jobs.planning.hardware import hardware
from jobs.planning.planners import BusyError
from planner.facts.presets import TEMPLATES
from planner.facts.validation import Problem, SpecError
from planner.hardware.stacks import STACKS

FIRST_RUN = {
    "name": "my first run",
    "layout": {"dp": 2, "tp": 2},
    "train": {"steps": 200, "eval_every": 50},
}


PREFILLED = ("train.steps",)  # the form starts with another value, so the page does not name the default


@require_http_methods(["GET", "POST"])
@login_required
def job_new(request: HttpRequest) -> HttpResponse:
    """Show the form, or submit it.

    `?from=ID` fills it in from a job, and `&resume=CHECKPOINT` resumes from one of its checkpoints. `?template=NAME`
    fills in a published layout, and `?spec=JSON` any spec. A POST has the fields of the form, or one field `spec` with
    the JSON of a whole spec.
    """
    if request.method == "GET":
        return _filled_form(request)
    data, broken = _posted_spec(request)
    if broken:
        return _form(request, FIRST_RUN, broken)
    cluster = request.POST.get("cluster", "")
    try:
        return once.submitted(request, data)
    except UnfitError as error:
        return _form(request, data, error.problems, cluster=cluster, is_unfit=True)
    except SpecError as error:
        return _form(request, data, error.problems, cluster=cluster)
    except BusyError as error:
        return _form(request, data, [Problem("layout", str(error))], cluster=cluster)


def _filled_form(request: HttpRequest) -> HttpResponse:
    query = request.GET
    if "from" in query:
        source = find_job(request.user, query["from"])
        return _form(request, _resuming(source.spec, query.get("resume")), [], source=source)
    if "template" in query:
        template = TEMPLATES.get(query["template"])
        if template is None:
            raise MissingError("template")
        twin = "twin" in query
        return _form(request, template.twin if twin else template.spec, [], cluster="" if twin else template.cluster)
    if "spec" in query:
        try:
            return _form(request, parse_json(query["spec"]), [], cluster=query.get("cluster", ""))
        except ValueError:
            message = "The `spec` in this link is not valid JSON. Fill in the form, or copy the whole link again."
            return _form(request, FIRST_RUN, [Problem("spec", message)])
    return _form(request, FIRST_RUN, [])


def _resuming(spec: dict[str, Any], checkpoint: str | None) -> dict[str, Any]:
    """Return the spec, with a checkpoint to resume from if one is named."""
    return spec if checkpoint is None else {**spec, "train": {**spec.get("train", {}), "resume": checkpoint}}


def _posted_spec(request: HttpRequest) -> tuple[Any, list[Problem]]:
    if "spec" not in request.POST:
        return spec_form.spec_from_form(request.POST), []
    try:
        return parse_json(request.POST["spec"]), []
    except ValueError:
        return None, [Problem("spec", "The form arrived empty or incomplete. Submit it again.")]


def _form(
    request: HttpRequest,
    spec: Any,
    problems: list[Problem],
    *,
    source: Job | None = None,
    cluster: str = "",
    is_unfit: bool = False,
) -> HttpResponse:
    values = spec_form.values_from_spec(spec)
    errors, other_errors = spec_form.errors_by_field(problems)
    stack = STACKS.get(values["resources.stack"])
    unavailable, reasons = spec_form.unavailable(spec)
    context = {
        "values": values,
        "options": spec_form.options_for(values),
        "parts": spec_form.HIDDEN,
        "constraints": spec_form.constraints(values),
        "limits": spec_form.limits(),
        "defaults": {name: text for name, text in spec_form.defaults().items() if name not in PREFILLED},
        "unavailable": unavailable,
        "reasons": reasons,
        "errors": errors,
        "other_errors": other_errors,
        "presets": spec_form.preset_cards(),
        "source": source,
        "templates": TEMPLATES,
        "hardware": hardware(),
        "cluster": cluster,
        "other_stack": stack.title if stack and values["resources.stack"] != "ours" else "",
        "folds": spec_form.folds(values, errors, FIRST_RUN),
        "projects": projects_to_submit_to(request.user),
        "slurm": settings.SLURM is not None,
        "is_unfit": is_unfit,
    }
    return render(request, "jobs/new.html", context, status=422 if problems else 200)
