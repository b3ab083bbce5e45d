"""What is answered where no view answers: JSON in the API's shape at and below /api, else a page."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.views import defaults

from jobs.api.errors import body, failed, failure
from planner.facts.spec import Problem
from webapp.doors import is_api


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    """A host name, path or form that Django refuses."""
    if not is_api(request.path):
        return defaults.bad_request(request, exception)
    return _refused(400, "the request is malformed")


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    """No such route."""
    if not is_api(request.path):
        return defaults.page_not_found(request, exception)
    return _refused(404, "no such path")


def server_error(request: HttpRequest) -> HttpResponse:
    """An id to quote; the log has the same one."""
    reference = failure(request.path)
    if not is_api(request.path):
        return render(request, "500.html", {"reference": reference}, status=500)
    return JsonResponse(failed(reference), status=500)


def _refused(status: int, message: str) -> HttpResponse:
    return JsonResponse(body([Problem("request", message)]), status=status)
