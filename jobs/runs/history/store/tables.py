"""The tables of an attempt's history. Bytes, seconds, unix seconds by the board's clock."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

_BY_AXIS: Final = pa.map_(pa.string(), pa.float32())

STEPS: Final = pa.schema(
    {
        "rank": pa.int32(),
        "step": pa.int64(),  # steps completed, from 1
        "over": pa.int64(),  # steps that this row is the mean of; more than 1 where history was merged
        "time": pa.float64(),
        "step_s": pa.float32(),
        "tokens": pa.int64(),  # of one step
        "loss": pa.float64(),  # null on ranks that do not know it
        "grad_norm": pa.float64(),
        "learning_rate": pa.float64(),
        "data_s": pa.float32(),  # null, as what follows, where the rank told no parts
        "optimizer_s": pa.float32(),
        "exposed": _BY_AXIS,
        "hidden": _BY_AXIS,
    }
)
# What the counters rose by in a second; all rows of a counter add up to it. Of a gap, in the second in which it began.
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
        "peer": pa.int32(),  # -1 but of a send or receive
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
MARKS: Final = pa.schema(
    {
        "time": pa.float64(),
        "kind": pa.string(),  # checkpoint, validation, phase, resume, start, gap, fault, end
        "rank": pa.int32(),
        "step": pa.int64(),
        "text": pa.string(),
        "value": pa.float64(),  # of a validation its loss, of a checkpoint its bytes, of a gap when it was over
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
}
RAW: Final = ("calls", "spans")  # steps event by event: the first to go
