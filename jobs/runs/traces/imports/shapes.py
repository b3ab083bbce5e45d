"""What is told of imports, and asked of them. Bytes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from jobs.models import ImportedTrace
from jobs.models.names import Noted
from jobs.runs.traces.imports import kept
from planner.facts.validation import NO_NUL, StrictModel

Title = Annotated[str, Noted]


class FileQuery(StrictModel):
    """A file that will be sent."""

    name: str = Field(min_length=1, max_length=255, pattern=NO_NUL)
    size: int = Field(ge=1, le=kept.FILE_BYTES)


class ImportQuery(StrictModel):
    """An import to be opened."""

    name: Title | None = Field(default=None, description="Name of the import. Default: name of the first file.")
    files: list[FileQuery] = Field(min_length=1, max_length=kept.MOST_FILES)


class FileSoFar(TypedDict):
    """What a file has."""

    size: int


class ImportTold(TypedDict):
    """An import."""

    id: str
    name: str
    files: list[FileQuery]
    created: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    format: Annotated[str, Field(description="Format of the files. Empty before Meshboard has read the import.")]
    steps: list[int]


def import_told(made: ImportedTrace) -> ImportTold:
    files = [FileQuery(name=name, size=size) for name, size in made.files]
    return {
        "id": made.id,
        "name": made.name,
        "files": [file.model_dump() for file in files],  # type: ignore[misc]
        "created": made.created.isoformat(),
        "format": made.format,
        "steps": list(made.steps),
    }
