"""What is asked of a run's steps, and answered."""

from __future__ import annotations

from pydantic import Field, ValidationError
from typing_extensions import TypedDict

from planner.facts.parse import problem_of
from planner.facts.spec import SpecError, Strict

LARGEST_STEP = 2**53 - 1  # what JavaScript counts exactly


class WantedStep(Strict):
    """A step whose events somebody wants to see."""

    step: int = Field(ge=0, le=LARGEST_STEP)


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
        raise SpecError([problem_of(told) for told in error.errors()[:20]]) from error
