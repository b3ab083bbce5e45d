"""What is told of the lab, and asked of it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from planner.facts.collectives import LabPoint
from planner.facts.parse_spec import SchemaFrom
from planner.facts.spec import LabPrimitive, LabSpec
from planner.facts.validation import NO_NUL, StrictModel


class PrimitiveBrief(TypedDict):
    """A collective in words. Of n ranks, S bytes of the full buffer, alpha seconds a message, B bytes/s."""

    name: LabPrimitive
    title: str
    meaning: str
    call: Annotated[str, Field(description="PyTorch's")]
    time: str
    sent: Annotated[str, Field(description="Bytes that a rank sends in the ideal algorithm.")]
    used_by: list[str]


class FailedBenchmark(TypedDict):
    """A run that failed because elements of the collective were not what they must be."""

    job: str
    wrong: Annotated[int, Field(description="Number of wrong elements over all sizes, ranks, and calls.")]
    checked: int


class PrimitiveDetail(PrimitiveBrief):
    """Also the newest run that you may see and that measured it well; null where there is none."""

    job: str | None
    points: Annotated[
        list[Annotated[dict[str, Any], SchemaFrom(LabPoint)]],
        Field(description="Time, bandwidths, and number of wrong elements for each message size."),
    ]
    failed: Annotated[
        FailedBenchmark | None, Field(description="Latest run with a wrong result, if it is newer than `job`.")
    ]


class LabRequest(StrictModel):
    """Where to run a primitive, and how."""

    host: str | None = Field(
        default=None, min_length=1, max_length=100, pattern=NO_NUL, description="Default: a connected host."
    )
    ranks: int | None = Field(
        default=None, ge=1, le=65536, description="Default: 4 ranks, or all slots if the host has fewer than 4."
    )
    lab: LabSpec = Field(
        default=LabSpec(),
        description="Message sizes, number of calls, and data type. The field `primitives` is ignored.",
    )
