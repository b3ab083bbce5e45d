"""The page Import with the upload, and the page of each import with its timeline and heat maps."""

from __future__ import annotations

from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from jobs.api.http.errors import refused_page
from jobs.api.http.problems import details
from jobs.core.errors import NotFoundError
from jobs.core.text import is_storable, parse_json, parse_whole_number
from jobs.models import ImportedTrace
from jobs.pages.view_helpers import get_user, refuse_while_busy
from jobs.planning.planner_processes import BusyError
from jobs.planning.schemas import validate_request
from jobs.runs.traces.export import FORMATS
from jobs.runs.traces.imports import store
from jobs.runs.traces.imports.common import ImportProblemError
from jobs.runs.traces.imports.store import ImportRequest, check_import_query
from jobs.runs.traces.traced_steps import MAX_STEP, serialize_trace
from planner.facts.validation import Problem, SpecError


def _find(request: HttpRequest, key: str, *, change: bool = False) -> ImportedTrace:
    """Return an import. Unknown and invisible imports give 404. Staff can view all imports."""
    mine = ImportedTrace.objects.visible_to(request.user)
    if change:
        mine = mine.filter(owner=get_user(request))
    found = mine.select_related("owner").filter(pk=key).first() if is_storable(key) else None
    if found is None:
        raise NotFoundError("import")
    return found


def _refuse(status: int, field: str, message: str) -> JsonResponse:
    return refused_page(details(status, [Problem(field, message)]))


@require_GET
@login_required
def imports(request: HttpRequest) -> HttpResponse:
    """Show the imports of the user and the upload."""
    made = ImportedTrace.objects.filter(owner=get_user(request)).exclude(format="")
    context = {
        "imports": made,
        "limits": {
            "part_bytes": store.MAX_PART_BYTES,
            "file_bytes": store.MAX_FILE_BYTES,
            "import_bytes": store.MAX_IMPORT_BYTES,
            "files": store.MAX_FILES,
        },
        "days": store.IMPORT_LIFETIME.days,
    }
    return render(request, "import/index.html", context)


@require_POST
@login_required
def begin(request: HttpRequest) -> HttpResponse:
    """Create an import from {"name", "files": [{"name", "size"}]}."""
    try:
        name, files = check_import_query(validate_request(ImportRequest, parse_json(request.body)))
    except SpecError as error:
        first = error.problems[0]
        return _refuse(422, first.field, first.message)
    except ValueError as error:
        return _refuse(400, "request", f"The request body is not JSON: {error}")
    try:
        made = store.create_import(request.user, name, files)
    except store.TooManyImportsError as error:
        return _refuse(409, "import", str(error))
    return JsonResponse({"id": made.id, "url": reverse("import", args=[made.id])}, status=201)


@require_POST
@login_required
def part(request: HttpRequest, key: str, place: int) -> HttpResponse:
    """Store the next bytes of a file, from `?offset=`."""
    made = _find(request, key, change=True)
    if made.format or place >= len(made.files):
        return _refuse(409, "file", "The import is already complete, or did not announce this file.")
    offset = parse_whole_number(request.GET.get("offset", ""), 0, store.MAX_FILE_BYTES)
    if offset is None:
        return _refuse(400, "offset", "`offset` is not a valid number. Use a whole number.")
    if not 1 <= len(request.body) <= store.MAX_PART_BYTES:
        return _refuse(
            413,
            "request",
            f"The uploaded part has {len(request.body):,} bytes. Send 1 to {store.MAX_PART_BYTES:,} bytes.",
        )
    try:
        return JsonResponse({"size": store.append_part(made, place, offset, request.body)})
    except ImportProblemError as error:
        return _refuse(409, error.field, f"{error.file}: {error.message}")
    except store.ImportInUseError as error:
        return _refuse(409, "import", str(error))


@require_POST
@login_required
def finish(request: HttpRequest, key: str) -> HttpResponse:
    """Read the files after the upload."""
    made = _find(request, key, change=True)
    if made.format:
        return _refuse(409, "import", "The import is complete. Start a new import.")
    try:
        store.finish_import(made)
    except ImportProblemError as error:
        return _refuse(422, error.field, f"{error.file}: {error.message}")
    except store.ImportInUseError as error:
        return _refuse(409, "import", str(error))
    except BusyError as error:
        return refuse_while_busy(error)
    return JsonResponse({"url": reverse("import", args=[made.id])})


@require_http_methods(["GET", "POST"])
@login_required
def delete(request: HttpRequest, key: str) -> HttpResponse:
    """Ask for confirmation, then delete the import."""
    made = _find(request, key, change=True)
    if request.method == "GET":
        return render(request, "import/delete.html", {"made": made})
    store.delete_import(made)
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
    step = parse_whole_number(request.GET.get("step", "0"), 0, MAX_STEP)
    if step is None or step not in made.steps:
        return _refuse(404, "step", "The import does not have the requested step.")
    try:
        trace = store.read_import_step(made, step)
    except store.ImportInUseError:
        raise NotFoundError("import") from None
    chosen = request.GET.get("format")
    if chosen is None:
        return JsonResponse(serialize_trace(trace))
    if chosen not in FORMATS:
        return _refuse(400, "format", f"`format` is invalid. Use one of {', '.join(FORMATS)}.")
    writer = FORMATS[chosen]
    response = HttpResponse(writer.write(trace, f"{made.name}, step {step}"), content_type=writer.content_type)
    response["Content-Disposition"] = f'attachment; filename="{made.id}-step-{step}.{writer.suffix}"'
    return response
