"""Define the tables and the state of a stored history, in bytes, seconds, and Unix seconds of the board's clock."""

from __future__ import annotations

from typing import Final, NotRequired

import pyarrow as pa
from typing_extensions import TypedDict

from contracts.telemetry.items import Cell, CheckpointItem, ProcessItem, StallItem
from contracts.telemetry.metrics import LeftOutMetrics
from contracts.telemetry.results import DryRunItem, MemoryParts, ProofItem, VerdictRow

_BY_AXIS: Final = pa.map_(pa.string(), pa.float32())

STEPS: Final = pa.schema(
    {
        "rank": pa.int32(),
        "step": pa.int64(),  # steps completed, from 1
        "over": pa.int64(),  # steps of which this row is the mean, more than 1 if rows were merged
        "time": pa.float64(),
        "step_s": pa.float32(),
        "tokens": pa.int64(),  # of one step, null if unknown
        "samples": pa.int64(),
        "loss": pa.float64(),  # null on ranks without the loss
        "grad_norm": pa.float64(),
        "learning_rate": pa.float64(),
        "data_s": pa.float32(),  # null if unknown, then a part of compute
        "optimizer_s": pa.float32(),
        "exposed": _BY_AXIS,  # null if the rank reported no parts
        "hidden": _BY_AXIS,
    }
)
# Increases of counters per second. The increase over a gap is in the second in which the gap began.
TRAFFIC: Final = pa.schema(
    {
        "second": pa.int64(),
        "rank": pa.int32(),
        "phase": pa.string(),
        "op": pa.string(),
        "axis": pa.string(),
        "group_size": pa.int64(),
        "calls": pa.int64(),
        "completed": pa.int64(),
        "payload_bytes": pa.int64(),
        "algorithmic_bytes": pa.int64(),
        "busy_s": pa.float64(),
    }
)
CALLS: Final = pa.schema(
    {
        "step": pa.int64(),
        "rank": pa.int32(),
        "axis": pa.string(),
        "ranks": pa.list_(pa.int32()),
        "nth": pa.int64(),
        "sequence": pa.int64(),
        "op": pa.string(),
        "issued": pa.float64(),
        "blocked_s": pa.float32(),
        "ended": pa.float64(),
        "payload_bytes": pa.int64(),
        "peer": pa.int32(),  # -1 except for sends and receives
    }
)
SPANS: Final = pa.schema(
    {
        "step": pa.int64(),
        "rank": pa.int32(),
        "work": pa.string(),
        "chunk": pa.int32(),
        "micro_batch": pa.int64(),
        "began": pa.float64(),
        "ended": pa.float64(),
    }
)
GAUGES: Final = pa.schema(
    {
        "rank": pa.int32(),  # -1: the host
        "node": pa.int32(),
        "host": pa.string(),
        "time": pa.float64(),
        "resident_bytes": pa.int64(),
        "allocated_bytes": pa.int64(),
        "reserved_bytes": pa.int64(),
        "cpu": pa.float64(),
        "sent_bytes_s": pa.float64(),
        "received_bytes_s": pa.float64(),
        "gpu_percent": pa.float64(),
        "gpu_clock_mhz": pa.float64(),
        "gpu_power_w": pa.float64(),
        "gpu_celsius": pa.float64(),
    }
)
# Values that a script reported. The script numbers the steps, and the rows of old steps are thinned.
METRICS: Final = pa.schema(
    {
        "rank": pa.int32(),
        "step": pa.int64(),
        "time": pa.float64(),
        "name": pa.string(),
        "value": pa.float64(),  # null if it is not finite
        "not_finite": pa.string(),  # nan, inf, -inf, or null
        "source": pa.string(),
    }
)
MARKS: Final = pa.schema(
    {
        "time": pa.float64(),
        "kind": pa.string(),  # checkpoint, validation, phase, resume, start, gap, fault, end
        "rank": pa.int32(),
        "step": pa.int64(),
        "text": pa.string(),
        "value": pa.float64(),  # loss of a validation, bytes of a checkpoint, end of a gap
    }
)
LOGS: Final = pa.schema(
    {
        "time": pa.float64(),
        "node": pa.int32(),
        "rank": pa.int32(),  # -1: the node's launcher
        "first": pa.int64(),
        "lines": pa.list_(pa.string()),
        "skipped": pa.int64(),
    }
)

