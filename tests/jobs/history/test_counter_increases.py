"""Increases of counters: late values, and values around a gap in the stream."""

from __future__ import annotations

from typing import Any

from contracts.telemetry.batches import Batch, Item
from jobs.runs.history.recording.row_builder import RowBuilder


def traffic(time: float, count: int, op: str = "all_reduce") -> Any:
    cell = {"phase": "step", "op": op, "axis": "dp", "group_size": 2, "count": count, "completed": count}
    cell |= {"payload_bytes": 8 * count, "algorithmic_bytes": 8 * count, "busy_s": 0.0}
    return {"kind": "traffic", "rank": 0, "time": time, "cells": [cell], "dropped": 0}


def count_by_second(*items: Item) -> dict[tuple[float, str], int]:
    rows = RowBuilder()
    for item in items:
        batch: Batch = {"v": 1, "job": "job", "attempt": 1, "time": item["time"], "items": [item]}
        rows.add(batch, 0, None)
    return {(row["second"], row["op"]): row["calls"] for row in rows.take()["traffic"].to_pylist()}


def test_ignores_older_counters_that_arrive_second() -> None:
    assert count_by_second(traffic(10, 5), traffic(11, 3), traffic(12, 6)) == {
        (10, "all_reduce"): 5,
        (12, "all_reduce"): 1,
    }


def test_counts_increases_over_a_gap_in_the_second_in_which_it_began() -> None:
    """A counter that is new shortly after the gap started in it, and a later one did not."""
    gap: Any = {"kind": "gap", "time": 20.0, "items": 9}
    new, later = traffic(21, 4, "broadcast"), traffic(30, 2, "reduce")
    rows = RowBuilder()
    rows.add({"v": 1, "job": "job", "attempt": 1, "time": 12.0, "items": [traffic(12, 5)]}, 0, None)
    rows.add({"v": 1, "job": "job", "attempt": 1, "time": 20.0, "items": [gap, traffic(20, 9), new, later]}, 0, 13.0)
    counts = {(row["second"], row["op"]): row["calls"] for row in rows.take()["traffic"].to_pylist()}
    expected = {(12, "all_reduce"): 5, (13, "all_reduce"): 4, (13, "broadcast"): 4, (30, "reduce"): 2}
    assert counts == expected
