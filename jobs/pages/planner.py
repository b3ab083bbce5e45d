"""The Planner page, and the plans that it and the job form ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET, require_POST

from jobs.api.http.errors import of_request, refused_page
from jobs.core.text import parse_json
from jobs.pages.busy import busy_as_503
from jobs.pages.forms import software, spec_form
from jobs.planning import answers
from jobs.planning.hardware import hardware
from jobs.planning.work import told
from jobs.queue.readiness import Readiness, describe_readiness
from planner.facts.validation import SpecError


@require_GET
@login_required
def page(request: HttpRequest) -> HttpResponse:
    """Show the Planner: layouts side by side, and the search."""
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
    return render(request, "jobs/planner.html", context)


@require_POST
@login_required
@busy_as_503
def plan(request: HttpRequest) -> HttpResponse:
    """Return the plan of a draft, and the spec as the server read it.

    The draft is a JSON body, or the fields of the job form. `cluster` may name hardware to plan for. For the job form,
    the answer also has the badge next to Submit and the query string that opens the form with this draft.
    """
    if request.content_type != "application/json":
        return JsonResponse(_plan_of_form(request))
    data, broken = _json_body(request)
    if broken:
        return broken
    return JsonResponse({**answers.plan(data, request.GET.get("cluster"), user=request.user), "spec": data})


def _plan_of_form(request: HttpRequest) -> dict[str, Any]:
    data, cluster = spec_form.spec_from_form(request.POST), request.POST.get("cluster", "")
    found = answers.planned(data, cluster, user=request.user)
    return {
        **found.plan,
        "spec": data,
        "query": spec_form.query_of(data, cluster),
        "readiness": _readiness(request, found),
    }


def _readiness(request: HttpRequest, found: answers.Planned) -> Readiness | None:
    """Return the badge next to Submit, or None for a draft that cannot be submitted."""
    if found.spec is None or found.plan["problems"] or found.plan["not_runnable"]:
        return None
    return describe_readiness(request.user, found.spec, answers.estimate_to_run(found), found.there)


@require_POST
@login_required
@busy_as_503
def search(request: HttpRequest) -> HttpResponse:
    """Return the best layouts for a JSON body, as `jobs.planning.answers.searched` does."""
    return _answered(request, answers.searched)


@require_POST
@login_required
@busy_as_503
def explain(request: HttpRequest) -> HttpResponse:
    """Return every term of a draft's figures for a JSON body of `spec`, `cluster` and `stage`."""
    return _answered(request, answers.explained)


def _answered(request: HttpRequest, answer: Callable[[Any], Any]) -> HttpResponse:
    data, broken = _json_body(request)
    if broken:
        return broken
    try:
        return JsonResponse(answer(data), safe=False)
    except SpecError as error:
        # The status is 200 because the page shows each error next to its field.
        return JsonResponse({"errors": told(error.problems)})


def _json_body(request: HttpRequest) -> tuple[Any, HttpResponse | None]:
    try:
        return parse_json(request.body), None
    except ValueError as error:
        return None, refused_page(of_request(400, f"The body is not valid JSON: {error}."))
