"""Step times that a user measured with the planned software, and that correct the step time of every layout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from planner.cost.estimate import parse_plannable
from planner.facts.parse_spec import LayoutDict, convert_error
from planner.facts.spec import JobSpec
from planner.facts.validation import Problem, SpecError, StrictModel
from planner.hardware.cluster import Cluster
from planner.hardware.profile import TRAIN_FIELDS, MeasuredStep

MEASURED_STEPS = "measured_steps"  # field of requests
FLAG, FLAG_EXAMPLE = "--measured-step", "tp=2,dp=4,micro_batches=8,step_s=1.35"
MAX_MEASURED_STEPS = 8
TRAIN_KEYS = ("global_batch", "micro_batches", "seq_len")
MAX_STEP_S = 1e6


class StepMeasurement(StrictModel):
    """Measured step of one layout. The model, precision, and software are those of the planned spec."""

    layout: LayoutDict = Field(default={}, description="layout of the measured run")
    micro_batches: int | None = Field(default=None, description="as in `train`; default 1")
    global_batch: int | None = Field(default=None, description="as in `train`; default that of the planned spec")
    seq_len: int | None = Field(default=None, description="as in `train`; default that of the planned spec")
    step_s: float | None = Field(default=None, gt=0, le=MAX_STEP_S, description="measured seconds per step")
    tokens_per_s_per_gpu: float | None = Field(
        default=None, gt=0, le=1e9, description="measured tokens per second and GPU, instead of `step_s`"
    )

    @model_validator(mode="after")
    def _has_one_time(self) -> Self:
        if (self.step_s is None) == (self.tokens_per_s_per_gpu is None):
            raise ValueError("needs a measured time. Set either `step_s` or `tokens_per_s_per_gpu`")
        return self


MeasuredSteps = Annotated[
    list[StepMeasurement],
    Field(
        default=[],
        max_length=MAX_MEASURED_STEPS,
        description="Steps that you measured with the planned model and software. They correct every step time.",
    ),
]


class _Holder(StrictModel):
    measured_steps: MeasuredSteps


def parse_measured_steps(data: object) -> list[StepMeasurement]:
    """Parse untrusted JSON into measured steps.

    Raises:
        SpecError: With every invalid field.
    """
    try:
        return _Holder.model_validate({MEASURED_STEPS: data}).measured_steps
    except ValidationError as error:
        raise SpecError([convert_error(e, _Holder) for e in error.errors(include_url=False)]) from None


def split_measured_steps(data: Any) -> tuple[Any, list[StepMeasurement]]:
    """Split the measured steps from the draft that they were sent with.

    Raises:
        SpecError: With every invalid field.
    """
    if not isinstance(data, Mapping) or MEASURED_STEPS not in data:
        return data, []
    return {name: value for name, value in data.items() if name != MEASURED_STEPS}, parse_measured_steps(
        data[MEASURED_STEPS]
    )


def serialize_steps(steps: Sequence[StepMeasurement]) -> list[dict[str, Any]]:
    """Return measured steps as JSON."""
    return [step.model_dump() for step in steps]


def parse_flag(text: str) -> dict[str, Any]:
    """Return the JSON of a measured step from text such as `tp=2,dp=4,micro_batches=8,step_s=1.35`.

    Raises:
        SpecError: A part of the text is not NAME=VALUE.
    """
    step: dict[str, Any] = {"layout": {}}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or not name:
            words = f"`{FLAG}` has the part {part[:60]!r}. Use NAME=VALUE, such as {FLAG} {FLAG_EXAMPLE}."
            raise SpecError([Problem(FLAG, words)])
        with suppress(ValueError):  # a word, such as full
            value = json.loads(value)
        (step if name in StepMeasurement.model_fields else step["layout"])[name] = value
    return step


def add_measured_steps(cluster: Cluster, spec: JobSpec, steps: Sequence[StepMeasurement]) -> Cluster:
    """Return the cluster with steps that were measured on it with the model and software of a spec.

    Raises:
        SpecError: The layout of a step is invalid. Each field starts with `measured_steps` and the index of the step.
    """
    if not steps:
        return cluster
    measured = tuple(_resolve_step(index, step, spec) for index, step in enumerate(steps))
    return cluster.model_copy(update={"measured_steps": measured})


def _resolve_step(index: int, step: StepMeasurement, spec: JobSpec) -> MeasuredStep:
    train: dict[str, Any] = {**spec.train.model_dump(include={*TRAIN_FIELDS}), "micro_batches": 1}
    train |= step.model_dump(include={*TRAIN_KEYS}, exclude_none=True)
    resources = spec.resources.model_dump(include={"device", "stack", "software"})
    data = {"model": spec.model.model_dump(), "layout": step.layout, "train": train, "resources": resources}
    try:
        measured = parse_plannable(data)
    except SpecError as error:
        raise SpecError([_move_problem(index, problem) for problem in error.problems]) from None
    tokens = measured.train.global_batch * measured.train.seq_len
    rate = (step.tokens_per_s_per_gpu or 0.0) * measured.layout.world_size
    return MeasuredStep(spec=measured, step_s=step.step_s or tokens / rate)


def _move_problem(index: int, problem: Problem) -> Problem:
    """Return a problem of a measured step with its place in the request."""
    section, _, name = problem.field.partition(".")
    inner = name if section == "train" and name in TRAIN_KEYS else problem.field
    field = f"{MEASURED_STEPS}.{index}.{inner}"
    return Problem(field, Problem(field, problem.message.replace(f"`{problem.field}", f"`{field}")).sentence)
