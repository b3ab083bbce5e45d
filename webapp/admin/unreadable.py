"""The admin's pages are Django's and its theme's, which answer 500 to an address or a form that they cannot read."""

from __future__ import annotations

import logging
from collections.abc import Callable

from django.core.exceptions import ValidationError
from django.core.paginator import InvalidPage
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.views.defaults import bad_request

log = logging.getLogger(__name__)

MISTAKES = (ValueError, OverflowError, RecursionError, InvalidPage, ValidationError)


class UnreadableMiddleware:
    """It is 400, and stands in the log whole: it may be a fault of ours after all."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        return self._get_response(request)

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        found = request.resolver_match
        if found is None or "admin" not in found.namespaces or not isinstance(exception, MISTAKES):
            return None
        log.error("The admin cannot read %s", request.path, exc_info=exception)
        return bad_request(request, exception)
