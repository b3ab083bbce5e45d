"""The Planner, the plans of the Planner and of the job form, and the traffic calculator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET, require_POST

from jobs.api.errors import make_page_problem_response
from jobs.api.problems import build_request_problem
from jobs.core.text import parse_json, parse_whole_number
from jobs.pages.forms import field_groups, spec_form
from jobs.pages.view_helpers import catch_busy_planner
from jobs.planning import drafts
from jobs.planning.hosts import OWN_FIELDS, list_hardware
from jobs.planning.planner_tasks import serialize_problems
from jobs.queue.start_predictions import describe_readiness
from planner.facts.presets import expand_preset
from planner.facts.validation import SpecError
from planner.traffic_growth import RANGES, Setting, compare_axes, compute_curves, parse_setting

PLANNED_STACK = "unknown"  # a plan is for software that the board does not know; jobs run Meshboard's trainer

SLIDER_LABELS = {
    "b": "batch (sequences)",
    "s": "sequence length (tokens)",
    "h": "hidden size",
    "l": "layers",
    "k": "layers per stage",
    "n": "ranks per data-parallel or tensor-parallel group",
}


@require_GET
def page(request: HttpRequest) -> HttpResponse:
    """Show the Planner: layouts side by side, and the search."""
    values = spec_form.format_values(None) | {"resources.stack": PLANNED_STACK}
    context = {
        "presets": spec_form.list_presets(),
        "schedules": spec_form.list_schedules(),
        "hardware": list_hardware(),
        "own_fields": OWN_FIELDS,
        "precisions": drafts.list_precisions(),
        "values": values,
        "options": spec_form.list_options(values),
        "stacks_of": field_groups.STACKS_BY_FIELD,
        "values_of": field_groups.CHOICES_BY_STACK,
    }
    return render(request, "jobs/planner.html", context)


@require_POST
@catch_busy_planner
def plan(request: HttpRequest) -> HttpResponse:
    """Return the plan of a draft, and the spec as the server read it.

    The draft is a JSON body, or the fields of the job form. `cluster` may name hardware to plan for. For the job form,
    the answer also has the badge next to Submit and the query string that opens the form with this draft.
    """
    if request.content_type == "application/json":
        data, broken = _parse_body(request)
        if broken:
            return broken
        return JsonResponse(
            {**drafts.plan_draft(data, request.GET.get("cluster"), user=request.user).plan, "spec": data}
        )
    data, cluster = spec_form.parse_form(request.POST), request.POST.get("cluster", "")
    found = drafts.plan_draft(data, cluster, user=request.user)
    readiness = None  # no badge for a draft that cannot be submitted
    if found.spec is not None and not found.plan["problems"] and not found.plan["not_runnable"]:
        readiness = describe_readiness(request.user, found.spec, drafts.get_estimate_to_run(found), found.hosts)
    query = spec_form.format_query(data, cluster)
    return JsonResponse({**found.plan, "spec": data, "query": query, "readiness": readiness})


@require_POST
@catch_busy_planner
def search(request: HttpRequest) -> HttpResponse:
    """Return the best layouts for a JSON body. See `jobs.planning.drafts.search_layouts`."""
    return _respond(request, drafts.search_layouts)


@require_POST
@catch_busy_planner
def explain(request: HttpRequest) -> HttpResponse:
    """Return the terms of each number of a draft, for a JSON body of `spec`, `cluster` and `stage`."""
    return _respond(request, drafts.explain_draft)


@require_POST
def import_config(request: HttpRequest) -> HttpResponse:
    """Return the model of a Hugging Face config.json, as the hidden and visible fields of a form have it."""
    try:
        found = drafts.import_model(request.body)
    except SpecError as error:
        # The status is 200 because the page shows each error below the text.
        return JsonResponse({"errors": serialize_problems(error.problems)})
    return JsonResponse({**found, "fields": spec_form.format_model(found["model"])})


@require_POST
def import_layout(request: HttpRequest) -> HttpResponse:
    """Return the layout of another tool's config file for a JSON body of `text` and `ranks`.

    `fields` has the values of the model fields if the file describes a model.
    """
    data, broken = _parse_body(request)
    if broken:
        return broken
    try:
        found = drafts.import_layout(data)
    except SpecError as error:
        # The status is 200 because the page shows each error below the text.
        return JsonResponse({"errors": serialize_problems(error.problems)})
    model = found["spec"].get("model")
    return JsonResponse({**found, "fields": spec_form.format_model(expand_preset(model)) if model else None})


def _respond(request: HttpRequest, answer: Callable[[Any], Any]) -> HttpResponse:
    data, broken = _parse_body(request)
    if broken:
        return broken
    try:
        return JsonResponse(answer(data), safe=False)
    except SpecError as error:
        # The status is 200 because the page shows each error next to its field.
        return JsonResponse({"errors": serialize_problems(error.problems)})


def _parse_body(request: HttpRequest) -> tuple[Any, HttpResponse | None]:
    try:
        return parse_json(request.body), None
    except ValueError as error:
        return None, make_page_problem_response(build_request_problem(400, f"The body is not valid JSON: {error}."))


@require_GET
def traffic_calculator(request: HttpRequest) -> HttpResponse:
    """Show the calculator for the values in the address, or for the defaults with an error if one is invalid."""
    problems = []
    try:
        setting = _parse_setting(request)
        growth = compute_curves(setting, request.GET.get("over", "b"))
    except SpecError as error:
        setting, problems = Setting(), error.problems
        growth = compute_curves(setting, "b")
    sliders = [{"name": n, "label": SLIDER_LABELS[n], "range": RANGES[n], "value": getattr(setting, n)} for n in RANGES]
    context = {"sliders": sliders, "lesson": compare_axes(setting), "curves": growth, "problems": problems}
    return render(request, "jobs/traffic_calculator.html", context)


@require_GET
def traffic_calculator_numbers(request: HttpRequest) -> HttpResponse:
    """Return the numbers of the page as JSON, for example for `?b=8&s=2048&h=4096&l=32&k=8&n=8&over=b`."""
    try:
        setting = _parse_setting(request)
        growth = compute_curves(setting, request.GET.get("over", "b"))
    except SpecError as error:
        # The status is 200 because the page shows each error next to its slider.
        return JsonResponse({"errors": serialize_problems(error.problems)})
    return JsonResponse({"lesson": compare_axes(setting), "curves": growth})


def _parse_setting(request: HttpRequest) -> Setting:
    """Read the setting of a request.

    Raises:
        SpecError: A value is not allowed.
    """
    values: dict[str, Any] = {}
    for name, text in request.GET.dict().items():
        if name != "over" and isinstance(text, str):
            number = parse_whole_number(text, 0, 10**11)
            values[name] = text if number is None else number
    return parse_setting(values)
