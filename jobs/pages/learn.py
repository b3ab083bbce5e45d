"""The teaching page: what each axis costs, and how that grows."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from jobs.planning.work import told
from jobs.text import whole_number
from planner.facts.spec import SpecError
from planner.teaching.growth import RANGES, Setting, check, curves, lesson

NAMES = {
    "b": "sequences in the batch",
    "s": "tokens a sequence",
    "h": "hidden size",
    "l": "layers",
    "k": "layers a stage",
    "n": "ranks of a dp or tp group",
}


@require_GET
@login_required
def learn(request: HttpRequest) -> HttpResponse:
    """The page for the setting in the address; a senseless one shows the usual setting and says why."""
    problems = []
    try:
        setting = _asked(request)
    except SpecError as error:
        setting, problems = Setting(), error.problems
    sliders = [{"name": n, "words": NAMES[n], "range": RANGES[n], "value": getattr(setting, n)} for n in RANGES]
    context = {"sliders": sliders, "lesson": lesson(setting), "curves": curves(setting, "b"), "problems": problems}
    return render(request, "learn.html", context)


@require_GET
@login_required
def numbers(request: HttpRequest) -> HttpResponse:
    """The same as JSON: `?b=8&s=2048&h=4096&l=32&k=8&n=8&over=b`."""
    try:
        setting = _asked(request)
        grown = curves(setting, request.GET.get("over", "b"))
    except SpecError as error:
        return JsonResponse(
            {"errors": told(error.problems)}
        )  # an answer, not a failure: the page shows it beside the slider
    return JsonResponse({"lesson": lesson(setting), "curves": grown})


def _asked(request: HttpRequest) -> Setting:
    given: dict[str, Any] = {}
    for name, text in request.GET.dict().items():
        if name != "over" and isinstance(text, str):
            number = whole_number(text, 0, 10**11)
            given[name] = text if number is None else number
    return check(given)
