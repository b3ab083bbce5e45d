"""Problem details (RFC 9457) of every refusal and failure, without Django, because the ASGI layers return them too.

docs/reference/errors.md has a heading for each type.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Final, Literal, NamedTuple, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from planner.facts.validation import Problem

CONTENT_TYPE: Final = "application/problem+json"
MAX_DETAIL_CHARACTERS: Final = 1000
WHOLE_REQUEST: Final = "request"  # field of a problem that concerns the whole request
ProblemLocation = Literal["body", "query", "header", "path"]


class ProblemType(NamedTuple):
    """Type of problem: heading of its explanation, title, and description in the OpenAPI document."""

    slug: str
    title: str
    description: str


PROBLEM_TYPES: Final[Mapping[int, ProblemType]] = {
    400: ProblemType(
        "malformed", "Malformed request", "The request is not JSON, is malformed, or has an invalid parameter."
    ),
    401: ProblemType("not-logged-in", "Not logged in", "The token is missing or invalid."),
    403: ProblemType("forbidden", "Forbidden", "The CSRF token is missing, or the user lacks the permission."),
    404: ProblemType("not-found", "Not found", "The object does not exist, or you cannot see it."),
    405: ProblemType(
        "method",
        "Method not allowed",
        "The path does not support this HTTP method. The Allow header lists the supported methods.",
    ),
    406: ProblemType("not-acceptable", "Not acceptable", "Only JSON is available."),
    408: ProblemType("too-slow", "Request too slow", "The request body did not arrive in time."),
    409: ProblemType("conflict", "Wrong state", "The current state of the object does not allow this request."),
    410: ProblemType("ended", "The run has ended", "The run has ended."),
    413: ProblemType("too-large", "Body too large", "The request body is larger than 1 MB."),
    415: ProblemType(
        "media-type", "Unsupported media type", "The content type of the request is not application/json."
    ),
    422: ProblemType(
        "senseless",
        "Invalid request",
        "The spec cannot run, or a field is invalid. Each error names its field and shows the arithmetic.",
    ),
    429: ProblemType(
        "too-many", "Too many requests", "Too many requests. The Retry-After header has the number of seconds to wait."
    ),
    500: ProblemType(
        "ours", "Internal error", "Internal error. The answer contains an id that also appears in the server log."
    ),
    503: ProblemType(
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
                ProblemLocation,
                Field(description="Part of the request with the problem. Absent if no single part causes the problem."),
            ]
        ],
        "message": str,
    },
)
FieldProblem.__doc__ = "One problem and its location in the request."


class ProblemDetails(TypedDict):
    """Reason for a refused or failed request (RFC 9457). `errors` is a member that Meshboard adds."""

    type: Annotated[
        str, Field(description="Address of the page that explains the problem, relative to the address of the board.")
    ]
    title: str
    status: int
    detail: Annotated[str, Field(description="All messages, for people.")]
    errors: list[FieldProblem]


def build_problem(
    status: int,
    problems: Iterable[Problem],
    location: ProblemLocation | None = None,
    pointers: Mapping[str, str] | None = None,
    path_fields: Collection[str] = (),
) -> ProblemDetails:
    """Return the body of a refusal.

    Args:
        location: Part of the request that contains the fields, or None if they are not in the request.
        pointers: JSON pointers of fields whose place in the body differs from their name.
        path_fields: Fields that are parameters of the path instead.
    """
    encodable = [Problem(_escape_surrogates(one.field), _escape_surrogates(one.message)) for one in problems]
    errors = [_locate(one, "path" if one.field in path_fields else location, pointers or {}) for one in encodable]
    sentences = (
        error["message"] if error["field"] == WHOLE_REQUEST else Problem(error["field"], error["message"]).sentence
        for error in errors
    )
    return {
        "type": f"/docs/errors/#{PROBLEM_TYPES[status].slug}",
        "title": PROBLEM_TYPES[status].title,
        "status": status,
        "detail": " ".join(sentences)[:MAX_DETAIL_CHARACTERS],
        "errors": errors,
    }


def build_request_problem(status: int, message: str) -> ProblemDetails:
    """Return the body of a refusal of the whole request."""
    return build_problem(status, [Problem(WHOLE_REQUEST, message)])


def _escape_surrogates(text: str) -> str:
    """Replace characters that JSON can escape but UTF-8 cannot encode, such as those of an unknown field."""
    return text.encode(errors="backslashreplace").decode()


def _locate(problem: Problem, location: ProblemLocation | None, pointers: Mapping[str, str]) -> FieldProblem:
    if location is None or problem.field == WHOLE_REQUEST:
        return {"field": problem.field, "pointer": "", "message": problem.message}
    pointer = _build_pointer(problem.field, pointers) if location == "body" else ""
    return {"field": problem.field, "pointer": pointer, "in": location, "message": problem.message}


def _build_pointer(field: str, pointers: Mapping[str, str]) -> str:
    """Return the JSON pointer (RFC 6901) of a dotted field."""
    if field in pointers:
        return pointers[field]
    first, *rest = (part.replace("~", "~0").replace("/", "~1") for part in field.split("."))
    return "/".join([pointers.get(first, f"/{first}"), *rest])
