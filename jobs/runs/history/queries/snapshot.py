"""Return all that the job page shows of an attempt, reduced to what a screen can show.

Units are bytes, seconds, and Unix seconds of the board's clock.
"""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from contracts.telemetry.items import Cell, CheckpointItem, ProcessItem, StallItem
from contracts.telemetry.results import DryRunItem, MemoryParts, ProofItem, VerdictRow
from jobs.runs.history.queries.metrics import ScriptMetrics, read_metrics
from jobs.runs.history.queries.step_breakdown import get_parts_by_rank
from jobs.runs.history.store.query import Columns, HistoryTables, query_history
from jobs.runs.history.store.schema import GAUGE_NAMES, HistoryState, OpenLog, Progress, StartedStage, make_state

MAX_POINTS = 4000  # per curve
MAX_BINS, MIN_BINS = 600, 60  # of traffic
MAX_TRAFFIC_VALUES = 100_000  # bins times ranks, axes, and ops
MAX_RECENT_VALUES = 25_000  # of the last seconds
RECENT_S = 61
MAX_MARKS = 2000
MAX_GAUGES = 6000  # points of all ranks and hosts
MAX_LINES, MAX_LOG_ITEMS = 200, 2000  # log lines per rank, log items in total

_BYTES = "least(sum(payload_bytes), 9223372036854775807)::BIGINT"  # sums of 128 bits are slow to fetch


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
    sample_rates: Annotated[
        list[tuple[int, float]], Field(description="Samples and seconds of the last steps with known samples.")
    ]
    stride: Annotated[int, Field(description="Steps of the curve are multiples of this number.")]
    curve: Annotated[
        Columns,
        Field(description="Columns of the curve: step, time, step_s, tokens, samples, loss, grad_norm, learning_rate."),
    ]
    last_loss: Annotated[LastLoss | None, Field(description="Latest step with a finite loss.")]
    parts: Annotated[
        Columns,
        Field(
            description="Means per rank over the measured steps. Columns: step_s, data_s, optimizer_s, exposed, hidden."
        ),
    ]
    metrics: Annotated[ScriptMetrics, Field(description="Metrics that a script reported.")]
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
    open_logs: Annotated[
        list[OpenLog], Field(description="Lines after the last log lines that can still change, as a progress bar.")
    ]


def get_snapshot(job: str, attempt: int) -> Snapshot:
    """Return the snapshot of an attempt. Raises NoHistoryError, BusyError."""
    return query_history(job, attempt, _read_snapshot)


def _read_snapshot(tables: HistoryTables) -> Snapshot:
    manifest = tables.manifest
    state: HistoryState = tables.state or make_state()
    lost = {rank["node"] for rank in state["ranks"].values() if rank["gap"] is not None}
    [(num_steps,)] = tables.fetch_rows("SELECT count(DISTINCT step) FROM steps")
    stride = 2 ** max(0, math.ceil(math.log2(num_steps / MAX_POINTS))) if num_steps else 1
    # The curve may skip the latest step with a loss.
    last_loss = tables.fetch_rows("SELECT step, loss FROM steps WHERE loss IS NOT NULL ORDER BY step DESC LIMIT 1")
    followed: list[StreamPosition] = [
        {
            "node": int(node),
            "after": position["after"],
            "time": position["time"],
            "host": position.get("host"),
            "lost": int(node) in lost,
        }
        for node, position in manifest["nodes"].items()
    ]
    ranks = sorted(state["ranks"].items())
    return {
        "job": manifest["job"],
        "attempt": manifest["attempt"],
        "ended": manifest["ended"] is not None,
        "lost": state["lost"],
        "time": manifest["last"],
        "followed": followed,
        "progress": state["progress"],
        "step_times": state["step_times"],
        "sample_rates": [(n, seconds) for n, seconds in state.get("sample_rates", []) if n is not None],
        "stride": stride,
        "curve": _read_curve(tables, stride),
        "last_loss": {"step": last_loss[0][0], "loss": last_loss[0][1]} if last_loss else None,
        "parts": get_parts_by_rank(tables),
        "metrics": read_metrics(tables),
        "marks": tables.fetch_columns(
            "SELECT * FROM (SELECT * FROM marks WHERE kind <> 'start' ORDER BY time DESC LIMIT ?) ORDER BY time",
            MAX_MARKS,
        ),
        "ranks": [
            {"rank": number, **{name: rank[name] for name in ("node", "phase", "dropped", "ran")}}  # type: ignore[typeddict-item]
            for number, rank in ranks
        ],
        "cells": _serialize_counters([(number, cell) for number, rank in ranks for cell in rank["cells"].values()]),
        "exact": _serialize_counters([(number, cell) for number, rank in ranks for cell in rank["exact"]]),
        "verdicts": {str(rank): rows for rank, rows in state["verdicts"].items()},
        "peaks": {str(rank): peak for rank, peak in state["peaks"].items()},
        "memory": {str(rank): parts for rank, parts in state.get("memory", {}).items()},
        "proof": state["proof"],
        "dry_runs": list(state["dry_runs"].values()),
        "checkpoints": state["checkpoints"],
        "starts": state["starts"],
        "standing": list(state["standing"].values()),
        "processes": list(state["processes"].values()),
        "traffic": _read_traffic(tables),
        "recent": _read_recent(tables),
        "gauges": _read_gauges(tables),
        "logs": _read_logs(tables),
        "open_logs": list(state.get("open_logs", {}).values()),
    }


