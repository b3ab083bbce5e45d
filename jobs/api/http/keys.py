"""The header by which what is sent twice happens once."""

from __future__ import annotations

import re

from drf_spectacular.utils import OpenApiParameter
from rest_framework.request import Request

from jobs.api.http.parameters import BadParameterError
from planner.facts.validation import Problem

LONGEST_KEY = 200
KEY_PATTERN = f"[!-~]{{1,{LONGEST_KEY}}}"
KEY = OpenApiParameter(
    "Idempotency-Key",
    {"type": "string", "pattern": f"^{KEY_PATTERN}$"},
    OpenApiParameter.HEADER,
    description="A request with a repeated key and body returns the job of the first request.",
)


def key_of(request: Request) -> str | None:
    """Raises BadParameterError."""
    key = request.headers.get("Idempotency-Key")
    if key is not None and not re.fullmatch(KEY_PATTERN, key):
        words = f"`{KEY.name}` has invalid characters or length. Use 1 to {LONGEST_KEY} visible ASCII characters."
        raise BadParameterError([Problem(KEY.name, words)], "header")
    return key
