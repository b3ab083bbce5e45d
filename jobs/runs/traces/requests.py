"""What is asked of a run's steps, and answered."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationError
from typing_extensions import TypedDict

from planner.facts.parse_spec import convert_error
from planner.facts.validation import SpecError, StrictModel

LARGEST_STEP = 2**53 - 1  # what JavaScript counts exactly


def _whole(value: object) -> object:
    """JSON knows one kind of number: 5.0 is 5."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class WantedStep(StrictModel):
    """A step whose events somebody wants to see."""

    step: Annotated[int, BeforeValidator(_whole)] = Field(ge=0, le=LARGEST_STEP)


class WantedSteps(TypedDict):
    """Every step that is asked for."""

    steps: list[int]


def wanted_step(data: object) -> int:
    """The step of a request's body.

    Raises:
        SpecError: naming every field that makes no sense.
    """
    try:
        return WantedStep.model_validate(data).step
    except ValidationError as error:
        raise SpecError([convert_error(told, WantedStep) for told in error.errors()[:20]]) from error