def _read_curve(tables: HistoryTables, stride: int) -> Columns:
    """Return one point per step: of the lowest rank, and the loss of any rank."""
    return tables.fetch_columns(
        "SELECT step, arg_min(time, rank) AS time, arg_min(step_s, rank) AS step_s,"
        " arg_min(tokens, rank) AS tokens, arg_min(samples, rank) AS samples, max(loss) AS loss,"
        " max(grad_norm) AS grad_norm, max(learning_rate) AS learning_rate"
        " FROM steps WHERE step % ? = 0 OR over > 1 GROUP BY step ORDER BY step",
        stride,
    )


def _serialize_counters(cells: list[tuple[int, Cell]]) -> Counters:
    key_indexes: dict[tuple[str, str, str, int], int] = {}
    keys = [(cell["phase"], cell["op"], cell["axis"], cell["group_size"]) for _, cell in cells]
    return {
        "rank": [rank for rank, _ in cells],
        "key": [key_indexes.setdefault(key, len(key_indexes)) for key in keys],
        "count": [cell["count"] for _, cell in cells],
        "completed": [cell["completed"] for _, cell in cells],
        "payload_bytes": [cell["payload_bytes"] for _, cell in cells],
        "algorithmic_bytes": [cell["algorithmic_bytes"] for _, cell in cells],
        "busy_s": [round(cell["busy_s"], 9) for _, cell in cells],
        "keys": list(key_indexes),
    }


def _read_traffic(tables: HistoryTables) -> Traffic:
    """Return the traffic of the run. Bins are powers of two in seconds."""
    bins = tables.get_traffic_bins(max(MIN_BINS, min(MAX_BINS, MAX_TRAFFIC_VALUES // _count_series(tables))))
    if bins is None:
        return {"width_s": 1.0, "start": 0, "length": 0, "rows": []}
    found = tables.fetch_rows(
        "SELECT rank, axis, op, list(bin), list(bytes) FROM"
        f" (SELECT rank, axis, op, second // ? - ? AS bin, {_BYTES} AS bytes FROM traffic GROUP BY ALL)"
        " GROUP BY rank, axis, op ORDER BY rank, axis, op",
        *(bins.width_s, bins.start),
    )
    rows: list[BinnedTraffic] = []
    for rank, axis, op, indexes, amounts in found:
        sums = [0] * bins.length
        for index, amount in zip(indexes, amounts, strict=True):
            sums[index] = amount
        rows.append({"rank": rank, "axis": axis, "op": op, "bytes": sums})
    return {"width_s": float(bins.width_s), "start": bins.start, "length": bins.length, "rows": rows}


def _count_series(tables: HistoryTables) -> int:
    [(series,)] = tables.fetch_rows("SELECT count(*) FROM (SELECT DISTINCT rank, axis, op FROM traffic)")
    return max(1, int(series))


def _read_recent(tables: HistoryTables) -> Columns:
    """Return traffic per second of the last minute, or less if rows are merged or ranks are many."""
    seconds = min(RECENT_S, max(1, MAX_RECENT_VALUES // _count_series(tables)))
    first, last, merged_s = tables.manifest["first"], tables.manifest["last"], tables.manifest["merged_s"]
    if merged_s > 1 and first is not None and last is not None:
        seconds = min(seconds, int((last - first) / merged_s))
    return tables.fetch_columns(
        f"SELECT second, rank, axis, op, {_BYTES} AS bytes FROM traffic"
        " WHERE second > (SELECT max(second) FROM traffic) - ? GROUP BY ALL ORDER BY second, rank, axis, op",
        seconds,
    )


def _read_gauges(tables: HistoryTables) -> Columns:
    [(first, last, series)] = tables.fetch_rows("SELECT min(time), max(time), count(DISTINCT (node, rank)) FROM gauges")
    width = 1.0 if first is None else max(1.0, (last - first) / max(1, MAX_GAUGES // series))
    [counts] = tables.fetch_rows(f"SELECT {', '.join(f'count({name})' for name in GAUGE_NAMES)} FROM gauges")
    means = ", ".join(
        f"round(avg({name}), 3) AS {name}" for name, count in zip(GAUGE_NAMES, counts, strict=True) if count
    )
    if not means:
        return {}
    return tables.fetch_columns(
        f"SELECT node, rank, max(time) AS time, {means} FROM gauges"
        " GROUP BY node, rank, floor(time / ?) ORDER BY node, rank, time",
        width,
    )


def _read_logs(tables: HistoryTables) -> Columns:
    """Return the log items with the last lines of each rank."""
    behind = "sum(len(lines)) OVER (PARTITION BY node, rank ORDER BY first DESC) - len(lines) AS behind"
    return tables.fetch_columns(
        f"SELECT node, rank, time, first, lines, skipped FROM (SELECT *, {behind} FROM logs)"
        " WHERE behind < ? ORDER BY time DESC LIMIT ?",
        MAX_LINES,
        MAX_LOG_ITEMS,
    )
