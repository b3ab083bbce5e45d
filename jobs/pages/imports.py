"""The page Import with the upload, and the page of each import with its timeline and heat maps."""

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
from jobs.core.errors import MissingError
from jobs.core.text import parse_json, storable, whole_number
from jobs.models import ImportedTrace
from jobs.planning.planners import BusyError
from jobs.planning.queries import checked
from jobs.runs.traces import chrome, perfetto
from jobs.runs.traces.imports import kept
from jobs.runs.traces.imports.parts import ImportProblemError
from jobs.runs.traces.imports.shapes import ImportQuery
from jobs.runs.traces.imports.wanted import wanted
from jobs.runs.traces.requests import LARGEST_STEP
from jobs.runs.traces.shapes import tables
from planner.facts.validation import Problem, SpecError

WRITERS = {"perfetto": perfetto, "chrome": chrome}


def _find(request: HttpRequest, key: str, *, change: bool = False) -> ImportedTrace:
    """Return an import. Unknown and invisible imports give 404. Staff can view all imports."""
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
    """Show the imports of the user and the upload."""
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
    """Create an import from {"name", "files": [{"name", "size"}]}."""
    try:
        name, files = wanted(checked(ImportQuery, parse_json(request.body)))
    except SpecError as error:
        first = error.problems[0]
        return _refused(422, first.field, first.message)
    except ValueError as error:
        return _refused(400, "request", f"The request body is not JSON: {error}")
    try:
        made = kept.begin(request.user, name, files)
    except kept.TooManyError as error:
        return _refused(409, "import", str(error))
    return JsonResponse({"id": made.id, "url": reverse("import", args=[made.id])}, status=201)


@require_POST
@login_required
def part(request: HttpRequest, key: str, place: int) -> HttpResponse:
    """Store the next bytes of a file, from `?offset=`."""
    made = _find(request, key, change=True)
    if made.format or place >= len(made.files):
        return _refused(409, "file", "The import is already complete, or did not announce this file.")
    offset = whole_number(request.GET.get("offset", ""), 0, kept.FILE_BYTES)
    if offset is None:
        return _refused(400, "offset", "`offset` is not a valid number. Use a whole number.")
    if not 1 <= len(request.body) <= kept.PART_BYTES:
        return _refused(
            413, "request", f"The uploaded part has {len(request.body):,} bytes. Send 1 to {kept.PART_BYTES:,} bytes."
        )
    try:
        return JsonResponse({"size": kept.add(made, place, offset, request.body)})
    except ImportProblemError as error:
        return _refused(409, error.field, f"{error.file}: {error.message}")
    except kept.TakenError as error:
        return _refused(409, "import", str(error))


@require_POST
@login_required
def finish(request: HttpRequest, key: str) -> HttpResponse:
    """Read the files after the upload."""
    made = _find(request, key, change=True)
    if made.format:
        return _refused(409, "import", "The import is complete. Start a new import.")
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
    """Ask for confirmation, then delete the import."""
    made = _find(request, key, change=True)
    if request.method == "GET":
        return render(request, "import/delete.html", {"made": made})
    kept.delete(made)
    return redirect("imports")


@require_GET
@login_required
def imported(request: HttpRequest, key: str) -> HttpResponse:
    """Show an import."""
    made = _find(request, key)
    if not made.format:
        raise Http404("import is not complete")
    return render(request, "import/page.html", {"made": made, "mine": made.owner == request.user})


@require_GET
@login_required
def data(request: HttpRequest, key: str) -> HttpResponse:
    """Return the events of a step in columns, or as a file with `?format=perfetto|chrome`."""
    made = _find(request, key)
    step = whole_number(request.GET.get("step", "0"), 0, LARGEST_STEP)
    if step is None or step not in made.steps:
        return _refused(404, "step", "The import does not have the requested step.")
    try:
        trace = kept.trace_of(made, step)
    except kept.TakenError:
        raise MissingError("import") from None
    chosen = request.GET.get("format")
    if chosen is None:
        return JsonResponse(tables(trace))
    if chosen not in WRITERS:
        return _refused(400, "format", f"`format` is invalid. Use one of {', '.join(WRITERS)}.")
    writer = WRITERS[chosen]
    answer = HttpResponse(writer.write(trace, f"{made.name}, step {step}"), content_type=writer.CONTENT_TYPE)
    answer["Content-Disposition"] = f'attachment; filename="{made.id}-step-{step}.{writer.SUFFIX}"'
    return answer
