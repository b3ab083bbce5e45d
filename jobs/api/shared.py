"""What views share: what any may refuse, who asks, and how often one may."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.contrib.auth.models import User
from drf_spectacular.utils import OpenApiResponse, extend_schema
from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.response import Response

from jobs.api.document import schema
from jobs.api.http.errors import refused
from jobs.api.http.problems import CONTENT_TYPE, KINDS, WHOLE, Where, details
from jobs.api.http.views import APIView
from jobs.core.access import may_change_hosts
from planner.facts.validation import Problem, SpecError

ANYWHERE = (400, 401, 403, 406, 408, 413, 429, 500, 503)


def refusals(*codes: int) -> dict[tuple[int, str], OpenApiResponse]:
    """What a route may answer beside its success: what any may, and `codes`."""
    return {
        (code, CONTENT_TYPE): schema.of("RunEndedProblem" if code == 410 else "ProblemDetails", KINDS[code].words)
        for code in sorted({*ANYWHERE, *codes})
    }


def user_of(request: Request) -> User:
    assert isinstance(request.user, User), "every view requires a login"
    return request.user


def refuse(
    status: int, field: str, message: str, where: Where | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """`where`: the part of the request that the field is of; None where it is of none, such as a job's state."""
    return refused(details(status, [Problem(field, message)], where), headers)


def refuse_body(request: Request) -> None:
    """What takes no body refuses one, rather than ignore a wish.

    Raises:
        SpecError: naming every field.
    """
    told = request.data
    if not told and told in ({}, None, ""):
        return
    names = list(told) if isinstance(told, dict) else [WHOLE]
    raise SpecError([Problem(str(name)[:100], "This request takes no body. Omit the field.") for name in names[:20]])


class MayChangeHosts(BasePermission):
    def has_permission(self, request: Request, view: Any) -> bool:
        return may_change_hosts(request.user)


class Schema(APIView):
    """This document."""

    @extend_schema(operation_id="getSchema", responses={200: OpenApiResponse({"type": "object"}), **refusals()})
    def get(self, request: Request) -> Response:
        """The OpenAPI 3.1 document of this API."""
        return Response(schema.document())
