"""The page Collectives with its benchmark form, and a page for each collective."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.datastructures import MultiValueDict
from django.views.decorators.http import require_GET, require_http_methods

from jobs.core.access import find_job, get_listable_jobs, get_visible_jobs
from jobs.core.errors import NotFoundError
from jobs.models import LIVE, Host
from jobs.pages.forms import derived
from jobs.pages.view_helpers import submit_once
from jobs.runs.collectives import picture
from jobs.runs.collectives.descriptions import BOOKKEEPING, BY_NAME, PRIMITIVES
from jobs.runs.collectives.results import DEFAULT_RANKS, find_newest, list_hosts, pick_host
from jobs.runs.collectives.stages import EXAMPLE_SETTINGS, CollectiveSettings, make_example
from planner.facts.collectives import MAX_STEP_RANKS, LabStep
from planner.facts.resources import Resources
from planner.facts.spec import LabSpec, Layout
from planner.facts.validation import Problem, SpecError

NEWEST_JOBS = 5
FIELDS = (
    derived.read_fields("resources", Resources, only=["host"])
    | derived.read_fields("layout", Layout, only=["dp"])
    | derived.read_fields("lab", LabSpec)
)


@require_http_methods(["GET", "POST"])
def collectives(request: HttpRequest) -> HttpResponse:
    """Show all collectives and the benchmark form. `?from=ID` fills the form from a job."""
    hosts = list_hosts()
    if request.method == "GET":
        spec = find_job(request.user, request.GET["from"]).spec if "from" in request.GET else None
        return _render_form(request, spec or get_first_spec(pick_host(hosts)), [], hosts)
    spec = parse_form(request.POST)
    if spec["resources"]["host"] is None:
        return _render_form(request, spec, [Problem("resources.host", "Choose a connected host.")], hosts)
    try:
        return submit_once(request, spec)
    except SpecError as error:
        return _render_form(request, spec, error.problems, hosts)


def parse_form(form: MultiValueDict[str, str]) -> dict[str, Any]:
    """Return the unchecked spec of a form. Its host is None if no such host is connected."""
    spec = {"lab": {}, "layout": {"dp": ""}, **derived.parse_form(FIELDS, form)}
    name = form.get("resources.host", "")
    host = Host.objects.present().filter(name=name).first() if "\x00" not in name else None
    spec["resources"] = {"device": host.device if host else "cpu", "host": host.name if host else None}
    return {"kind": "lab", "name": f"collectives on {host.name}"[:100] if host else "collectives", **spec}


def get_first_spec(host: Host | None) -> dict[str, Any]:
    """Return the spec that the form shows first."""
    return {
        "layout": {"dp": min(DEFAULT_RANKS, host.slots) if host else DEFAULT_RANKS},
        "resources": {"host": host.name if host else None},
    }


def format_values(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the form values of a spec, which may be invalid. Missing fields get their default."""
    return derived.format_values(FIELDS, {"layout": {"dp": DEFAULT_RANKS}, **spec})


def _render_form(
    request: HttpRequest, spec: dict[str, Any], problems: list[Problem], hosts: list[Host]
) -> HttpResponse:
    errors, other_errors = derived.sort_problems(problems, FIELDS, {"layout": "layout.dp"})
    values = format_values(spec)
    context = {
        "primitives": [
            (words, picture.make_mini_picture(EXAMPLE_SETTINGS, make_example(words.name))) for words in PRIMITIVES
        ],
        "values": values,
        "options": derived.list_options(FIELDS, {"lab.reduce_op": {"max": "maximum"}}, values),
        "limits": derived.format_limits(FIELDS),
        "defaults": derived.format_defaults(FIELDS),
        "errors": errors,
        "other_errors": other_errors,
        "hosts": hosts,
        "runs": get_listable_jobs(request.user).filter(kind="lab")[:NEWEST_JOBS],
    }
    return render(request, "lab/index.html", context, status=422 if problems else 200)


@require_GET
def collective(request: HttpRequest, slug: str) -> HttpResponse:
    """Show a collective: its picture, PyTorch call, cost, uses, and benchmark results."""
    words = BY_NAME.get(slug.replace("-", "_"))
    if words is None or words.slug != slug:
        raise NotFoundError("primitive")
    measured, captured, wrong = find_newest(get_visible_jobs(request.user), words.name)
    host = pick_host(list_hosts())
    context = {
        "words": words,
        "primitives": PRIMITIVES,
        "bookkeeping": BOOKKEEPING,
        "reducing": words.name in picture.REDUCING,
        "measured": measured,
        "shown": captured,
        "setting": captured.result if captured else EXAMPLE_SETTINGS,
        "wrong": wrong,
        "most_drawn": MAX_STEP_RANKS,
        "running": None if captured else get_visible_jobs(request.user).filter(kind="lab", status__in=LIVE).first(),
        "host": host,
        "usual": format_values(get_first_spec(host)),
        **(
            _draw(captured.result, captured.step)
            if captured
            else _draw(EXAMPLE_SETTINGS, make_example(words.name), timed=False)
        ),
    }
    return render(request, "lab/primitive.html", context)


def _draw(setting: CollectiveSettings, step: LabStep, *, timed: bool = True) -> dict[str, Any]:
    film = picture.make_film(setting, step, timed=timed)
    if step.primitive == "barrier":
        return {"spans": picture.get_barrier_spans(step), "film": film}
    return {"picture": picture.make_picture(setting, step), "film": film}
