"""Parts of a spec as the JSON that an answer has of them: dicts, described as the models that read them are."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema

from planner.facts.spec import JobSpec, Layout, ModelSpec


class ReadBy(NamedTuple):
    """Marks a dict that `model` reads, or a TypedDict has the fields of."""

    model: type

    def __get_pydantic_core_schema__(self, _source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(self.model)


SpecDict = Annotated[dict[str, Any], ReadBy(JobSpec)]
LayoutDict = Annotated[dict[str, Any], ReadBy(Layout)]
ModelDict = Annotated[dict[str, Any], ReadBy(ModelSpec)]
