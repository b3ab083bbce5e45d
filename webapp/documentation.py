"""Serve the documentation site, which `make docs` builds, under /docs."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect, render
from django.utils.http import http_date
from django.views.decorators.http import require_safe
from django.views.static import was_modified_since

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
