"""`/metrics`, for who brings its token."""

from __future__ import annotations

import hmac

from django.conf import settings
from django.contrib.auth.decorators import login_not_required
from django.http import Http404, HttpRequest, HttpResponse
from django.views.decorators.http import require_safe
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from jobs.operations.metrics.exposition import text


@require_safe
@login_not_required
def metrics(request: HttpRequest) -> HttpResponse:
    """All figures; 404 where the board has no token for them, 401 without it or with another."""
    if not settings.METRICS_TOKEN:
        raise Http404("MESHBOARD_METRICS_TOKEN is not set.")
    given = request.headers.get("Authorization", "").encode()
    if not hmac.compare_digest(given, f"Bearer {settings.METRICS_TOKEN}".encode()):
        answer = HttpResponse(
            "Send the header Authorization: Bearer TOKEN, where TOKEN is MESHBOARD_METRICS_TOKEN of the board.\n",
            status=401,
        )
        answer["WWW-Authenticate"] = 'Bearer realm="metrics"'
    else:
        answer = HttpResponse(text(), content_type=CONTENT_TYPE_PLAIN_0_0_4)
    answer["Cache-Control"] = "no-store"
    return answer
