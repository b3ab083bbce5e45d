"""Bound the metrics that a script reports on one rank, and build their telemetry items. No torch."""

from __future__ import annotations

import math
import re
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final, NamedTuple

from contracts.fields import MAX_ABS_NUMBER, MAX_INT64
from contracts.telemetry.metrics import (
    MAX_METRIC_NAME_CHARS,
    MAX_METRIC_NAMES,
    MAX_METRICS_PER_ITEM,
    LeftOutMetrics,
    MetricItem,
    MetricSource,
)

MAX_PENDING_REPORTS: Final = 10_000  # until the next item; the oldest are dropped
MAX_VALUES_PER_REPORT: Final = 1000
MAX_NESTED_LEVELS: Final = 3  # of dictionaries in a report
MAX_VALUES_PER_S: Final = 400  # of all ranks of a host
MAX_BURST_VALUES: Final = 2000
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")  # with surrogates, which messages cannot encode


class MetricReport(NamedTuple):
    """Values of one call or one line. `time` is in Unix seconds."""

    source: MetricSource
    step: int
    time: float
    values: Mapping[str, float]


class MetricCollector:
    """Collect the metrics of one rank within limits.

    `add` runs on the training thread, and `take` on another one. Above the rate, only the newest value of each metric
    is kept, so the last value of a run always arrives.
    """

    def __init__(self, rank: int, local_ranks: int = 1) -> None:
        self._rank = rank
        self._values_per_s = MAX_VALUES_PER_S / max(1, local_ranks)
        self._credit, self._credited_s = float(MAX_BURST_VALUES), time.monotonic()
        self._reports: deque[MetricReport] = deque(maxlen=MAX_PENDING_REPORTS)
        self._num_added = self._num_taken = 0
        self._names: set[str] = set()
        self._held: dict[tuple[MetricSource, str], tuple[MetricReport, float]] = {}  # above the rate
        self._not_finite: set[tuple[MetricSource, str]] = set()  # of which a NaN or an infinite value was sent
        self._left_out = LeftOutMetrics(names=0, rate=0, invalid=0)
        self._sent_left_out = dict(self._left_out)
        self._num_invalid = 0
        self._lock = threading.Lock()

    def add(self, source: MetricSource, step: int, values: Mapping[str, Any]) -> list[str]:
        """Add the values of a step. Return the names of values that are not numbers, which are left out."""
        numbers: dict[str, float] = {}
        invalid: list[str] = []
        for name, value in islice(_flatten(values), MAX_VALUES_PER_REPORT):
            number = read_number(value)
            if number is None:
                invalid.append(name)
            else:
                numbers[name] = number
        if source == "meshboard.log":  # other libraries also log texts and images
            self._num_invalid += len(invalid)
        if len(values) > MAX_VALUES_PER_REPORT:
            self._num_invalid += len(values) - MAX_VALUES_PER_REPORT
        if numbers and 0 <= step <= MAX_INT64:
            self._num_added += 1
            self._reports.append(MetricReport(source, step, time.time(), numbers))
        return invalid

    def skip(self, count: int) -> None:
        """Count values that were left out because they came too fast."""
        self._left_out["rate"] += count

    def take(self, *, final: bool = False) -> list[MetricItem]:
        """Remove and return the items of new values. With `final`, the newest values above the rate are included."""
        with self._lock:
            reports = [self._reports.popleft() for _ in range(len(self._reports))]
            self._num_taken += len(reports)
            self._refill()
            items = [item for item in map(self._make_item, reports) if item is not None]
            items += self._take_held(final=final)
            self._left_out["invalid"] = self._num_invalid
            if self._left_out != self._sent_left_out:
                self._sent_left_out = dict(self._left_out)
                if not items:
                    items.append(self._make_empty_item(reports))
                items[-1]["left_out"] = LeftOutMetrics(**self._left_out)
            return items

    def _refill(self) -> None:
        now_s = time.monotonic()
        refilled = self._credit + (now_s - self._credited_s) * self._values_per_s
        self._credit, self._credited_s = min(refilled, MAX_BURST_VALUES), now_s
        dropped = self._num_added - self._num_taken - len(self._reports)
        if dropped > 0:
            self._left_out["rate"] += dropped
            self._num_taken += dropped

    def _make_item(self, report: MetricReport) -> MetricItem | None:
        sent: dict[str, float] = {}
        for name, value in report.values.items():
            if not self._is_known(name):
                self._left_out["names"] += 1
                continue
            key = report.source, name
            is_first_fault = not math.isfinite(value) and key not in self._not_finite
            if self._credit < 1 and not is_first_fault:
                self._left_out["rate"] += key in self._held
                self._held[key] = report, value
                continue
            self._credit -= 1
            if self._held.pop(key, None) is not None:
                self._left_out["rate"] += 1
            if is_first_fault:
                self._not_finite.add(key)
            sent[name] = value
        return _build_item(self._rank, report, sent) if sent else None

    def _is_known(self, name: str) -> bool:
        if name in self._names:
            return True
        is_valid = 0 < len(name) <= MAX_METRIC_NAME_CHARS and not _UNPRINTABLE.search(name)
        if not is_valid or len(self._names) >= MAX_METRIC_NAMES:
            return False
        self._names.add(name)
        return True

    def _take_held(self, *, final: bool) -> Iterator[MetricItem]:
        for key in list(self._held):
            if not final and self._credit < MAX_METRICS_PER_ITEM:
                return
            report, value = self._held.pop(key)
            self._credit -= 1
            yield _build_item(self._rank, report, {key[1]: value})

    def _make_empty_item(self, reports: list[MetricReport]) -> MetricItem:
        last = reports[-1] if reports else MetricReport("meshboard.log", 0, time.time(), {})
        return _build_item(self._rank, last, {})


def read_number(value: Any) -> float | None:
    """Return a number, a NumPy scalar or a tensor with one element as float, and None for anything else."""
    if isinstance(value, bool | int | float):
        return _limit_number(float(value)) if not isinstance(value, int) or abs(value) <= MAX_INT64 else None
    if isinstance(value, str | bytes | list | tuple | dict | set) or not callable(getattr(value, "item", None)):
        return None
    try:
        numel = value.numel() if callable(getattr(value, "numel", None)) else getattr(value, "size", 1)
        return _limit_number(float(value.item())) if numel == 1 else None
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _limit_number(value: float) -> float:
    return math.copysign(math.inf, value) if abs(value) > MAX_ABS_NUMBER else value


def _flatten(values: Mapping[str, Any], under: str = "", level: int = 1) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        full = f"{under}{name}" if under else str(name)
        if isinstance(value, Mapping) and level < MAX_NESTED_LEVELS:
            yield from _flatten(value, f"{full[:MAX_METRIC_NAME_CHARS]}.", level + 1)
        else:
            yield full, value


def _build_item(rank: int, report: MetricReport, values: Mapping[str, float]) -> MetricItem:
    item = MetricItem(
        kind="metric",
        rank=rank,
        time=report.time,
        step=report.step,
        source=report.source,
        values={name: value for name, value in values.items() if math.isfinite(value)},
    )
    faults = {name: str(value) for name, value in values.items() if not math.isfinite(value)}
    if faults:
        item["not_finite"] = faults  # type: ignore[typeddict-item]
    return item
