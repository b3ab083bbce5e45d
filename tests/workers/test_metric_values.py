"""Metrics of a script are bounded, and values that are not finite travel."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from contracts.codec import validate_item
from contracts.telemetry.metrics import MAX_METRIC_NAME_CHARS, MAX_METRIC_NAMES
from workers import metric_values
from workers.metric_values import MAX_BURST_VALUES, MetricCollector, read_number


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (2, 2.0),
        (2.5, 2.5),
        (np.float32(0.5), 0.5),
        (torch.tensor(1.5), 1.5),
        (torch.tensor([[3]]), 3.0),
        (np.array([4.0]), 4.0),
        (1e300, math.inf),
        ("3", None),
        ("x" * 10_000_000, None),
        ([1.0], None),
        (torch.ones(2), None),
        (None, None),
        (10**400, None),
        (2 + 3j, None),
    ],
)
def test_reads_numbers_only(value: Any, number: float | None) -> None:
    assert read_number(value) == number


def test_items_hold_values_of_a_step() -> None:
    collector = MetricCollector(3)
    assert collector.add("meshboard.log", 7, {"loss": torch.tensor(2.5), "note": "x", "eval": {"loss": 2}}) == ["note"]
    [item] = collector.take(final=True)
    assert validate_item(item) == item
    assert (item["rank"], item["step"], item["source"]) == (3, 7, "meshboard.log")
    assert item["values"] == {"loss": 2.5, "eval.loss": 2.0}
    assert item["left_out"] == {"names": 0, "rate": 0, "invalid": 1}


def test_values_that_are_not_finite_travel_as_words() -> None:
    collector = MetricCollector(0)
    collector.add("wandb", 1, {"loss": math.nan, "up": math.inf, "down": -math.inf, "fine": 1.0})
    [item] = collector.take()
    validate_item(item)
    assert item["values"] == {"fine": 1.0}
    assert item["not_finite"] == {"loss": "nan", "up": "inf", "down": "-inf"}


def test_a_million_names_are_bounded_and_counted() -> None:
    collector = MetricCollector(0)
    for start in range(0, 1_000_000, 1000):
        collector.add("meshboard.log", 1, {f"m{start + index}": 1.0 for index in range(1000)})
    items = collector.take(final=True)
    names = {name for item in items for name in item["values"]}
    assert len(names) == MAX_METRIC_NAMES
    assert items[-1]["left_out"]["names"] == 1_000_000 - MAX_METRIC_NAMES
    assert all(validate_item(item) for item in items)


def test_names_that_are_too_long_or_unprintable_are_left_out() -> None:
    collector = MetricCollector(0)
    collector.add("meshboard.log", 1, {"x" * (MAX_METRIC_NAME_CHARS + 1): 1, "": 1, "a\nb": 1, "y" * 10_000_000: 1})
    [item] = collector.take(final=True)
    assert item["values"] == {}
    assert item["left_out"]["names"] == 4


def test_a_flood_keeps_the_last_value_and_counts_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(metric_values.time, "monotonic", lambda: clock[0])
    collector = MetricCollector(0)
    for step in range(9000):
        collector.add("meshboard.log", step, {"loss": float(step)})
    items = collector.take()
    assert [item["step"] for item in items] == list(range(MAX_BURST_VALUES))
    assert items[-1]["left_out"]["rate"] == 9000 - MAX_BURST_VALUES - 1
    assert [item["values"] for item in collector.take(final=True)] == [{"loss": 8999.0}]


def test_first_nan_arrives_during_a_flood() -> None:
    collector = MetricCollector(0, local_ranks=400)
    for step in range(5000):
        collector.add("meshboard.log", step, {"loss": math.nan if step == 4000 else 1.0})
    assert [item["step"] for item in collector.take() if "not_finite" in item] == [4000]


def test_reports_beyond_the_queue_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_values, "MAX_PENDING_REPORTS", 10)
    collector = MetricCollector(0)
    for step in range(25):
        collector.add("meshboard.log", step, {"loss": 1.0})
    items = collector.take()
    assert [item["step"] for item in items] == list(range(15, 25))
    assert items[-1]["left_out"]["rate"] == 15


def test_invalid_steps_are_ignored() -> None:
    collector = MetricCollector(0)
    for step in (-1, 2**70):
        collector.add("wandb", step, {"loss": 1.0})
    assert collector.take(final=True) == []
