"""Answers with an entity tag: who has the same already is told so in 304, without the body."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from django.utils.http import parse_etags
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse
from rest_framework.request import Request
from rest_framework.response import Response

IF_NONE_MATCH = OpenApiParameter(
    "If-None-Match",
    str,
    OpenApiParameter.HEADER,
    description="ETags of earlier answers. If nothing changed, the answer is 304 without a body.",
)
UNCHANGED = {304: OpenApiResponse(description="Unchanged.")}


def tagged(request: Request, told: Any) -> Response:
    """The answer, or 304. Whoever keeps it asks each time, and nobody else may keep it."""
    text = json.dumps(told, sort_keys=True, separators=(",", ":"))
    tag = f'W/"{hashlib.sha256(text.encode()).hexdigest()[:32]}"'
    seen = {each.removeprefix("W/") for each in parse_etags(request.headers.get("If-None-Match", ""))}
    unchanged = bool({"*", tag.removeprefix("W/")} & seen)
    answer = Response(None, status=304) if unchanged else Response(told)
    answer["ETag"] = tag
    answer["Cache-Control"] = "private, no-cache"
    answer["Vary"] = "Authorization, Cookie"
    return answer
