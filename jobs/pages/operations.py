"""Pages for operators of the board: the audit log and the Prometheus metrics."""

from __future__ import annotations

import hmac

from django.conf import settings
from django.contrib.auth.decorators import login_not_required
from django.core.paginator import Paginator
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET, require_safe
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from jobs.core.audit import EXPORT_FORMATS, get_rows_after
from jobs.core.text import parse_whole_number
from jobs.models import AuditEntry
from jobs.operations.metrics.export import format_prometheus as format_metrics
from jobs.pages.view_helpers import require_queue_staff

AUDIT_ENTRIES_PER_PAGE = 100


@require_GET
def audit(request: HttpRequest) -> HttpResponse:
    """Show the actions of users, newest first."""
    require_queue_staff(request)
    page = Paginator(AuditEntry.objects.all(), AUDIT_ENTRIES_PER_PAGE).get_page(request.GET.get("page"))
    return render(request, "queue/audit.html", {"page": page})


@require_GET
def audit_export(request: HttpRequest) -> HttpResponse:
    """Return entries after the id `after` as a file, oldest first. `format` is csv or jsonl."""
    require_queue_staff(request)
    name, after = request.GET.get("format", "csv"), parse_whole_number(request.GET.get("after", "0"), 0, 2**63 - 1)
    if name not in EXPORT_FORMATS or after is None:
        return HttpResponse(
            "Set `format` to csv or jsonl, and `after` to the id of an audit entry.",
            status=400,
            content_type="text/plain",
        )
    write, content_type = EXPORT_FORMATS[name]
    response = HttpResponse(write(get_rows_after(after)), content_type=content_type)
    response["Content-Disposition"] = f'attachment; filename="audit.{name}"'
    return response


@require_safe
@login_not_required
def metrics(request: HttpRequest) -> HttpResponse:
    """Return all metrics to a request with the metrics token. The page is missing while no token is set."""
    if not settings.METRICS_TOKEN:
        raise Http404("MESHBOARD_METRICS_TOKEN is not set.")
    header = request.headers.get("Authorization", "").encode()
    if hmac.compare_digest(header, f"Bearer {settings.METRICS_TOKEN}".encode()):
        response = HttpResponse(format_metrics(), content_type=CONTENT_TYPE_PLAIN_0_0_4)
    else:
        response = HttpResponse(
            "Send the header Authorization: Bearer TOKEN, where TOKEN is MESHBOARD_METRICS_TOKEN of the board.\n",
            status=401,
        )
        response["WWW-Authenticate"] = 'Bearer realm="metrics"'
    response["Cache-Control"] = "no-store"
    return response
