"""Durations of the test modules: read to start the longest first, written by `make test-all`."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")

TABLE = Path(__file__).parents[1] / "durations.csv"
COLUMNS = ("module", "tests", "seconds", "extended_tests", "extended_seconds")
UNKNOWN_MODULE_S = 10.0
BROWSER_SCOPE = "board"  # all browser tests run in a single process and share a board


def get_scope(node_id: str) -> str:
    """Return the module of a test, or the common scope of all browser tests."""
    return BROWSER_SCOPE if node_id.startswith("tests/e2e/test_") else node_id.split("::")[0]


def read_durations(table: Path = TABLE) -> dict[str, float]:
    """Return the seconds of the default tests of each module."""
    with table.open(newline="") as file:
        return {row["module"]: float(row["seconds"]) for row in csv.DictReader(file)}


def sort_longest_first(tests: Iterable[tuple[str, T]], durations: dict[str, float]) -> list[T]:
    """Sort pairs of node ID and test by the total duration of their scope. Tests of a scope keep their order."""
    tests = list(tests)
    seconds: dict[str, float] = defaultdict(float)
    for module in {node_id.split("::")[0] for node_id, _ in tests}:
        seconds[get_scope(module)] += durations.get(module, UNKNOWN_MODULE_S)
    return [test for _, test in sorted(tests, key=lambda pair: (-seconds[get_scope(pair[0])], get_scope(pair[0])))]


class DurationWriter:
    """Pytest plugin that writes the table after a complete run."""

    def __init__(self, table: Path = TABLE) -> None:
        self._table = table
        self._rows: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0, 0.0])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the duration of one phase of a test."""
        row = self._rows[report.nodeid.split("::")[0]]
        offset = 2 if "extended" in report.keywords else 0
        row[offset] += report.when == "setup"
        row[offset + 1] += report.duration

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the rows, longest module first, if all tests passed."""
        if exitstatus:
            return
        with self._table.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            for module, row in sorted(self._rows.items(), key=lambda item: (-item[1][1] - item[1][3], item[0])):
                writer.writerow([module, row[0], f"{row[1]:.1f}", row[2], f"{row[3]:.1f}"])
