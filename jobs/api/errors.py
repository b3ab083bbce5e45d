"""Every refusal has one shape: {"errors": [{"field", "message"}]}."""

from __future__ import annotations

from typing import Any

from rest_framework.response import Response
from rest_framework.views import exception_handler

from planner.spec import Problem, SpecError


def body(problems: list[Problem]) -> dict[str, Any]:
    return {"errors": [{"field": p.field, "message": p.message} for p in problems]}


def handle(error: Exception, context: dict[str, Any]) -> Response | None:
    """DRF's exception handler: a SpecError is 422, the rest is reshaped."""
    if isinstance(error, SpecError):
        return Response(body(error.problems), status=422)
    response = exception_handler(error, context)
    if response is None:
        return None
    detail = response.data.get("detail", response.data) if isinstance(response.data, dict) else response.data
    response.data = body([Problem("request", str(detail))])
    return response
