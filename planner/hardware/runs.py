"""What a run that ended leaves with its host: what it trained, and what it measured. No name, owner, data or seed."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from contracts.telemetry.words import Op
from planner.facts.fields import Strict
from planner.facts.resources import Resources
from planner.facts.spec import JobSpec, TrainSpec

Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
# All else says nothing of time or memory: who trained, on what, for how long.
TRAIN_FIELDS = (
    *("global_batch", "micro_batches", "seq_len", "precision", "attention"),
    *("overlap", "compile", "dropout", "document_end", "checkpoint_every"),
)


class LinkPoint(Strict):
    """One call of a collective as it ran, waiting for its peers left out as far as can be told.

    `payload_bytes` as in `planner.facts.collectives`.
    """

    op: Op
    group_size: Annotated[int, Field(ge=2)]
    payload_bytes: Count
    seconds: Seconds


class Run(Strict):
    """`steps` were timed, the first ones left out; `step_s` is their median.

    `peak_bytes`: the most that a rank's memory rose above what it held before its model was built, of a GPU its tensors
    alone; None where unknown. `tells_copies`: `spec` says whether checkpoints were made, whose copies a CPU's peak
    holds; runs that were kept before do not.
    """

    spec: JobSpec
    steps: Count
    step_s: Seconds
    peak_bytes: Count | None = None
    tells_copies: bool = False
    links: tuple[LinkPoint, ...] = Field(default=(), max_length=64)


def stripped(spec: JobSpec) -> JobSpec:
    """The part of a spec that decides what a step costs."""
    train = spec.train.model_dump(include=set(TRAIN_FIELDS))
    return JobSpec(
        model=spec.model.model_copy(update={"preset": None}),
        layout=spec.layout,
        train=TrainSpec(**train),
        resources=Resources(device=spec.resources.device),
    )
