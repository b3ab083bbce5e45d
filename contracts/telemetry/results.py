"""Telemetry of results: traffic verdict, calibration, collective lab, dry run and verification."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from contracts.fields import Count, JsonObject, Number, Rank, Seconds, ShortText, Text
from contracts.telemetry.items import Label, Op, Phase


class VerdictRow(TypedDict):
    """Predicted and measured calls and payload bytes of one (phase, op, axis)."""

    phase: Phase
    op: Op
    axis: Label
    predicted_count: Count
    measured_count: Count
    predicted_bytes: Count
    measured_bytes: Count


class MemoryParts(TypedDict):
    """Bytes of the storages of a rank by purpose, in the last step of a run or in a dry run.

    `gradients` are complete gradients. `optimizer` contains separate fp32 weights and moments. `copies` are checkpoint
    copies on the compute device. `gradients_then` are the gradients at the peak of the step, or None if they changed
    during it. `beside` is the rest of the memory at the peak, or None if it is unknown.
    """

    parameters: Count
    gradients: Count
    optimizer: Count
    copies: Count
    gradients_then: Count | None
    beside: Count | None


class VerdictItem(TypedDict):
    """Comparison of a rank with the prediction at the end of its run, for every phase."""

    kind: Literal["verdict"]
    rank: Rank
    time: Number
    rows: list[VerdictRow]
    peak_bytes: NotRequired[Count]  # peak above the memory before the model: allocated, or resident on a CPU
    memory: NotRequired[MemoryParts]


class ProfileItem(TypedDict):
    """Result of a calibration, `planner.hardware.profile.HostProfile` as JSON. Rank 0 sends it once."""

    kind: Literal["profile"]
    rank: Rank
    time: Number
    profile: JsonObject


class LabItem(TypedDict):
    """Result of a lab, `planner.facts.collectives.LabResult` as JSON. The first rank of its group sends it once."""

    kind: Literal["lab"]
    rank: Rank
    time: Number
    result: JsonObject


class DryRunItem(TypedDict):
    """Result of a dry step of one rank. Its collectives follow as a verdict.

    `parameters` are those that the rank stores. `peak_bytes` is the peak of live tensors without the optimizer moments,
    whose bytes are `optimizer_bytes`. `memory` divides both by purpose. `flops` counts matmuls.
    """

    kind: Literal["dry_run"]
    rank: Rank
    time: Number
    parameters: Count
    peak_bytes: Count
    optimizer_bytes: Count
    predicted_bytes: Count  # estimate of the planner for both
    memory: NotRequired[MemoryParts]  # missing from hosts of older versions
    flops: Count
    seconds: Seconds  # duration of the dry run


class Mismatch(TypedDict):
    """A value that differs from its expected value.

    For most kinds, `apart` is the rms of the difference divided by the rms of the expected value, or None if that is
    not a number. Above `limit` it exceeds rounding. Exceptions:

    - "share": no rank holds a part of the model, or several ranks hold it.
    - "rows": a rank trained on foreign sequences. `apart` is their fraction of its sequences.
    - "choice": a router chose an expert that the reference finds less probable. `apart` is the difference of the
      logarithms divided by the rms over all experts.
    """

    what: Literal["gradient", "weight", "share", "rows", "update", "loss", "gradient norm", "choice"]
    name: ShortText  # a tensor of the whole model, or "step 2", or "validation after step 2"
    axis: ShortText  # axes of replicas that differ, as "dp" or "dp x tp"; "" compared with a single process
    ranks: Annotated[list[Rank], Field(max_length=2)]  # the rank that differs, and its counterpart
    apart: Seconds | None
    limit: Seconds


class ReplicaProof(TypedDict):
    """Comparison of checksums of gradients and weights between all ranks with the same shard."""

    steps: Annotated[list[Count], Field(max_length=100)]  # steps after which shards were compared
    parts: Count  # different shards
    copied: Count  # shards on at least two ranks
    apart: Seconds  # largest difference of two replicas; 0 means bit for bit


class RouterChoices(TypedDict):
    """Router choices for `tokens` in all layers of the first compared step, which the reference replays.

    The reference would have chosen another expert for `turned` of them. `gap` is the largest difference of the
    logarithms, divided by the rms over all experts.
    """

    tokens: Count
    turned: Count
    gap: Seconds


class ReferenceProof(TypedDict):
    """Steps that a single process computed again, with the largest relative differences.

    `limit` is the limit for gradients.
    """

    state: Literal["due", "equal", "apart", "not checked"]
    why: Text  # reason for "not checked"; otherwise the limits, and why no further step was compared
    steps: Count  # number of compared steps; while "due", the step after which the comparison starts
    tensors: Count  # tensors whose gradient and update in the first of these steps were compared
    gradient: Seconds
    update: Seconds
    loss: Seconds
    norm: Seconds
    limit: Seconds
    seconds: Seconds  # duration, during which training waits
    choices: NotRequired[RouterChoices]  # of a mixture of experts


class ProofItem(TypedDict):
    """Verification of the run so far, sent by rank 0. A later item replaces an earlier one."""

    kind: Literal["proof"]
    rank: Rank
    time: Number
    replicas: ReplicaProof
    one_process: ReferenceProof  # first steps of this run, from initial values or the same checkpoint
    end: NotRequired[ReferenceProof]  # one step beyond the run from its final state, and the last validation
    wrong: Annotated[list[Mismatch], Field(max_length=20)]  # the largest first; empty if the run is correct
