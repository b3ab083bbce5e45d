"""The view that every view of REST is: what it says of its parameters in the document is what it takes, and of a body
only an encoding that its parser undoes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, ClassVar

from drf_spectacular.utils import OpenApiParameter
from rest_framework import views
from rest_framework.exceptions import UnsupportedMediaType
from rest_framework.request import Request

from jobs.api.http.parameters import BadParameterError
from jobs.core.text import format_repeated_problem, format_unknown_problem
from planner.facts.validation import Problem


class APIView(views.APIView):
    """`places`: pointers of fields whose place in the body is not their own name. `of_path`: fields of the address."""

    places: ClassVar[Mapping[str, str]] = {}
    of_path: ClassVar[Collection[str]] = ()

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Raises BadParameterError, UnsupportedMediaType, once it is known that the user may ask at all."""
        super().initial(request, *args, **kwargs)
        _refuse_encoded(request)
        handler = getattr(self, str(request.method).lower(), None)
        if handler is None or request.method == "OPTIONS":
            return
        view: Any = type(self)
        known, given = _declared(view, handler.__name__), request.query_params
        problems = [Problem(name[:100], format_unknown_problem(name, known)) for name in given if name not in known]
        problems += [Problem(name, format_repeated_problem(name)) for name in known if len(given.getlist(name)) > 1]
        if problems:
            raise BadParameterError(problems)


def _refuse_encoded(request: Request) -> None:
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    read = {name for parser in request.parsers or () for name in ("identity", *getattr(parser, "encodings", ()))}
    if encoding not in read:
        words = f"`Content-Encoding` is {encoding[:40]!r}. Use {' or '.join(sorted(read))}."
        raise UnsupportedMediaType(encoding, words)


@cache
def _declared(view: Any, method: str) -> tuple[str, ...]:
    """The parameters of an address that `extend_schema` was told of."""
    described = getattr(getattr(view, method), "kwargs", {}).get("schema")
    if described is None:
        return ()
    schema = described()
    schema.view, schema.method = view(), method.upper()
    schema.view.request, schema.view.kwargs = None, {}
    told = schema.get_override_parameters()
    return tuple(one.name for one in told if isinstance(one, OpenApiParameter) and one.location == one.QUERY)
