"""Everything the job page shows of an attempt, condensed to what a screen can hold."""

from __future__ import annotations

import math

from contracts.telemetry.steps import Cell
from jobs.runs.history.queries.parts import parts_by_rank
from jobs.runs.history.queries.shapes import BinnedTraffic, Columns, Counters, Followed, LastLoss, Snapshot, Traffic
from jobs.runs.history.store.query import Tables, ask
from jobs.runs.history.store.state import State, new_state
from jobs.runs.history.store.tables import GAUGES

MOST_POINTS = 4000  # of a curve
MOST_BINS, FEWEST_BINS = 600, 60  # of traffic
MOST_SUMS = 100_000  # of all its bins, ranks and keys
MOST_RECENT = 25_000  # of its last seconds: of very many ranks the bins of the whole run are as fine
RECENT_S = 61
MOST_MARKS = 2000
MOST_GAUGES = 6000  # points of all ranks and hosts
MOST_LINES, MOST_ITEMS = 200, 2000  # log lines of each rank; items of lines in all

_BYTES = "least(sum(payload_bytes), 9223372036854775807)::BIGINT"  # a sum has 128 bits, which are slow to fetch
_GAUGES = [name for name in GAUGES.names if name not in ("rank", "node", "host", "time")]


def snapshot(job: str, attempt: int) -> Snapshot:
    """Raises GoneError, BusyError."""
    return ask(job, attempt, _snapshot)


def _snapshot(tables: Tables) -> Snapshot:
    manifest = tables.manifest
    state: State = tables.state or new_state()
    lost = {rank["node"] for rank in state["ranks"].values() if rank["gap"] is not None}
    stride = _stride(tables)
    followed: list[Followed] = [
        {
            "node": int(node),
            "after": where["after"],
            "time": where["time"],
            "host": where.get("host"),
            "lost": int(node) in lost,
        }
        for node, where in manifest["nodes"].items()
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
        "curve": _curve(tables, stride),
        "last_loss": _last_loss(tables),
        "parts": parts_by_rank(tables),
        "marks": _marks(tables),
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
        "cells": _counters([(number, cell) for number, rank in ranks for cell in rank["cells"].values()]),
        "exact": _counters([(number, cell) for number, rank in ranks for cell in rank["exact"]]),
        "verdicts": {str(rank): rows for rank, rows in state["verdicts"].items()},
        "peaks": {str(rank): peak for rank, peak in state["peaks"].items()},
        "memory": {str(rank): parts for rank, parts in state.get("memory", {}).items()},
        "proof": state["proof"],
        "dry_runs": list(state["dry_runs"].values()),
        "checkpoints": state["checkpoints"],
        "starts": state["starts"],
        "standing": list(state["standing"].values()),
        "processes": list(state["processes"].values()),
        "traffic": _traffic(tables),
        "recent": _recent(tables),
        "gauges": _gauges(tables),
        "logs": _logs(tables),
    }


def _stride(tables: Tables) -> int:
    [(steps,)] = tables.rows("SELECT count(DISTINCT step) FROM steps")
    return 2 ** max(0, math.ceil(math.log2(steps / MOST_POINTS))) if steps else 1


def _curve(tables: Tables, stride: int) -> Columns:
    """What ranks told of one step in one point: of the lowest rank, and of whoever knows the loss."""
    return tables.columns(
        "SELECT step, arg_min(time, rank) AS time, arg_min(step_s, rank) AS step_s,"
        " arg_min(tokens, rank) AS tokens, max(loss) AS loss, max(grad_norm) AS grad_norm,"
        " max(learning_rate) AS learning_rate"
        " FROM steps WHERE step % ? = 0 OR over > 1 GROUP BY step ORDER BY step",
        stride,
    )


def _last_loss(tables: Tables) -> LastLoss | None:
    """Its step may be between two of the curve."""
    found = tables.rows("SELECT step, loss FROM steps WHERE loss IS NOT NULL ORDER BY step DESC LIMIT 1")
    return {"step": found[0][0], "loss": found[0][1]} if found else None


def _marks(tables: Tables) -> Columns:
    return tables.columns(
        "SELECT * FROM (SELECT * FROM marks WHERE kind <> 'start' ORDER BY time DESC LIMIT ?) ORDER BY time", MOST_MARKS
    )


