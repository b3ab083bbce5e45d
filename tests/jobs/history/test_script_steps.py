"""Steps of a script are stored with unknown values as null, and files of older versions remain readable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from contracts.codec import validate_item
from contracts.telemetry.items import StepItem
from jobs.runs.history.queries.snapshot import get_snapshot
from jobs.runs.history.queries.step_breakdown import get_mean_parts
from jobs.runs.history.recording.row_builder import RowBuilder
from jobs.runs.history.store.folder import HistoryFolder, make_empty_manifest
from jobs.runs.history.store.query import query_history
from jobs.runs.history.store.schema import TABLES


def step(number: int, **more: Any) -> StepItem:
    """Return an item that the meter of a script sends."""
    item: dict[str, Any] = {
        "kind": "step",
        "rank": 0,
        "time": 1000.0 + number,
        "step": number,
        "ran": number,
        "steps": None,
        "step_s": 0.5,
        "tokens": None,
        "loss": None,
        "grad_norm": None,
        "learning_rate": None,
        "cells": [],
        "counted": max(0, number - 2),
        "parts": {"exposed": {"dp": 0.1}, "hidden": {}},
        **more,
    }
    checked: Any = validate_item(item)
    return checked  # type: ignore[no-any-return]


def store(root: Path, items: list[StepItem], schema: pa.Schema = TABLES["steps"]) -> RowBuilder:
    """Store items as a history whose file of steps has a schema."""
    rows = RowBuilder()
    for item in items:
        rows.add_item(item)
    folder = HistoryFolder(root, "job", 1)
    folder.path.mkdir(parents=True, exist_ok=True)
    manifest = make_empty_manifest("job", 1)
    table = rows.take()["steps"].select(schema.names)
    pq.write_table(table, folder.path / "old.parquet")
    part = {"file": "old.parquet", "rows": table.num_rows, "bytes": 1, "level": 0}
    folder._write_manifest({**manifest, "parts": {"steps": [part]}})
    return rows


def test_unknown_values_are_null(root: Path) -> None:
    rows = store(root, [step(number) for number in range(2, 12)])
    snapshot = get_snapshot("job", 1)
    assert {value for name in ("tokens", "samples", "loss", "learning_rate") for value in snapshot["curve"][name]} == {
        None
    }
    assert (snapshot["parts"]["data_s"], snapshot["parts"]["optimizer_s"]) == ([None], [None])
    parts = query_history("job", 1, get_mean_parts)
    assert parts is not None
    assert (parts["data_s"], parts["optimizer_s"], parts["exposed"]) == (None, None, {"dp": 0.1})
    progress = rows.state["progress"]
    assert progress is not None
    assert (progress["step"], progress["steps"], progress["rate"], progress["sample_rate"]) == (11, None, None, None)
    assert rows.state["ranks"][0]["ran"] == 9, "without the set-up steps, as the counters"


def test_short_steps_keep_their_own_times(root: Path) -> None:
    rows = store(root, [step(number, over=2, times=[0.25, 0.75], samples=8) for number in range(5, 25, 2)])
    assert rows.state["step_times"][-2:] == [0.25, 0.75]
    progress = rows.state["progress"]
    assert progress is not None
    assert progress["sample_rate"] == pytest.approx(16.0)
    assert progress["over"] == 2


def test_number_of_steps_without_a_time_keeps_the_speed() -> None:
    rows = RowBuilder()
    rows.add_item(step(2, samples=8))
    rows.add_item(validate_item({"kind": "phase", "rank": 0, "time": 1003.0, "phase": "step", "steps": 3}))
    progress = rows.state["progress"]
    assert progress is not None
    assert (progress["step"], progress["sample_rate"]) == (3, pytest.approx(16.0))


def test_reads_and_merges_files_without_new_columns(root: Path) -> None:
    old = pa.schema([field for field in TABLES["steps"] if field.name != "samples"])
    store(root, [step(number) for number in range(2, 12)], old)
    assert get_snapshot("job", 1)["curve"]["samples"] == [None] * 10
    folder = HistoryFolder(root, "job", 1)
    manifest = folder.read_manifest()
    merged = folder._merge_files(manifest, "steps", manifest["parts"]["steps"])
    assert pq.read_schema(folder.path / merged["file"]).names == TABLES["steps"].names
