"""What was answered to somebody is theirs: no proxy keeps it, and no browser shows it once they have logged out."""

from __future__ import annotations

from collections.abc import Callable

from django.conf import settings
from django.http import HttpRequest
from django.http.response import HttpResponseBase


def private_answers(
    get_response: Callable[[HttpRequest], HttpResponseBase],
) -> Callable[[HttpRequest], HttpResponseBase]:
    """Middleware: of every request that says who asks, unless its view says otherwise, as lists with an ETag do.

    It looks at what was sent and at no database, and stands behind what serves static files.
    """

    def answered(request: HttpRequest) -> HttpResponseBase:
        response = get_response(request)
        says_who = "Authorization" in request.headers or settings.SESSION_COOKIE_NAME in request.COOKIES
        if says_who and "Cache-Control" not in response:
            response["Cache-Control"] = "private, no-store"
        return response

    return answered
