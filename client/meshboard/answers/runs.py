"""Made by `make openapi` of docs/openapi.json: change that."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from meshboard.answers.plans import Interval, TimeEstimate


class MemoryParts(TypedDict):
    """Bytes of a rank's storages in a step, its run's last or one that is walked dry, counted part by part.

    `gradients`: once complete. `optimizer`: fp32 weights that are held apart, and moments. `copies`: of
    checkpoints, where training computes. `gradients_then`: at the step's fullest moment, None where they came or
    went as it passed. `beside`: what was held then beside all of these, so with such gradients in it; None where it
    is not known.
    """

    parameters: int
    gradients: int
    optimizer: int
    copies: int
    gradients_then: int | None
    beside: int | None


class DryRunItem(TypedDict):
    """What one step of `rank` would be, found without its peers; its collectives come as a verdict.

    `parameters` are what the rank keeps. `peak_bytes` is of tensors alive at once beside the optimiser's moments;
    `optimizer_bytes`, those moments, come on top. `memory` has both by part. `flops` are those of products.
    """

    kind: Literal["dry_run"]
    rank: int
    time: float
    parameters: int
    peak_bytes: int
    optimizer_bytes: int
    predicted_bytes: int
    flops: int
    seconds: float
    memory: NotRequired[MemoryParts]


class LabPoint(TypedDict):
    """One primitive at one size.

    `seconds` is the median over iterations of the slowest rank's time. `wrong` elements of the `checked` ones
    differ from what was computed without communication, over all ranks and timed calls. Payload and algorithmic
    bytes are of one call on one rank, as its meter counted them.
    """

    primitive: Literal[
        "broadcast",
        "scatter",
        "gather",
        "all_gather",
        "reduce",
        "all_reduce",
        "reduce_scatter",
        "all_to_all",
        "send_recv",
        "isend_irecv",
        "barrier",
    ]
    num_bytes: int
    seconds: float
    algbw: float | None
    """algorithm bandwidth (bytes per second); null for a barrier"""
    busbw: float | None
    checked: int
    wrong: int
    payload_bytes: int
    algorithmic_bytes: int


class LabHolding(TypedDict):
    """What a rank held before and after: elements, none where it had no buffer.

    Of a barrier, when it came and when it left: microseconds since the first one came.
    """

    rank: int
    before: list[float] | None
    after: list[float] | None


class LabStep(TypedDict):
    """One primitive on tiny tensors, as every rank of the group had them."""

    primitive: Literal[
        "broadcast",
        "scatter",
        "gather",
        "all_gather",
        "reduce",
        "all_reduce",
        "reduce_scatter",
        "all_to_all",
        "send_recv",
        "isend_irecv",
        "barrier",
    ]
    holdings: list[LabHolding]


class LabResult(TypedDict):
    """Everything one run of the lab found."""

    device: Literal["cpu", "cuda"]
    device_name: str
    backend: str
    torch_version: str
    world_size: int
    ranks: list[int]
    root: int
    dtype: Literal["float32", "float64", "float16", "bfloat16", "int32", "int64"]
    reduce_op: Literal["sum", "max"]
    iterations: int
    points: list[LabPoint]
    steps: list[LabStep]
    version: NotRequired[Literal[1]]


class Choices(TypedDict):
    """What routers chose for `tokens`, of all layers, in the first step compared; one process took the same.

    Of `turned` it would have chosen another expert, more probable by at most `gap`: a difference of logarithms over
    the rms of all experts' from their mean.
    """

    tokens: int
    turned: int
    gap: float


class ProcessProof(TypedDict):
    """Steps, computed again by one process. Largest relative differences; `limit` is that of gradients."""

    state: Literal["due", "equal", "apart", "not checked"]
    why: str
    steps: int
    tensors: int
    gradient: float
    update: float
    loss: float
    norm: float
    limit: float
    seconds: float
    choices: NotRequired[Choices]


class ReplicaProof(TypedDict):
    """Checksums of gradients and weights, compared over all ranks that hold the same part of a tensor."""

    steps: list[int]
    parts: int
    copied: int
    apart: float


class Mismatch(TypedDict):
    """Something that is not what it must be.

    `apart` is the rms of the difference over the rms of what it must be, None where that is no number; beyond
    `limit` it is more than rounding. `share` is a part of the model that nobody holds, or several do; `rows` are
    sequences that a rank trained on in place of its own, and `apart` how many of its share. A router's `choice` is
    apart by how much more probable what one process would have chosen was: a difference of logarithms over the rms
    of all experts'.
    """

    what: Literal["gradient", "weight", "share", "rows", "update", "loss", "gradient norm", "choice"]
    name: str
    axis: str
    ranks: list[int]
    apart: float | None
    limit: float


class ProofItem(TypedDict):
    """Rank 0: what is proven of this run so far; a later item replaces an earlier one."""

    kind: Literal["proof"]
    rank: int
    time: float
    replicas: ReplicaProof
    one_process: ProcessProof
    wrong: list[Mismatch]
    end: NotRequired[ProcessProof]


class VerdictRow(TypedDict):
    """Predicted against measured for one (phase, op, axis); payload bytes."""

    phase: Literal["setup", "step", "eval", "checkpoint", "proof", "teardown"]
    op: Literal[
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
        "send",
        "recv",
        "barrier",
    ]
    axis: str
    predicted_count: int
    measured_count: int
    predicted_bytes: int
    measured_bytes: int


class Results(TypedDict):
    """Of one attempt, so far. Bytes."""

    attempt: int
    ended: bool
    """True if the attempt has ended, so the data is final."""
    verdicts: dict[str, list[VerdictRow]]
    """Predicted and measured traffic per rank."""
    off_bytes: int | None
    """Total difference between measured and predicted traffic, in bytes. null until all ranks have reported."""
    proof: ProofItem | None
    """Verification results: replica consistency, and a comparison with the single-process reference."""
    dry_runs: list[DryRunItem]
    peak_bytes: dict[str, int]
    """Peak memory of each rank."""
    memory: dict[str, MemoryParts]
    """Memory breakdown of each rank in its last step."""
    lab: LabResult | None
    """Result of a benchmark."""


class CheckpointTold(TypedDict):
    """Of one: null is what is not known of it any more. Bytes, seconds, unix seconds."""

    attempt: int
    name: str | None
    """Checkpoint name to use in `train.resume`. null if the checkpoint could not be written."""
    step: int | None
    time: float | None
    num_bytes: int | None
    stall_s: float | None
    """Seconds that training waited for the checkpoint."""
    save_s: float | None
    problem: str
    kept: bool
    """True if the checkpoint is on disk. An attempt keeps the newest `train.keep_checkpoints` checkpoints."""


class Difference(TypedDict):
    """A field of the specs on which they differ, and its value in each; null where a spec has none."""

    field: str
    values: list[Any]


class Curve(TypedDict):
    """A run by its steps, thinned, all lists of one length; null is what nobody told, or no number."""

    elapsed_s: NotRequired[list[float | None]]
    """Seconds since the start of the first step."""
    grad_norm: NotRequired[list[float | None]]
    learning_rate: NotRequired[list[float | None]]
    loss: NotRequired[list[float | None]]
    step: NotRequired[list[int]]
    step_s: NotRequired[list[float | None]]
    tokens: NotRequired[list[int | None]]
    """Number of tokens up to each step, including steps before a resumed checkpoint."""
    tokens_s: NotRequired[list[float | None]]


class Parts(TypedDict):
    """Means over ranks and steps, seconds a step; without the checkpoints that a diagnosis adds."""

    steps: int
    """Number of averaged steps. At most the last 64, and never the first 3."""
    step_s: float
    data_s: float
    optimizer_s: float
    exposed: dict[str, float]
    hidden: dict[str, float]


class Foretold(TypedDict):
    """What was predicted of a run as it was submitted: the whole is in its job's estimate."""

    memory_interval: NotRequired[Interval]
    peak_memory_bytes: NotRequired[int]
    """Predicted peak memory of the rank with the highest peak."""
    time: NotRequired[TimeEstimate]


