"""The form for a script of one's own."""

from __future__ import annotations

import shlex
from typing import Any, cast

from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods

from jobs.access import find_job
from jobs.queue import actions
from jobs.text import whole_number
from planner.spec import Problem, SpecError

EMPTY = {"name": "my script", "path": "", "args": "", "ranks": "2", "device": "cpu", "host": ""}
FIELDS = {"script.path": "path", "layout.dp": "ranks", "resources.host": "host", "resources.device": "device"}


@require_http_methods(["GET", "POST"])
@login_required
def script_new(request: HttpRequest) -> HttpResponse:
    """A path below the host's script root, arguments as one would type them, and how many ranks."""
    if request.method == "GET":
        source = find_job(request.user, request.GET["from"]) if "from" in request.GET else None
        return _form(request, EMPTY if source is None else _values(source.spec), [])
    values = {name: request.POST.get(name, "").strip() for name in EMPTY}
    try:
        spec = _spec(values)
    except ValueError as error:
        return _form(request, values, [Problem("args", f"cannot be split into arguments: {error}")])
    try:
        job, _ = actions.submit(cast(User, request.user), spec)
    except SpecError as error:
        return _form(request, values, error.problems)
    return redirect("job-detail", job.id)


def _spec(values: dict[str, str]) -> dict[str, Any]:
    number = whole_number(values["ranks"], 0, 999_999_999)
    ranks: Any = values["ranks"] if number is None else number
    return {
        "kind": "script",
        "name": values["name"],
        "script": {"path": values["path"], "args": shlex.split(values["args"])},
        "layout": {"dp": ranks},
        "resources": {"device": values["device"], "host": values["host"] or None},
    }


def _values(spec: dict[str, Any]) -> dict[str, str]:
    script = spec.get("script") or {"path": "", "args": []}
    return {
        "name": spec["name"],
        "path": script["path"],
        "args": shlex.join(script["args"]),
        "ranks": str(spec["layout"]["dp"]),
        "device": spec["resources"]["device"],
        "host": spec["resources"].get("host") or "",
    }


def _form(request: HttpRequest, values: dict[str, str], problems: list[Problem]) -> HttpResponse:
    beside: dict[str, str] = {}
    other = []
    for problem in problems:
        name = FIELDS.get(problem.field, problem.field.split(".")[0] if problem.field.split(".")[0] in EMPTY else "")
        if name:
            beside[name] = problem.message
        else:
            other.append(f"{problem.field}: {problem.message}")
    options = {"device": [("cpu", "CPU"), ("cuda", "GPU")]}
    context = {"values": values, "errors": beside, "other_errors": other, "options": options}
    return render(request, "jobs/script.html", context, status=422 if problems else 200)
