"""Define the JSON of stored histories. Units are bytes, seconds, and Unix seconds of the board's clock."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from contracts.telemetry.health import ProcessItem, StallItem
from contracts.telemetry.results import DryRunItem, MemoryParts, ProofItem, VerdictRow
from contracts.telemetry.steps import CheckpointItem
from jobs.runs.history.store.schema import Progress, StartedStage

Columns = dict[str, list[Any]]


class StoredTable(TypedDict):
    """Describe a stored table."""

    rows: int
    bytes: int


StoredAttempt = TypedDict(
    "StoredAttempt",
    {
        "attempt": int,
        "ended": Annotated[bool, Field(description="True if the attempt has ended, so the data is final.")],
        "from": float | None,
        "to": float | None,
        "bytes": int,
        "tables": dict[str, StoredTable],
        "merged_s": Annotated[int, Field(description="Number of seconds that each row of the oldest traffic covers.")],
        "raw_dropped": Annotated[int, Field(description="Number of traced steps that were deleted to save space.")],
    },
)
StoredAttempt.__doc__ = "The stored history of an attempt."

TableRows = TypedDict(
    "TableRows",
    {
        "table": str,
        "attempt": int,
        "from": float | None,
        "to": float | None,
        "width_s": Annotated[float | None, Field(description="Width of a time bin in seconds. null for raw rows.")],
        "columns": Annotated[
            Columns,
            Field(description="Columns by name, all of the same length. The `time` of a bin is the start of the bin."),
        ],
    },
)
TableRows.__doc__ = "Rows or time bins of a history table."


class History(TypedDict):
    """List the stored attempts of a job, oldest first."""

    job: str
    attempts: list[StoredAttempt]


class StreamPosition(TypedDict):
    """Locate the end of a node's stream in the answer. A client continues after `after`."""

    node: int
    after: str
    time: float | None
    host: str | None
    lost: Annotated[bool, Field(description="True if some telemetry was deleted before the recorder read it.")]


class RankState(TypedDict):
    """Describe the latest state of a rank. `ran`: the steps that the `exact` counters cover."""

    rank: int
    node: int
    phase: str | None
    dropped: int
    ran: int


class Counters(TypedDict):
    """Hold cumulative counters in columns. `key` is an index of `keys`: [phase, op, axis, group size]."""

    keys: list[tuple[str, str, str, int]]
    rank: list[int]
    key: list[int]
    count: list[int]
    completed: list[int]
    payload_bytes: list[int]
    algorithmic_bytes: list[int]
    busy_s: list[float]


class BinnedTraffic(TypedDict):
    """Hold payload bytes of a rank, axis, and op per bin."""

    rank: int
    axis: str
    op: str
    bytes: list[int]


class Traffic(TypedDict):
    """Hold bins of `width_s`. The first of `length` bins has the number `start` since 1970."""

    width_s: float
    start: int
    length: int
    rows: list[BinnedTraffic]


class LastLoss(TypedDict):
    """Hold the latest finite loss."""

    step: int
    loss: float


class Snapshot(TypedDict):
    """Hold all that the page of an attempt shows, up to a position in each node's stream."""

    job: str
    attempt: int
    ended: bool
    lost: bool
    time: float | None
    followed: list[StreamPosition]
    progress: Progress | None
    step_times: list[float]
    stride: Annotated[int, Field(description="Steps of the curve are multiples of this number.")]
    curve: Annotated[
        Columns, Field(description="Columns of the curve: step, time, step_s, tokens, loss, grad_norm, learning_rate.")
    ]
    last_loss: Annotated[LastLoss | None, Field(description="Latest step with a finite loss.")]
    parts: Annotated[
        Columns,
        Field(
            description="Means per rank over the measured steps. Columns: step_s, data_s, optimizer_s, exposed, hidden."
        ),
    ]
    marks: Annotated[Columns, Field(description="Events of the run. Columns: time, kind, rank, step, text, value.")]
    ranks: list[RankState]
    cells: Counters
    exact: Annotated[
        Counters, Field(description="Traffic counters of the phase `step`, up to the step `ran` of each rank.")
    ]
    verdicts: dict[str, list[VerdictRow]]
    peaks: dict[str, int]
    memory: Annotated[dict[str, MemoryParts], Field(description="Memory breakdown of each rank in its last step.")]
    proof: ProofItem | None
    dry_runs: list[DryRunItem]
    checkpoints: list[CheckpointItem]
    starts: list[StartedStage]
    standing: Annotated[list[StallItem], Field(description="Stalled ranks.")]
    processes: Annotated[
        list[ProcessItem], Field(description="Process state of ranks that are stalled, silent, stopped, or throttled.")
    ]
    traffic: Traffic
    recent: Annotated[Columns, Field(description="Traffic of the last minute. Columns: second, rank, axis, op, bytes.")]
    gauges: Annotated[
        Columns, Field(description="Mean of each gauge per time bin. Columns: node, rank, time, and each gauge.")
    ]
    logs: Annotated[
        Columns, Field(description="Last log lines of each rank. Columns: node, rank, time, first, lines, skipped.")
    ]
