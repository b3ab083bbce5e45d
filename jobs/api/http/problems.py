"""What every refusal and failure says: problem details (RFC 9457), with each thing that is wrong and where it stands.

Without Django, because the server's outermost doors say it too. docs/reference/errors.md has a heading for each type.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Final, Literal, NamedTuple, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from planner.facts.validation import Problem

CONTENT_TYPE: Final = "application/problem+json"
TYPE: Final = "/docs/errors/#{slug}"
LONGEST_DETAIL: Final = 1000
WHOLE: Final = "request"  # the field of what concerns the request as a whole
Where = Literal["body", "query", "header", "path"]


class Kind(NamedTuple):
    """A type of problem: the heading of its explanation, a title, and what the OpenAPI document says of it."""

    slug: str
    title: str
    words: str


KINDS: Final[Mapping[int, Kind]] = {
    400: Kind("malformed", "Malformed request", "The request is not JSON, is malformed, or has an invalid parameter."),
    401: Kind("not-logged-in", "Not logged in", "The token is missing or invalid."),
    403: Kind("forbidden", "Forbidden", "The CSRF token is missing, or the user lacks the permission."),
    404: Kind("not-found", "Not found", "The object does not exist, or you cannot see it."),
    405: Kind(
        "method",
        "Method not allowed",
        "The path does not support this HTTP method. The Allow header lists the supported methods.",
    ),
    406: Kind("not-acceptable", "Not acceptable", "Only JSON is available."),
    408: Kind("too-slow", "Request too slow", "The request body did not arrive in time."),
    409: Kind("conflict", "Wrong state", "The current state of the object does not allow this request."),
    410: Kind("ended", "The run has ended", "The run has ended."),
    413: Kind("too-large", "Body too large", "The request body is larger than 1 MB."),
    415: Kind("media-type", "Unsupported media type", "The content type of the request is not application/json."),
    422: Kind(
        "senseless",
        "Invalid request",
        "The spec cannot run, or a field is invalid. Each error names its field and shows the arithmetic.",
    ),
    429: Kind(
        "too-many", "Too many requests", "Too many requests. The Retry-After header has the number of seconds to wait."
    ),
    500: Kind(
        "ours", "Internal error", "Internal error. The answer contains an id that also appears in the server log."
    ),
    503: Kind(
        "away",
        "Unavailable",
        "A service is unavailable, or too many requests are running. The Retry-After header has the seconds to wait.",
    ),
}

FieldProblem = TypedDict(
    "FieldProblem",
    {
        "field": Annotated[
            str,
            Field(description="Name of the field (dotted), parameter, or header. 'request' means the whole request."),
        ],
        "pointer": Annotated[
            str, Field(description="JSON pointer to the field in the body. '' if the problem is not in the body.")
        ],
        "in": NotRequired[
            Annotated[
                Where,
                Field(description="Part of the request with the problem. Absent if no single part causes the problem."),
            ]
        ],
        "message": str,
    },
)
FieldProblem.__doc__ = "One problem and its location in the request."


class ProblemDetails(TypedDict):
    """Why a request was refused or failed, as RFC 9457 has it; `errors` is our own member of it."""

    type: Annotated[
        str, Field(description="Address of the page that explains the problem, relative to the address of the board.")
    ]
    title: str
    status: int
    detail: Annotated[str, Field(description="All messages, for people.")]
    errors: list[FieldProblem]


def details(
    status: int,
    problems: Iterable[Problem],
    where: Where | None = None,
    places: Mapping[str, str] | None = None,
    of_path: Collection[str] = (),
) -> ProblemDetails:
    """A refusal's body. `where` is the part of the request that the fields are of, None where they are of none, but for
    those `of_path`. `places`: pointers of fields whose place in the body is not their own name."""
    kind = KINDS[status]
    errors = [_located(one, "path" if one.field in of_path else where, places or {}) for one in problems]
    words = (e["message"] if e["field"] == WHOLE else Problem(e["field"], e["message"]).sentence for e in errors)
    return {
        "type": TYPE.format(slug=kind.slug),
        "title": kind.title,
        "status": status,
        "detail": " ".join(words)[:LONGEST_DETAIL],
        "errors": errors,
    }


def _located(problem: Problem, where: Where | None, places: Mapping[str, str]) -> FieldProblem:
    if where is None or problem.field == WHOLE:
        return {"field": problem.field, "pointer": "", "message": problem.message}
    pointer = _pointer(problem.field, places) if where == "body" else ""
    return {"field": problem.field, "pointer": pointer, "in": where, "message": problem.message}


def _pointer(field: str, places: Mapping[str, str]) -> str:
    """RFC 6901 of a dotted field."""
    if field in places:
        return places[field]
    first, *rest = (part.replace("~", "~0").replace("/", "~1") for part in field.split("."))
    return "/".join([places.get(first, f"/{first}"), *rest])
