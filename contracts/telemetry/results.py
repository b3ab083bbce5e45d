"""What a run found out: the verdict on its traffic, a calibration's profile, a lab's figures, a dry run's."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from contracts.fields import Count, Number, Plain, Rank, Seconds
from contracts.telemetry.words import Label, Op, Phase


class VerdictRow(TypedDict):
    """Predicted against measured for one (phase, op, axis); payload bytes."""

    phase: Phase
    op: Op
    axis: Label
    predicted_count: Count
    measured_count: Count
    predicted_bytes: Count
    measured_bytes: Count


class MemoryParts(TypedDict):
    """Bytes of a rank's storages in a step, its run's last or one that is walked dry, counted part by part.

    `gradients`: once complete. `optimizer`: fp32 weights that are held apart, and moments. `copies`: of checkpoints,
    where training computes. `gradients_then`: at the step's fullest moment, None where they came or went as it passed.
    `beside`: what was held then beside all of these, so with such gradients in it; None where it is not known.
    """

    parameters: Count
    gradients: Count
    optimizer: Count
    copies: Count
    gradients_then: Count | None
    beside: Count | None


class VerdictItem(TypedDict):
    """A rank's own comparison at the end of its run, every phase."""

    kind: Literal["verdict"]
    rank: Rank
    time: Number
    rows: list[VerdictRow]
    peak_bytes: NotRequired[Count]  # most held at once over what was before the model: allocated, or resident on a CPU
    memory: NotRequired[MemoryParts]


class ProfileItem(TypedDict):
    """What a calibration measured, as `planner.hardware.profile.HostProfile` in JSON; rank 0 sends it once."""

    kind: Literal["profile"]
    rank: Rank
    time: Number
    profile: Plain


class LabItem(TypedDict):
    """What a lab found, as `planner.facts.collectives.LabResult` in JSON; the first rank of its group sends it once."""

    kind: Literal["lab"]
    rank: Rank
    time: Number
    result: Plain


class DryRunItem(TypedDict):
    """What one step of `rank` would be, found without its peers; its collectives come as a verdict.

    `parameters` are what the rank keeps. `peak_bytes` is of tensors alive at once beside the optimiser's moments;
    `optimizer_bytes`, those moments, come on top. `memory` has both by part. `flops` are those of products.
    """

    kind: Literal["dry_run"]
    rank: Rank
    time: Number
    parameters: Count
    peak_bytes: Count
    optimizer_bytes: Count
    predicted_bytes: Count  # the planner's estimate of both
    memory: NotRequired[MemoryParts]  # an older host tells none
    flops: Count
    seconds: Seconds  # what it took to find out
