"""Base class of REST views, and their parsers, permissions, and responses with entity tags."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, ClassVar

from django.contrib.auth.models import User
from django.utils.http import parse_etags
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse
from rest_framework import views
from rest_framework.exceptions import UnsupportedMediaType
from rest_framework.permissions import BasePermission, IsAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response

from jobs.api.parameters import BadParameterError
from jobs.core.access import may_change_all_jobs, may_change_hosts, may_operate_any_project
from jobs.core.text import format_repeated_problem, format_unknown_problem
from planner.facts.validation import Problem

IF_NONE_MATCH = OpenApiParameter(
    "If-None-Match",
    str,
    OpenApiParameter.HEADER,
    description="ETags of earlier answers. If nothing changed, the answer is 304 without a body.",
)
NOT_MODIFIED = {304: OpenApiResponse(description="Unchanged.")}


class APIView(views.APIView):
    """View that rejects query parameters and content encodings that it does not declare.

    `pointers` has JSON pointers of fields whose place in the body differs from their name. `path_fields` are fields of
    the path.
    """

    pointers: ClassVar[Mapping[str, str]] = {}
    path_fields: ClassVar[Collection[str]] = ()

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        self._check_encoding(request)
        handler = getattr(self, str(request.method).lower(), None)
        if handler is None or request.method == "OPTIONS":
            return
        view: Any = type(self)
        known, query = _list_query_parameters(view, handler.__name__), request.query_params
        problems = [Problem(name[:100], format_unknown_problem(name, known)) for name in query if name not in known]
        problems += [Problem(name, format_repeated_problem(name)) for name in known if len(query.getlist(name)) > 1]
        if problems:
            raise BadParameterError(problems)

    def _check_encoding(self, request: Request) -> None:
        encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
        known = {name for parser in request.parsers or () for name in ("identity", *getattr(parser, "encodings", ()))}
        if encoding not in known:
            message = f"`Content-Encoding` is {encoding[:40]!r}. Use {' or '.join(sorted(known))}."
            raise UnsupportedMediaType(encoding, message)


@cache
def _list_query_parameters(view: Any, method: str) -> tuple[str, ...]:
    """Return the query parameters that the decorator of a view method declares."""
    make_schema = getattr(getattr(view, method), "kwargs", {}).get("schema")
    if make_schema is None:
        return ()
    schema = make_schema()
    schema.view, schema.method = view(), method.upper()
    schema.view.request, schema.view.kwargs = None, {}
    parameters = schema.get_override_parameters()
    return tuple(one.name for one in parameters if isinstance(one, OpenApiParameter) and one.location == one.QUERY)


class MayChangeHosts(BasePermission):
    def has_permission(self, request: Request, view: Any) -> bool:
        return may_change_hosts(request.user)


class MayRunQueue(BasePermission):
    def has_permission(self, request: Request, view: Any) -> bool:
        return may_change_all_jobs(request.user)


class MayOperate(BasePermission):
    def has_permission(self, request: Request, view: Any) -> bool:
        return may_operate_any_project(request.user)


class HostStaffView(APIView):
    permission_classes = [IsAuthenticated, MayChangeHosts]


class QueueStaffView(APIView):
    permission_classes = [IsAuthenticated, MayRunQueue]


def get_user(request: Request) -> User:
    assert isinstance(request.user, User), "every view requires a login"
    return request.user


def make_tagged_response(request: Request, content: Any) -> Response:
    """Return a response with an entity tag, or 304 if the client has this content.

    Clients revalidate each time, and shared caches store nothing.
    """
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    tag = f'W/"{hashlib.sha256(text.encode()).hexdigest()[:32]}"'
    known = {each.removeprefix("W/") for each in parse_etags(request.headers.get("If-None-Match", ""))}
    is_unchanged = bool({"*", tag.removeprefix("W/")} & known)
    response = Response(None, status=304) if is_unchanged else Response(content)
    response["ETag"] = tag
    response["Cache-Control"] = "private, no-cache"
    response["Vary"] = "Authorization, Cookie"
    return response
