"""The page Import with the upload, and the page of each import with its timeline and heat maps."""

from __future__ import annotations

from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from jobs.api.errors import make_page_problem_response
from jobs.api.problems import build_problem
from jobs.core.errors import NotFoundError
from jobs.core.received_files import MAX_PART_BYTES
from jobs.core.text import is_storable, parse_json, parse_whole_number
from jobs.models import ImportedTrace
from jobs.pages.view_helpers import get_user, refuse_while_busy
from jobs.planning.planner_processes import BusyError
from jobs.planning.schemas import validate_request
from jobs.runs.traces.export import FORMATS
from jobs.runs.traces.imports import store
from jobs.runs.traces.imports.common import ImportProblemError
from jobs.runs.traces.imports.store import ImportRequest, check_import_query
from jobs.runs.traces.trace_events import serialize_trace
from jobs.runs.traces.traced_steps import MAX_STEP
from planner.facts.validation import Problem, SpecError


def _find(request: HttpRequest, key: str, *, change: bool = False) -> ImportedTrace:
    """Return an import. Unknown and invisible imports give 404. Staff can view all imports."""
    traces = ImportedTrace.objects.visible_to(request.user)
    if change:
        traces = traces.filter(owner=get_user(request))
    trace = traces.select_related("owner").filter(pk=key).first() if is_storable(key) else None
    if trace is None:
        raise NotFoundError("import")
    return trace


def _refuse(status: int, field: str, message: str) -> JsonResponse:
    return make_page_problem_response(build_problem(status, [Problem(field, message)]))


@require_GET
def imports(request: HttpRequest) -> HttpResponse:
    """Show the imports of the user and the upload."""
    own = ImportedTrace.objects.filter(owner=get_user(request))
    unfinished = [(trace, store.get_read_fraction(trace)) for trace in own.filter(format="")]
    context = {
        "imports": own.exclude(format=""),
        "reading": [{"made": trace, "percent": int(100 * done)} for trace, done in unfinished if done is not None],
        "limits": {
            "part_bytes": MAX_PART_BYTES,
            "file_bytes": store.MAX_FILE_BYTES,
            "import_bytes": store.MAX_IMPORT_BYTES,
            "files": store.MAX_FILES,
        },
        "days": store.IMPORT_LIFETIME.days,
    }
    return render(request, "import/index.html", context)


@require_POST
def begin(request: HttpRequest) -> HttpResponse:
    """Create an import from {"name", "files": [{"name", "size"}]}."""
    try:
        name, files = check_import_query(validate_request(ImportRequest, parse_json(request.body)))
    except SpecError as error:
        return _refuse(422, error.problems[0].field, error.problems[0].message)
    except ValueError as error:
        return _refuse(400, "request", f"The request body is not JSON: {error}")
    try:
        trace = store.create_import(request.user, name, files)
    except store.TooManyImportsError as error:
        return _refuse(409, "import", str(error))
    return JsonResponse({"id": trace.id, "url": reverse("import", args=[trace.id])}, status=201)


@require_POST
def part(request: HttpRequest, key: str, place: int) -> HttpResponse:
    """Store the next bytes of a file, from `?offset=`."""
    trace = _find(request, key, change=True)
    if trace.format or place >= len(trace.files):
        return _refuse(409, "file", "The import is already complete, or did not announce this file.")
    offset = parse_whole_number(request.GET.get("offset", ""), 0, store.MAX_FILE_BYTES)
    if offset is None:
        return _refuse(400, "offset", "`offset` is not a valid number. Use a whole number.")
    if not 1 <= len(request.body) <= MAX_PART_BYTES:
        text = f"The uploaded part has {len(request.body):,} bytes. Send 1 to {MAX_PART_BYTES:,} bytes."
        return _refuse(413, "request", text)
    try:
        return JsonResponse({"size": store.append_part(trace, place, offset, request.body)})
    except ImportProblemError as error:
        return _refuse(409, error.field, f"{error.file}: {error.message}")
    except store.ImportInUseError as error:
        return _refuse(409, "import", str(error))


@require_POST
def finish(request: HttpRequest, key: str) -> HttpResponse:
    """Read the files after the upload."""
    trace = _find(request, key, change=True)
    if trace.format:
        return _refuse(409, "import", "The import is complete. Start a new import.")
    try:
        store.finish_import(trace)
    except ImportProblemError as error:
        return _refuse(422, error.field, f"{error.file}: {error.message}")
    except store.ImportInUseError as error:
        return _refuse(409, "import", str(error))
    except BusyError as error:
        return refuse_while_busy(error)
    return JsonResponse({"url": reverse("import", args=[trace.id])})


@require_GET
def progress(request: HttpRequest, key: str) -> HttpResponse:
    """Return the fraction of the uploaded bytes that the board has read, null if it reads no files of the import."""
    return JsonResponse({"read": store.get_read_fraction(_find(request, key, change=True))})


@require_http_methods(["GET", "POST"])
def delete(request: HttpRequest, key: str) -> HttpResponse:
    """Ask for confirmation, then delete the import."""
    trace = _find(request, key, change=True)
    if request.method == "GET":
        return render(request, "import/delete.html", {"made": trace})
    store.delete_import(trace)
    return redirect("imports")


@require_GET
def import_page(request: HttpRequest, key: str) -> HttpResponse:
    """Show an import."""
    trace = _find(request, key)
    if not trace.format:
        raise Http404("import is not complete")
    context = {"made": trace, "mine": trace.owner == request.user, "findings": store.get_findings(trace)}
    return render(request, "import/page.html", context)


@require_GET
def data(request: HttpRequest, key: str) -> HttpResponse:
    """Return the events of a step in columns, or as a file with `?format=perfetto|chrome`."""
    trace = _find(request, key)
    step = parse_whole_number(request.GET.get("step", "0"), 0, MAX_STEP)
    if step is None or step not in trace.steps:
        return _refuse(404, "step", "The import does not have the requested step.")
    try:
        events = store.read_import_step(trace, step)
    except store.ImportInUseError:
        raise NotFoundError("import") from None
    chosen = request.GET.get("format")
    if chosen is None:
        return JsonResponse(serialize_trace(events))
    if chosen not in FORMATS:
        return _refuse(400, "format", f"`format` is invalid. Use one of {', '.join(FORMATS)}.")
    writer = FORMATS[chosen]
    response = HttpResponse(writer.write(events, f"{trace.name}, step {step}"), content_type=writer.content_type)
    response["Content-Disposition"] = f'attachment; filename="{trace.id}-step-{step}.{writer.suffix}"'
    return response
