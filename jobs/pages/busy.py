"""Views that plan answer 503 while the planner is busy."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from django.http import HttpResponse

from jobs.api.http.errors import LATER, of_request, refused_page
from jobs.planning.planners import BusyError

P = ParamSpec("P")


def busy_as_503(view: Callable[P, HttpResponse]) -> Callable[P, HttpResponse]:
    """Turn a BusyError of a view into an answer with status 503."""

    @wraps(view)
    def answered(*args: P.args, **named: P.kwargs) -> HttpResponse:
        try:
            return view(*args, **named)
        except BusyError as error:
            return refused_page(of_request(503, str(error)), LATER)

    return answered
