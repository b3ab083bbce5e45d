"""Error responses (problem documents below /api, pages otherwise), and the documentation site under /docs."""

from __future__ import annotations

import logging
import sys
from pathlib import Path, PurePosixPath

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect, render
from django.utils.http import http_date
from django.views import csrf, defaults
from django.views.decorators.http import require_safe
from django.views.static import was_modified_since

from jobs.api.errors import RETRY_LATER, build_internal_error, log_failure, make_page_problem_response
from jobs.api.problems import build_request_problem
from jobs.core.errors import DISK_FULL_MESSAGE, describe_outage, is_disk_full
from webapp.serving.request_guard import is_api_path

log = logging.getLogger(__name__)


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Respond to a host name, path, or form that Django rejects."""
    if not is_api_path(request.path):
        return defaults.bad_request(request, exception)
    return make_page_problem_response(build_request_problem(400, "The request is malformed."))


def permission_denied(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Respond to a request without permission."""
    if not is_api_path(request.path):
        return defaults.permission_denied(request, exception)
    return make_page_problem_response(build_request_problem(403, "You do not have permission for this request."))


def csrf_failure(request: HttpRequest, reason: str = "") -> HttpResponse:
    """Respond to a form without a CSRF token."""
    if not is_api_path(request.path):
        return csrf.csrf_failure(request, reason)
    return make_page_problem_response(build_request_problem(403, f"CSRF: {reason}"))


def page_not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Respond to an unknown path."""
    if not is_api_path(request.path):
        return defaults.page_not_found(request, exception)
    return make_page_problem_response(build_request_problem(404, "The path does not exist."))


def server_error(request: HttpRequest) -> HttpResponse:
    """Respond with the ID of the log entry, or with 503 if the database, Redis, or the disk fails."""
    error = sys.exception()
    words = DISK_FULL_MESSAGE if isinstance(error, OSError) and is_disk_full(error) else describe_outage(error)
    if words and not is_api_path(request.path):
        log.warning("%s Request: %s: %s", words, request.path, error)
        answer = render(request, "503.html", {"words": words}, status=503)
        answer["Retry-After"] = RETRY_LATER["Retry-After"]
        return answer
    reference = log_failure(request.path)
    if not is_api_path(request.path):
        return render(request, "500.html", {"reference": reference}, status=500)
    return make_page_problem_response(build_internal_error(reference))


CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
}
# Addresses of pages that have moved. The browser keeps the fragment: REST's problem types name /docs/errors/#...
MOVED_PAGES = {
    "api": "reference/api",
    "deploy": "howto/deploy",
    "errors": "reference/errors",
    "gpu": "reference/gpu",
    "metrics": "reference/metrics",
    "notifications": "howto/notifications",
    "people": "howto/people",
    "security": "explanation/security",
    "upgrade": "howto/upgrade",
}


@require_safe
def serve_page(request: HttpRequest, path: str = "") -> HttpResponseBase:
    """Return the page or file at `path`, or instructions if the site is not built."""
    root = Path(settings.DOCS_ROOT)
    if not (root / "index.html").is_file():
        return render(request, "docs_missing.html", status=404)
    if moved := MOVED_PAGES.get(path.removesuffix("/")):
        return redirect("docs-file", path=f"{moved}/", permanent=True)
    found = _inside(root.resolve(), path)
    if found is None:
        raise Http404
    if found.is_dir():
        if not (found / "index.html").is_file():
            raise Http404
        if path and not path.endswith("/"):
            return redirect(f"{request.path}/")
        found /= "index.html"
    if not found.is_file() or found.suffix not in CONTENT_TYPES:
        raise Http404
    changed = found.stat().st_mtime
    if not was_modified_since(request.headers.get("If-Modified-Since"), changed):
        return HttpResponse(status=304)
    return HttpResponse(
        found.read_bytes(),
        content_type=CONTENT_TYPES[found.suffix],
        headers={"Last-Modified": http_date(changed), "Cache-Control": "private, no-cache"},
    )


def _inside(root: Path, path: str) -> Path | None:
    """Return the resolved file at `path` below `root`, or None if it is missing or outside `root`."""
    parts = PurePosixPath(path).parts
    if "\0" in path or "\\" in path or ".." in parts or path.startswith("/"):
        return None
    try:
        found = root.joinpath(*parts).resolve(strict=True)
    except OSError:  # missing, or not a valid file name
        return None
    return found if found.is_relative_to(root) else None