class RunTraffic(TypedDict):
    """Traffic of a whole run, all ranks."""

    axis: str
    op: str
    calls: int
    payload_bytes: int
    busy_s: float


class Validation(TypedDict):
    """Losses of validations, all lists of one length."""

    elapsed_s: NotRequired[list[float | None]]
    loss: NotRequired[list[float | None]]
    step: NotRequired[list[int]]


class Compared(TypedDict):
    """One of the runs. Empty where nothing is kept of it."""

    job: str
    name: str
    attempt: int
    recorded: bool
    """True if the history of the run is stored."""
    curve: Curve
    validation: Validation
    traffic: list[RunTraffic]
    parts: Parts | None
    plan: Foretold | dict[str, Any]
    """Prediction for the run. Empty if the run has no prediction."""


class Comparison(TypedDict):
    """In the order asked for."""

    jobs: list[Compared]
    differences: list[Difference]


class TableKept(TypedDict):
    """Of one table."""

    rows: int
    bytes: int


AttemptKept = TypedDict(
    "AttemptKept",
    {
        "attempt": int,
        "ended": bool,  # True if the attempt has ended, so the data is final.
        "from": float | None,
        "to": float | None,
        "bytes": int,
        "tables": dict[str, TableKept],
        "merged_s": int,  # Number of seconds that each row of the oldest traffic covers.
        "raw_dropped": int,  # Number of traced steps that were deleted to save space.
    },
)
"""The stored history of an attempt."""


class History(TypedDict):
    """What is kept of a job, oldest attempt first."""

    job: str
    attempts: list[AttemptKept]


Rows = TypedDict(
    "Rows",
    {
        "table": str,
        "attempt": int,
        "from": float | None,
        "to": float | None,
        "width_s": float | None,  # Width of a time bin in seconds. null for raw rows.
        "columns": dict[
            str, list[Any]
        ],  # Columns by name, all of the same length. The `time` of a bin is the start of the bin.
    },
)
"""Rows or time bins of a history table."""
