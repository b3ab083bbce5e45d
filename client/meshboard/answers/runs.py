"""Made by `make openapi` of docs/openapi.json: change that."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from meshboard.answers.plans import Interval, TimeEstimate


class MemoryParts(TypedDict):
    """Bytes of the storages of a rank by purpose, in the last step of a run or in a dry run.

    `gradients` are complete gradients. `optimizer` contains separate fp32 weights and moments. `copies` are
    checkpoint copies on the compute device. `gradients_then` are the gradients at the peak of the step, or None if
    they changed during it. `beside` is the rest of the memory at the peak, or None if it is unknown.
    """

    parameters: int
    gradients: int
    optimizer: int
    copies: int
    gradients_then: int | None
    beside: int | None


class DryRunItem(TypedDict):
    """Result of a dry step of one rank. Its collectives follow as a verdict.

    `parameters` are those that the rank stores. `peak_bytes` is the peak of live tensors without the optimizer
    moments, whose bytes are `optimizer_bytes`. `memory` divides both by purpose. `flops` counts matmuls.
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
    """Result of one primitive at one size.

    `seconds` is the median over iterations of the slowest rank's time. `wrong` counts the elements that differ from
    the result without communication. `checked` counts all compared elements. Both are sums over ranks and timed
    calls. `payload_bytes` and `algorithmic_bytes` are the metered bytes of one call on one rank.
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


class LabRankValues(TypedDict):
    """Elements of a rank before and after a call, or null if it had no buffer.

    For a barrier, the values are its arrival and departure in microseconds after the first arrival.
    """

    rank: int
    before: list[float] | None
    after: list[float] | None


class LabStep(TypedDict):
    """Values of one primitive on tiny tensors, for every rank of the group."""

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
    holdings: list[LabRankValues]


class LabResult(TypedDict):
    """All results of one benchmark run."""

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


class RouterChoices(TypedDict):
    """Router choices for `tokens` in all layers of the first compared step, which the reference replays.

    The reference would have chosen another expert for `turned` of them. `gap` is the largest difference of the
    logarithms, divided by the rms over all experts.
    """

    tokens: int
    turned: int
    gap: float


class ReferenceProof(TypedDict):
    """Steps that a single process computed again, with the largest relative differences.

    `limit` is the limit for gradients.
    """

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
    choices: NotRequired[RouterChoices]


class ReplicaProof(TypedDict):
    """Comparison of checksums of gradients and weights between all ranks with the same shard."""

    steps: list[int]
    parts: int
    copied: int
    apart: float


class Mismatch(TypedDict):
    """A value that differs from its expected value.

    For most kinds, `apart` is the rms of the difference divided by the rms of the expected value, or None if that
    is not a number. Above `limit` it exceeds rounding. Exceptions:

    - "share": no rank holds a part of the model, or several ranks hold it. - "rows": a rank trained on foreign
    sequences. `apart` is their fraction of its sequences. - "choice": a router chose an expert that the reference
    finds less probable. `apart` is the difference of the   logarithms divided by the rms over all experts.
    """

    what: Literal["gradient", "weight", "share", "rows", "update", "loss", "gradient norm", "choice"]
    name: str
    axis: str
    ranks: list[int]
    apart: float | None
    limit: float


class ProofItem(TypedDict):
    """Verification of the run so far, sent by rank 0. A later item replaces an earlier one."""

    kind: Literal["proof"]
    rank: int
    time: float
    replicas: ReplicaProof
    one_process: ReferenceProof
    wrong: list[Mismatch]
    end: NotRequired[ReferenceProof]


class VerdictRow(TypedDict):
    """Predicted and measured calls and payload bytes of one (phase, op, axis)."""

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
    """Hold the results of an attempt so far, in bytes."""

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


class StoredCheckpoint(TypedDict):
    """Describe a checkpoint in bytes, seconds, and Unix seconds. Unknown values are null."""

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
    """Hold a field that differs between specs and its values, null if a spec lacks the field."""

    field: str
    values: list[Any]


class Curve(TypedDict):
    """Hold a thinned run by steps, in lists of equal length. Unknown and non-finite values are null."""

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


class Validation(TypedDict):
    """Hold validation losses in lists of equal length."""

    elapsed_s: NotRequired[list[float | None]]
    loss: NotRequired[list[float | None]]
    step: NotRequired[list[int]]


class MeanStepParts(TypedDict):
    """Hold means over ranks and steps in seconds per step, without checkpoints."""

    steps: int
    """Number of averaged steps. At most the last 64, and never the first 3."""
    step_s: float
    data_s: float | None
    """null if unknown: a script without a DataLoader."""
    optimizer_s: float | None
    """null if unknown: no optimizer was timed."""
    exposed: dict[str, float]
    hidden: dict[str, float]


class PredictedRun(TypedDict):
    """Hold the prediction of a run at submit. The job's estimate has all of it."""

    memory_interval: NotRequired[Interval]
    peak_memory_bytes: NotRequired[int]
    """Predicted peak memory of the rank with the highest peak."""
    time: NotRequired[TimeEstimate]


class RunTraffic(TypedDict):
    """Hold the traffic of a whole run over all ranks."""

    axis: str
    op: str
    calls: int
    payload_bytes: int
    busy_s: float


class ComparedRun(TypedDict):
    """Describe a compared run. Curves are empty without a stored history."""

    job: str
    name: str
    attempt: int
    recorded: bool
    """True if the history of the run is stored."""
    curve: Curve
    validation: Validation
    logged: Validation
    """Loss that a script reported, by the steps that the script numbers."""
    traffic: list[RunTraffic]
    parts: MeanStepParts | None
    plan: PredictedRun | dict[str, Any]
    """Prediction for the run. Empty if the run has no prediction."""


class Comparison(TypedDict):
    """Compare runs in the order of the request."""

    jobs: list[ComparedRun]
    differences: list[Difference]


class StoredTable(TypedDict):
    """Describe a stored table."""

    rows: int
    bytes: int


StoredAttempt = TypedDict(
    "StoredAttempt",
    {
        "attempt": int,
        "ended": bool,  # True if the attempt has ended, so the data is final.
        "from": float | None,
        "to": float | None,
        "bytes": int,
        "tables": dict[str, StoredTable],
        "merged_s": int,  # Number of seconds that each row of the oldest traffic covers.
        "raw_dropped": int,  # Number of traced steps that were deleted to save space.
    },
)
"""The stored history of an attempt."""


class History(TypedDict):
    """List the stored attempts of a job, oldest first."""

    job: str
    attempts: list[StoredAttempt]


TableRows = TypedDict(
    "TableRows",
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
