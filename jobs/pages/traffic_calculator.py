"""The Traffic calculator: bytes per step of each axis, and how they grow."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from jobs.core.text import whole_number
from jobs.planning.work import told
from planner.facts.validation import SpecError
from planner.traffic_growth import RANGES, Setting, check, curves, lesson

LABELS = {
    "b": "batch (sequences)",
    "s": "sequence length (tokens)",
    "h": "hidden size",
    "l": "layers",
    "k": "layers per stage",
    "n": "ranks per data-parallel or tensor-parallel group",
}


@require_GET
@login_required
def page(request: HttpRequest) -> HttpResponse:
    """Show the calculator for the values in the address, or for the defaults with an error if one is invalid."""
    problems = []
    try:
        setting = _setting_of(request)
        grown = curves(setting, request.GET.get("over", "b"))
    except SpecError as error:
        setting, problems = Setting(), error.problems
        grown = curves(setting, "b")
    sliders = [{"name": n, "label": LABELS[n], "range": RANGES[n], "value": getattr(setting, n)} for n in RANGES]
    context = {"sliders": sliders, "lesson": lesson(setting), "curves": grown, "problems": problems}
    return render(request, "jobs/traffic_calculator.html", context)


@require_GET
@login_required
def numbers(request: HttpRequest) -> HttpResponse:
    """Return the numbers of the page as JSON, for example for `?b=8&s=2048&h=4096&l=32&k=8&n=8&over=b`."""
    try:
        setting = _setting_of(request)
        grown = curves(setting, request.GET.get("over", "b"))
    except SpecError as error:
        # The status is 200 because the page shows each error next to its slider.
        return JsonResponse({"errors": told(error.problems)})
    return JsonResponse({"lesson": lesson(setting), "curves": grown})


def _setting_of(request: HttpRequest) -> Setting:
    """Read the setting of a request.

    Raises:
        SpecError: A value is not allowed.
    """
    values: dict[str, Any] = {}
    for name, text in request.GET.dict().items():
        if name != "over" and isinstance(text, str):
            number = whole_number(text, 0, 10**11)
            values[name] = text if number is None else number
    return check(values)
