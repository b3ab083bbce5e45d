"""No page turns a line round: what would do so in a text of somebody else's stands there as it is written."""

from __future__ import annotations

import re
from collections.abc import Callable

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase

from contracts.fields import escape_direction_overrides

TURNS = re.compile(rb"\xe2\x80[\xaa-\xae]|\xe2\x81[\xa6-\xa9]")  # `upright`'s, in UTF-8


def upright_pages(
    get_response: Callable[[HttpRequest], HttpResponseBase],
) -> Callable[[HttpRequest], HttpResponseBase]:
    """Middleware: whatever a template shows, of whatever field."""

    def answered(request: HttpRequest) -> HttpResponseBase:
        response = get_response(request)
        if isinstance(response, HttpResponse) and response.get("Content-Type", "").startswith("text/html"):
            response.content = TURNS.sub(_written, response.content)
            if "Content-Length" in response:  # of the page before: a server would send nothing of a longer one
                response["Content-Length"] = str(len(response.content))
        return response

    return answered


def _written(found: re.Match[bytes]) -> bytes:
    return escape_direction_overrides(found[0].decode()).encode()
