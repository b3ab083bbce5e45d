"""Return all that the job page shows of an attempt, reduced to what a screen can show."""

from __future__ import annotations

import math

from contracts.telemetry.steps import Cell
from jobs.runs.history.queries.schemas import (
    BinnedTraffic,
    Columns,
    Counters,
    LastLoss,
    Snapshot,
    StreamPosition,
    Traffic,
)
from jobs.runs.history.queries.step_parts import get_parts_by_rank
from jobs.runs.history.store.query import HistoryTables, query_history
from jobs.runs.history.store.schema import GAUGES, HistoryState, make_state

MAX_POINTS = 4000  # per curve
MAX_BINS, MIN_BINS = 600, 60  # of traffic
MAX_TRAFFIC_VALUES = 100_000  # bins times ranks, axes, and ops
MAX_RECENT_VALUES = 25_000  # of the last seconds
RECENT_S = 61
MAX_MARKS = 2000
MAX_GAUGES = 6000  # points of all ranks and hosts
MAX_LINES, MAX_LOG_ITEMS = 200, 2000  # log lines per rank, log items in total

_BYTES = "least(sum(payload_bytes), 9223372036854775807)::BIGINT"  # sums of 128 bits are slow to fetch
_GAUGE_NAMES = [name for name in GAUGES.names if name not in ("rank", "node", "host", "time")]


def get_snapshot(job: str, attempt: int) -> Snapshot:
    """Return the snapshot of an attempt. Raises NoHistoryError, BusyError."""
    return query_history(job, attempt, _read_snapshot)


def _read_snapshot(tables: HistoryTables) -> Snapshot:
    manifest = tables.manifest
    state: HistoryState = tables.state or make_state()
    lost = {rank["node"] for rank in state["ranks"].values() if rank["gap"] is not None}
    stride = _get_stride(tables)
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
        "stride": stride,
        "curve": _read_curve(tables, stride),
        "last_loss": _read_last_loss(tables),
        "parts": get_parts_by_rank(tables),
        "marks": _read_marks(tables),
        "ranks": [
            {
                "rank": number,
                "node": rank["node"],
                "phase": rank["phase"],
                "dropped": rank["dropped"],
                "ran": rank["ran"],
            }
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
    }


def _get_stride(tables: HistoryTables) -> int:
    [(steps,)] = tables.fetch_rows("SELECT count(DISTINCT step) FROM steps")
    return 2 ** max(0, math.ceil(math.log2(steps / MAX_POINTS))) if steps else 1


def _read_curve(tables: HistoryTables, stride: int) -> Columns:
    """Return one point per step: of the lowest rank, and the loss of any rank."""
    return tables.fetch_columns(
        "SELECT step, arg_min(time, rank) AS time, arg_min(step_s, rank) AS step_s,"
        " arg_min(tokens, rank) AS tokens, max(loss) AS loss, max(grad_norm) AS grad_norm,"
        " max(learning_rate) AS learning_rate"
        " FROM steps WHERE step % ? = 0 OR over > 1 GROUP BY step ORDER BY step",
        stride,
    )


def _read_last_loss(tables: HistoryTables) -> LastLoss | None:
    """Return the latest loss, whose step the curve may skip."""
    rows = tables.fetch_rows("SELECT step, loss FROM steps WHERE loss IS NOT NULL ORDER BY step DESC LIMIT 1")
    return {"step": rows[0][0], "loss": rows[0][1]} if rows else None


def _read_marks(tables: HistoryTables) -> Columns:
    return tables.fetch_columns(
        "SELECT * FROM (SELECT * FROM marks WHERE kind <> 'start' ORDER BY time DESC LIMIT ?) ORDER BY time", MAX_MARKS
    )


def _serialize_counters(cells: list[tuple[int, Cell]]) -> Counters:
    key_indexes: dict[tuple[str, str, str, int], int] = {}
    counters: Counters = {
        "keys": [],
        "rank": [],
        "key": [],
        "count": [],
        "completed": [],
        "payload_bytes": [],
        "algorithmic_bytes": [],
        "busy_s": [],
    }
    for rank, cell in cells:
        key = (cell["phase"], cell["op"], cell["axis"], cell["group_size"])
        counters["rank"].append(rank)
        counters["key"].append(key_indexes.setdefault(key, len(key_indexes)))
        counters["count"].append(cell["count"])
        counters["completed"].append(cell["completed"])
        counters["payload_bytes"].append(cell["payload_bytes"])
        counters["algorithmic_bytes"].append(cell["algorithmic_bytes"])
        counters["busy_s"].append(round(cell["busy_s"], 9))
    counters["keys"] = list(key_indexes)
    return counters


def _read_traffic(tables: HistoryTables) -> Traffic:
    """Return the traffic of the run. Bins are powers of two in seconds and at least as wide as merged rows."""
    [(first, last)] = tables.fetch_rows("SELECT min(second), max(second) FROM traffic")
    if first is None:
        return {"width_s": 1.0, "start": 0, "length": 0, "rows": []}
    max_bins = max(MIN_BINS, min(MAX_BINS, MAX_TRAFFIC_VALUES // _count_series(tables)))
    width = tables.manifest["merged_s"]
    while last // width - first // width >= max_bins:
        width *= 2
    start, length = first // width, last // width - first // width + 1
    rows = tables.fetch_rows(
        "SELECT rank, axis, op, list(bin), list(bytes) FROM"
        f" (SELECT rank, axis, op, second // ? - ? AS bin, {_BYTES} AS bytes FROM traffic GROUP BY ALL)"
        " GROUP BY rank, axis, op ORDER BY rank, axis, op",
        width,
        start,
    )
    return {
        "width_s": float(width),
        "start": start,
        "length": length,
        "rows": [_make_bins(length, *row) for row in rows],
    }


def _count_series(tables: HistoryTables) -> int:
    [(series,)] = tables.fetch_rows("SELECT count(*) FROM (SELECT DISTINCT rank, axis, op FROM traffic)")
    return max(1, int(series))


def _make_bins(length: int, rank: int, axis: str, op: str, bins: list[int], amounts: list[int]) -> BinnedTraffic:
    sums = [0] * length
    for index, amount in zip(bins, amounts, strict=True):
        sums[index] = amount
    return {"rank": rank, "axis": axis, "op": op, "bytes": sums}


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
    [counts] = tables.fetch_rows(f"SELECT {', '.join(f'count({name})' for name in _GAUGE_NAMES)} FROM gauges")
    means = ", ".join(
        f"round(avg({name}), 3) AS {name}" for name, count in zip(_GAUGE_NAMES, counts, strict=True) if count
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
