"""What is told of histories. Bytes, seconds, unix seconds by the board's clock; columns are of one length."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from contracts.telemetry.health import ProcessItem, StallItem
from contracts.telemetry.results import DryRunItem, MemoryParts, ProofItem, VerdictRow
from contracts.telemetry.steps import CheckpointItem
from jobs.runs.history.store.state import Progress, Started

Columns = dict[str, list[Any]]


class TableKept(TypedDict):
    """Of one table."""

    rows: int
    bytes: int


AttemptKept = TypedDict(
    "AttemptKept",
    {
        "attempt": int,
        "ended": Annotated[bool, Field(description="True if the attempt has ended, so the data is final.")],
        "from": float | None,
        "to": float | None,
        "bytes": int,
        "tables": dict[str, TableKept],
        "merged_s": Annotated[int, Field(description="Number of seconds that each row of the oldest traffic covers.")],
        "raw_dropped": Annotated[int, Field(description="Number of traced steps that were deleted to save space.")],
    },
)
AttemptKept.__doc__ = "The stored history of an attempt."

Rows = TypedDict(
    "Rows",
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
Rows.__doc__ = "Rows or time bins of a history table."


class History(TypedDict):
    """What is kept of a job, oldest attempt first."""

    job: str
    attempts: list[AttemptKept]


class Followed(TypedDict):
    """How far a member's stream is in the answer: `after` is where to follow it from."""

    node: int
    after: str
    time: float | None
    host: str | None
    lost: Annotated[bool, Field(description="True if some telemetry was deleted before the recorder read it.")]


class RankNow(TypedDict):
    """A rank as it last was. `ran`: steps of this run that `exact` counters are of."""

    rank: int
    node: int
    phase: str | None
    dropped: int
    ran: int


class Counters(TypedDict):
    """Cumulative counters in columns; `key` is a place in `keys`: [phase, op, axis, group size]."""

    keys: list[tuple[str, str, str, int]]
    rank: list[int]
    key: list[int]
    count: list[int]
    completed: list[int]
    payload_bytes: list[int]
    algorithmic_bytes: list[int]
    busy_s: list[float]


class BinnedTraffic(TypedDict):
    """Payload bytes of a rank, axis and op by bin."""

    rank: int
    axis: str
    op: str
    bytes: list[int]


class Traffic(TypedDict):
    """Bins of `width_s`; bin 0 is number `start` since 1970, and there are `length`."""

    width_s: float
    start: int
    length: int
    rows: list[BinnedTraffic]


class LastLoss(TypedDict):
    step: int
    loss: float


class Snapshot(TypedDict):
    """All that the page of an attempt shows, up to a position in each member's stream."""

    job: str
    attempt: int
    ended: bool
    lost: bool
    time: float | None
    followed: list[Followed]
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
    ranks: list[RankNow]
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
    starts: list[Started]
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