TABLES: Final = {
    "steps": STEPS,
    "traffic": TRAFFIC,
    "gauges": GAUGES,
    "marks": MARKS,
    "calls": CALLS,
    "spans": SPANS,
    "logs": LOGS,
    "metrics": METRICS,
}
TRACED_TABLES: Final = ("calls", "spans")  # traced steps, deleted first
STEP_MEASURES: Final = ("step_s", "loss", "grad_norm", "learning_rate", "data_s", "optimizer_s")
COUNTERS: Final = ("calls", "completed", "payload_bytes", "algorithmic_bytes", "busy_s")
GAUGE_NAMES: Final = tuple(name for name in GAUGES.names if name not in ("rank", "node", "host", "time"))


class RankTotals(TypedDict):
    """Sum the items of one rank. `exact`: its cells of phase "step" when step `ran` ended."""

    node: int
    phase: str | None
    dropped: int
    ran: int
    exact: list[Cell]
    cells: dict[str, Cell]
    gap: tuple[float, float] | None  # the last gap of its stream
    stale: list[str]  # cells without news after the gap


class Progress(TypedDict):
    """Hold the progress as `webapp/static/js/store.js` does.

    `rate` and `sample_rate`: tokens and samples per second of rank 0's last steps. `over`: steps of which the last item
    is the mean.
    """

    step: int
    steps: int | None
    step_s: NotRequired[float]
    tokens: NotRequired[int | None]
    time: NotRequired[float]
    learning_rate: NotRequired[float | None]
    grad_norm: NotRequired[float | None]
    rate: float | None
    sample_rate: NotRequired[float | None]
    over: NotRequired[int]


class StartedStage(TypedDict):
    """Record a completed stage of the start. `rank`: -1 for a node."""

    node: int
    rank: int
    stage: str
    time: float


class OpenLog(TypedDict):
    """Lines of a log that can still change, which are not in a table."""

    node: int
    rank: int
    time: float
    first: int  # number of the first of these lines
    open: list[str]


class HistoryState(TypedDict):
    """Sum the streams of an attempt."""

    ranks: dict[int, RankTotals]
    progress: Progress | None
    step_times: list[float]  # last steps of rank 0
    sample_rates: NotRequired[list[tuple[int | None, float]]]  # samples and seconds of rank 0's last items
    verdicts: dict[int, list[VerdictRow]]
    peaks: dict[int, int]
    memory: NotRequired[dict[int, MemoryParts]]  # missing in histories of older versions
    proof: ProofItem | None
    dry_runs: dict[int, DryRunItem]
    checkpoints: list[CheckpointItem]
    starts: list[StartedStage]
    standing: dict[int, StallItem]  # stalled ranks
    open_logs: NotRequired[dict[str, OpenLog]]  # by node and rank
    processes: dict[int, ProcessItem]  # ranks without messages
    metric_names: NotRequired[list[str]]
    has_metric_fault: NotRequired[bool]
    metrics_left_out: NotRequired[dict[int, LeftOutMetrics]]  # by rank
    resumed: bool
    faulty_step: int
    refused: int  # invalid items
    lost: bool  # entries of a stream are missing


def make_state() -> HistoryState:
    return {
        "ranks": {},
        "progress": None,
        "step_times": [],
        "verdicts": {},
        "peaks": {},
        "proof": None,
        "dry_runs": {},
        "checkpoints": [],
        "starts": [],
        "standing": {},
        "processes": {},
        "resumed": False,
        "faulty_step": 0,
        "refused": 0,
        "lost": False,
    }
