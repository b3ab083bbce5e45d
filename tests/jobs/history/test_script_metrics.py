"""Metrics of a script: stored, thinned, selected by source, and shown in snapshots, comparisons and exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from contracts.codec import validate_item
from contracts.telemetry.metrics import MAX_ATTEMPT_METRIC_NAMES, MetricItem, MetricSeries, find_loss, select_series
from jobs.runs.history.exports import read_points
from jobs.runs.history.queries.metrics import MAX_POINTS, find_loss_series, read_curve
from jobs.runs.history.queries.snapshot import get_snapshot
from jobs.runs.history.recording.row_builder import RowBuilder
from jobs.runs.history.store.folder import HistoryFolder, make_empty_manifest
from jobs.runs.history.store.query import query_history
from jobs.runs.history.store.retention import _METRICS, _rewrite


def metric(step: int, values: dict[str, float], **more: Any) -> MetricItem:
    base = {"kind": "metric", "rank": 0, "time": 100.0 + step, "step": step, "source": "log line", "values": values}
    item: Any = validate_item({**base, **more})  # type: ignore[arg-type]
    return item  # type: ignore[no-any-return]


def store(root: Path, items: list[MetricItem]) -> HistoryFolder:
    """Store items as a history."""
    rows = RowBuilder()
    for item in items:
        rows.add_item(item)
    folder = HistoryFolder(root, "job", 1)
    folder.path.mkdir(parents=True, exist_ok=True)
    manifest = make_empty_manifest("job", 1)
    for name, table in rows.take().items():
        pq.write_table(table, folder.path / f"{name}.parquet")
        manifest["parts"][name] = [{"file": f"{name}.parquet", "rows": table.num_rows, "bytes": 1, "level": 0}]
    manifest["first"], manifest["last"] = 100.0, 100.0 + items[-1]["step"]
    folder._write_manifest(manifest)
    return folder


def test_snapshot_has_series_of_the_preferred_source(root: Path) -> None:
    items = [
        metric(1, {"loss": 3.0, "mfu": 1.0}),
        metric(2, {}, not_finite={"loss": "nan"}),
        metric(1, {"train/loss": 2.0}, source="wandb"),
        metric(1, {"loss": 4.0}, rank=1, left_out={"names": 1, "rate": 2, "invalid": 0}),
    ]
    store(root, items)
    metrics = get_snapshot("job", 1)["metrics"]
    assert [(one["name"], one["source"], one["rank"], one["value"]) for one in metrics["series"]] == [
        ("loss", "log line", 1, [4.0]),
        ("mfu", "log line", 0, [1.0]),
        ("train/loss", "wandb", 0, [2.0]),
    ]
    assert metrics["hidden_series"] == 0
    marks = get_snapshot("job", 1)["marks"]
    assert (marks["kind"], marks["text"], marks["step"]) == (["fault"], ["loss is nan"], [None])


def test_history_without_metrics_has_no_series(root: Path) -> None:
    folder = HistoryFolder(root, "job", 1)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder._write_manifest(make_empty_manifest("job", 1))
    assert get_snapshot("job", 1)["metrics"] == {"series": [], "hidden_series": 0, "left_out": {}}


def test_names_of_an_attempt_are_bounded() -> None:
    rows = RowBuilder()
    for first in range(0, 1000, 100):
        rows.add_item(metric(1, {f"m{first + index}": 1.0 for index in range(100)}))
    assert rows.take()["metrics"].num_rows == MAX_ATTEMPT_METRIC_NAMES
    assert rows.state["refused"] == 1000 - MAX_ATTEMPT_METRIC_NAMES


def test_curve_keeps_the_last_value_and_the_first_nan(root: Path) -> None:
    count = 3 * MAX_POINTS
    items = [metric(step, {"loss": float(step)}) for step in range(count)]
    items[1235] = metric(1235, {}, not_finite={"loss": "inf"})
    store(root, items)
    series = query_history("job", 1, find_loss_series)
    assert series == MetricSeries("loss", "log line", 0)
    curve = query_history("job", 1, lambda tables: read_curve(tables, series, MAX_POINTS))
    assert len(curve["step"]) <= MAX_POINTS + 1
    assert (curve["step"][-1], curve["value"][-1]) == (count - 1, float(count - 1))
    assert curve["not_finite"][curve["step"].index(1235)] == "inf"


def test_thinning_keeps_new_values_and_the_first_nan(root: Path) -> None:
    items = [metric(step, {"loss": float(step)}) for step in range(100)]
    items[20] = metric(20, {}, not_finite={"loss": "nan"})
    folder = store(root, items)
    _rewrite(folder, folder.read_manifest(), "metrics", _METRICS, {"width": 2, "middle": 150.0})
    rows = query_history("job", 1, lambda tables: tables.fetch_rows("SELECT step FROM metrics ORDER BY step"))
    steps = [step for (step,) in rows]
    assert steps == sorted({*range(1, 50, 2), 20, *range(50, 100)})


def test_exports_have_curves_of_the_script(root: Path) -> None:
    store(root, [metric(3, {"loss": 2.5}), metric(3, {"loss": 3.5}, rank=2), metric(4, {}, not_finite={"loss": "nan"})])
    points = query_history("job", 1, lambda tables: list(read_points(tables)))
    assert [(point.curve, point.step, point.value) for point in points] == [
        ("script/loss", 3, 2.5),
        ("script/loss/rank_2", 3, 3.5),
    ]


def test_loss_of_a_run_has_the_preferred_source_and_name() -> None:
    series = [
        MetricSeries("loss", "log line", 0),
        MetricSeries("val_loss", "meshboard.log", 0),
        MetricSeries("train/loss", "wandb", 1),
        MetricSeries("lm loss", "wandb", 0),
    ]
    assert find_loss(series) == series[2]
    assert find_loss(series[1:2]) is None
    assert select_series(series) == sorted([series[0], series[1], series[2], series[3]])
    assert select_series([series[0], MetricSeries("Loss", "mlflow", 0)]) == [MetricSeries("Loss", "mlflow", 0)]
