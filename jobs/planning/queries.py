"""The fields of planner requests besides the draft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from planner.facts.layout import MAX_RANKS
from planner.facts.parse_spec import convert_error
from planner.facts.validation import NO_NUL, Problem, SpecError, StrictModel

Query = TypeVar("Query", bound=BaseModel)

Draft = Any  # The planner's parser reports its problems, and `jobs.api.document.schema` describes it.
ClusterName = Annotated[str, Field(max_length=200, pattern=NO_NUL, description="A name from `/clusters`.")]


class SearchRequest(StrictModel):
    """A search. The layout in `spec` is ignored, and `fixed` has the values that stay."""

    spec: Draft
    ranks: int = Field(ge=1, le=MAX_RANKS)
    cluster: ClusterName | None = None
    fixed: dict[str, Any] = Field(
        default={}, description="Layout fields and their values, which the search does not change."
    )
    max_micro_batch: int = Field(default=16, ge=1, le=1024)
    max_memory_bytes: int | None = Field(default=None, ge=1, le=2**60)
    runnable: bool = Field(default=False, description="Return only layouts that the trainer can run.")
    limit: int = Field(default=20, ge=1, le=100)


class ExplainRequest(StrictModel):
    """A spec, and the pipeline stage to explain."""

    spec: Draft
    cluster: ClusterName | None = None
    stage: int = Field(default=0, ge=0)


def checked(kind: type[Query], data: object) -> Query:
    """Validate a request. Raises SpecError with every field that is missing, unknown or invalid."""
    if not isinstance(data, Mapping):
        raise SpecError([Problem("request", "The request body is not a JSON object. Send a JSON object.")])
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise SpecError([convert_error(e, kind) for e in error.errors(include_url=False)]) from None
