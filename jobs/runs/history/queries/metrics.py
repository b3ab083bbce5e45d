"""Return the metrics that a script reported: one series per name, rank, and preferred source."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from contracts.telemetry.metrics import LeftOutMetrics, MetricSeries, find_loss, is_loss, select_series
from jobs.runs.history.store.query import HistoryTables

MAX_SERIES = 400
MAX_RANKS_PER_METRIC = 16
MAX_POINTS, MIN_POINTS = 4000, 100  # per series
MAX_ALL_POINTS = 100_000


class MetricCurve(TypedDict):
    """Hold a thinned metric of a rank in lists of equal length. A value that is not finite is null."""

    name: str
    source: Annotated[str, Field(description="Origin of the values: a function, a file, or log lines.")]
    rank: int
    step: Annotated[list[int], Field(description="Steps as the script numbers them.")]
    time: list[float]
    value: list[float | None]
    not_finite: Annotated[list[str | None], Field(description="nan, inf, or -inf for a value that is null.")]


class ScriptMetrics(TypedDict):
    """Hold the metrics that a script reported."""

    series: list[MetricCurve]
    hidden_series: Annotated[int, Field(description="Number of further series that the answer leaves out.")]
    left_out: Annotated[
        dict[str, LeftOutMetrics], Field(description="Number of values that each rank did not send, by reason.")
    ]


def read_metrics(tables: HistoryTables) -> ScriptMetrics:
    """Return the series of all metrics, with at most MAX_ALL_POINTS points."""
    known = list_series(tables)
    ranks: dict[str, int] = {}
    shown: list[MetricSeries] = []
    for one in known:
        ranks[one.name] = ranks.get(one.name, 0) + 1
        if ranks[one.name] <= MAX_RANKS_PER_METRIC:
            shown.append(one)
    shown = shown[:MAX_SERIES]
    left_out = (tables.state or {}).get("metrics_left_out", {})
    max_points = max(MIN_POINTS, min(MAX_POINTS, MAX_ALL_POINTS // max(1, len(shown))))
    return {
        "series": [read_curve(tables, one, max_points) for one in shown],
        "hidden_series": len(known) - len(shown),
        "left_out": {str(rank): counts for rank, counts in left_out.items()},
    }


def list_series(tables: HistoryTables) -> list[MetricSeries]:
    """Return the series that no preferred source replaces, by name and rank."""
    rows = tables.fetch_rows("SELECT DISTINCT name, source, rank FROM metrics")
    return select_series(MetricSeries(*row) for row in rows)


def find_loss_series(tables: HistoryTables) -> MetricSeries | None:
    """Return the series that is the loss of the script, or None."""
    rows = tables.fetch_rows("SELECT DISTINCT name, source, rank FROM metrics")
    return find_loss(MetricSeries(*row) for row in rows if is_loss(row[0]))


def read_curve(tables: HistoryTables, series: MetricSeries, max_points: int) -> MetricCurve:
    """Return a thinned series. The last value, and the first value that is not finite, remain."""
    where = "name = ? AND source = ? AND rank = ?"
    [(count,)] = tables.fetch_rows(f"SELECT count(*) FROM metrics WHERE {where}", *series)
    numbered = (
        "SELECT step, time, value, not_finite, row_number() OVER (ORDER BY time DESC, step DESC) AS nth,"
        f" row_number() OVER (PARTITION BY not_finite ORDER BY time) AS fault FROM metrics WHERE {where}"
    )
    rows = tables.fetch_rows(
        f"SELECT step, time, value, not_finite FROM ({numbered})"
        " WHERE (nth - 1) % ? = 0 OR (not_finite IS NOT NULL AND fault = 1) ORDER BY time, step",
        *series,
        max(1, math.ceil(count / max_points)),
    )
    return {
        "name": series.name,
        "source": series.source,
        "rank": series.rank,
        "step": [row[0] for row in rows],
        "time": [row[1] for row in rows],
        "value": [row[2] for row in rows],
        "not_finite": [row[3] for row in rows],
    }