def _counters(told: list[tuple[int, Cell]]) -> Counters:
    places: dict[tuple[str, str, str, int], int] = {}
    found: Counters = {
        "keys": [],
        "rank": [],
        "key": [],
        "count": [],
        "completed": [],
        "payload_bytes": [],
        "algorithmic_bytes": [],
        "busy_s": [],
    }
    for rank, cell in told:
        place = (cell["phase"], cell["op"], cell["axis"], cell["group_size"])
        found["rank"].append(rank)
        found["key"].append(places.setdefault(place, len(places)))
        found["count"].append(cell["count"])
        found["completed"].append(cell["completed"])
        found["payload_bytes"].append(cell["payload_bytes"])
        found["algorithmic_bytes"].append(cell["algorithmic_bytes"])
        found["busy_s"].append(round(cell["busy_s"], 9))
    found["keys"] = list(places)
    return found


def _traffic(tables: Tables) -> Traffic:
    """Of the whole run, in bins whose width is a second times a power of two: none narrower than a merged row."""
    [(first, last)] = tables.rows("SELECT min(second), max(second) FROM traffic")
    if first is None:
        return {"width_s": 1.0, "start": 0, "length": 0, "rows": []}
    most = max(FEWEST_BINS, min(MOST_BINS, MOST_SUMS // _series(tables)))
    width = tables.manifest["merged_s"]
    while last // width - first // width >= most:
        width *= 2
    start, length = first // width, last // width - first // width + 1
    found = tables.rows(
        "SELECT rank, axis, op, list(bin), list(bytes) FROM"
        f" (SELECT rank, axis, op, second // ? - ? AS bin, {_BYTES} AS bytes FROM traffic GROUP BY ALL)"
        " GROUP BY rank, axis, op ORDER BY rank, axis, op",
        width,
        start,
    )
    return {"width_s": float(width), "start": start, "length": length, "rows": [_row(length, *row) for row in found]}


def _series(tables: Tables) -> int:
    [(series,)] = tables.rows("SELECT count(*) FROM (SELECT DISTINCT rank, axis, op FROM traffic)")
    return max(1, int(series))


def _row(length: int, rank: int, axis: str, op: str, bins: list[int], amounts: list[int]) -> BinnedTraffic:
    sums = [0] * length
    for place, amount in zip(bins, amounts, strict=True):
        sums[place] = amount
    return {"rank": rank, "axis": axis, "op": op, "bytes": sums}


def _recent(tables: Tables) -> Columns:
    """By second: the last minute, or as much of it as was not merged, or of very many ranks as MOST_RECENT are."""
    seconds = min(RECENT_S, max(1, MOST_RECENT // _series(tables)))
    first, last, merged_s = tables.manifest["first"], tables.manifest["last"], tables.manifest["merged_s"]
    if merged_s > 1 and first is not None and last is not None:
        seconds = min(seconds, int((last - first) / merged_s))
    return tables.columns(
        f"SELECT second, rank, axis, op, {_BYTES} AS bytes FROM traffic"
        " WHERE second > (SELECT max(second) FROM traffic) - ? GROUP BY ALL ORDER BY second, rank, axis, op",
        seconds,
    )


def _gauges(tables: Tables) -> Columns:
    [(first, last, series)] = tables.rows("SELECT min(time), max(time), count(DISTINCT (node, rank)) FROM gauges")
    width = 1.0 if first is None else max(1.0, (last - first) / max(1, MOST_GAUGES // series))
    [told] = tables.rows(f"SELECT {', '.join(f'count({name})' for name in _GAUGES)} FROM gauges")
    means = ", ".join(f"round(avg({name}), 3) AS {name}" for name, count in zip(_GAUGES, told, strict=True) if count)
    if not means:
        return {}
    return tables.columns(
        f"SELECT node, rank, max(time) AS time, {means} FROM gauges"
        " GROUP BY node, rank, floor(time / ?) ORDER BY node, rank, time",
        width,
    )


def _logs(tables: Tables) -> Columns:
    """Items that hold the last lines of each rank."""
    behind = "sum(len(lines)) OVER (PARTITION BY node, rank ORDER BY first DESC) - len(lines) AS behind"
    return tables.columns(
        f"SELECT node, rank, time, first, lines, skipped FROM (SELECT *, {behind} FROM logs)"
        " WHERE behind < ? ORDER BY time DESC LIMIT ?",
        MOST_LINES,
        MOST_ITEMS,
    )
