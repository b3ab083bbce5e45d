"""The pages of imports: a list with a place to drop files, and each import's timeline and heat maps."""

from __future__ import annotations

from typing import cast

from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import User
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from jobs.api.http.errors import LATER, of_request, refused_page
from jobs.api.http.problems import details
from jobs.missing import MissingError
from jobs.models import ImportedTrace
from jobs.planning.planners import BusyError
from jobs.planning.queries import checked
from jobs.text import parse_json, storable, whole_number
from jobs.traces import chrome, perfetto
from jobs.traces.imports import kept
from jobs.traces.imports.parts import ImportProblemError
from jobs.traces.imports.shapes import ImportQuery
from jobs.traces.imports.wanted import wanted
from jobs.traces.requests import LARGEST_STEP
from jobs.traces.shapes import tables
from planner.facts.spec import Problem, SpecError

WRITERS = {"perfetto": perfetto, "chrome": chrome}


def _find(request: HttpRequest, key: str, *, change: bool = False) -> ImportedTrace:
    """The import; 404 alike for what is not there and what is not theirs. Staff may look at others' alone."""
    mine = ImportedTrace.objects.visible_to(request.user)
    if change:
        mine = mine.filter(owner=cast(User, request.user))
    found = mine.select_related("owner").filter(pk=key).first() if storable(key) else None
    if found is None:
        raise MissingError("import")
    return found


def _refused(status: int, field: str, message: str) -> JsonResponse:
    return refused_page(details(status, [Problem(field, message)]))


@require_GET
@login_required
def imports(request: HttpRequest) -> HttpResponse:
    """What the user imported, and where to drop more."""
    made = ImportedTrace.objects.filter(owner=cast(User, request.user)).exclude(format="")
    limits = {
        "part_bytes": kept.PART_BYTES,
        "file_bytes": kept.FILE_BYTES,
        "import_bytes": kept.IMPORT_BYTES,
        "files": kept.MOST_FILES,
    }
    days = kept.LASTS.days
    return render(request, "import/index.html", {"imports": made, "limits": limits, "days": days})


@require_POST
@login_required
def begin(request: HttpRequest) -> HttpResponse:
    """{"name", "files": [{"name", "size"}]}: opens an import that files are sent to."""
    try:
        name, files = wanted(checked(ImportQuery, parse_json(request.body)))
    except SpecError as error:
        first = error.problems[0]
        return _refused(422, first.field, first.message)
    except ValueError as error:
        return _refused(400, "request", f"not JSON: {error}")
    try:
        made = kept.begin(request.user, name, files)
    except kept.TooManyError as error:
        return _refused(409, "import", str(error))
    return JsonResponse({"id": made.id, "url": reverse("import", args=[made.id])}, status=201)


@require_POST
@login_required
def part(request: HttpRequest, key: str, place: int) -> HttpResponse:
    """The next bytes of a file, from `?offset=` on."""
    made = _find(request, key, change=True)
    if made.format or place >= len(made.files):
        return _refused(409, "file", "the import does not wait for this file")
    offset = whole_number(request.GET.get("offset", ""), 0, kept.FILE_BYTES)
    if offset is None:
        return _refused(400, "offset", "must be a whole number")
    if not 1 <= len(request.body) <= kept.PART_BYTES:
        return _refused(413, "request", f"a part has 1 to {kept.PART_BYTES:,} bytes, this one {len(request.body):,}")
    try:
        return JsonResponse({"size": kept.add(made, place, offset, request.body)})
    except ImportProblemError as error:
        return _refused(409, error.field, f"{error.file}: {error.message}")
    except kept.TakenError as error:
        return _refused(409, "import", str(error))


@require_POST
@login_required
def finish(request: HttpRequest, key: str) -> HttpResponse:
    """Every file has been sent: read them."""
    made = _find(request, key, change=True)
    if made.format:
        return _refused(409, "import", "it was read before")
    try:
        kept.finish(made)
    except ImportProblemError as error:
        return _refused(422, error.field, f"{error.file}: {error.message}")
    except kept.TakenError as error:
        return _refused(409, "import", str(error))
    except BusyError as error:
        return refused_page(of_request(503, str(error)), LATER)
    return JsonResponse({"url": reverse("import", args=[made.id])})


@require_http_methods(["GET", "POST"])
@login_required
def delete(request: HttpRequest, key: str) -> HttpResponse:
    """Asks once more, then deletes."""
    made = _find(request, key, change=True)
    if request.method == "GET":
        return render(request, "import/delete.html", {"made": made})
    kept.delete(made)
    return redirect("imports")


@require_GET
@login_required
def imported(request: HttpRequest, key: str) -> HttpResponse:
    """One import, drawn."""
    made = _find(request, key)
    if not made.format:
        raise Http404("not read yet")
    return render(request, "import/page.html", {"made": made, "mine": made.owner == request.user})


@require_GET
@login_required
def data(request: HttpRequest, key: str) -> HttpResponse:
    """The events of a step, in the history's columns; `?format=perfetto|chrome` as a file."""
    made = _find(request, key)
    step = whole_number(request.GET.get("step", "0"), 0, LARGEST_STEP)
    if step is None or step not in made.steps:
        return _refused(404, "step", "the import has no such step")
    try:
        trace = kept.trace_of(made, step)
    except kept.TakenError:
        raise MissingError("import") from None
    chosen = request.GET.get("format")
    if chosen is None:
        return JsonResponse(tables(trace))
    if chosen not in WRITERS:
        return _refused(400, "format", f"is none of {', '.join(WRITERS)}")
    writer = WRITERS[chosen]
    answer = HttpResponse(writer.write(trace, f"{made.name}, step {step}"), content_type=writer.CONTENT_TYPE)
    answer["Content-Disposition"] = f'attachment; filename="{made.id}-step-{step}.{writer.SUFFIX}"'
    return answer
