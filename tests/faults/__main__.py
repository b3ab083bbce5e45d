"""`make faults`: a table of faults with the outcomes of jobs, seconds, and processes left."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

MAX_RESULT_CHARS = 110  # characters
# Faults of the disk, PostgreSQL, and Redis, whose tests need no complete board.
OTHER_TESTS = (
    "jobs/api/test_refused_writes.py",
    "jobs/queue/test_host_faults.py",
    "workers/host/test_health_check.py::test_full_disk_is_a_problem_until_space_is_freed",
    "workers/host/test_health_check.py::test_full_disk_rejects_launches",
    "workers/test_disk.py::test_removes_deep_trees_with_few_open_files",
)
HEADER = f"{'fault':<84}  {'s':>5}  {'left':>4}        what the API said"


class FaultRow(NamedTuple):
    """A row of the table. `left` is None if no job ended."""

    fault: str
    seconds: float
    left: int | None
    passed: bool
    said: str

    def __str__(self) -> str:
        left = "-" if self.left is None else self.left
        output = self.said if len(self.said) <= MAX_RESULT_CHARS else f"{self.said[: MAX_RESULT_CHARS - 3]}..."
        return f"{self.fault:<84}  {self.seconds:>5.1f}  {left:>4}  {'' if self.passed else 'FAIL':<4}  {output or '-'}"


class FaultTable:
    """A pytest plugin that prints a row when a test has ended."""

    def __init__(self) -> None:
        self.rows: list[FaultRow] = []
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()

    def pytest_configure(self, config: pytest.Config) -> None:
        config.option.verbose = 0  # pytest-django reads it, and the terminal plugin, which is off, defines it

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            return
        if report.failed:
            self._failed.add(report.nodeid)
            print(f"\n{report.longreprtext}")
        if report.when == "call":
            self._seconds[report.nodeid] = report.duration
        if report.when == "teardown":
            result = dict(report.user_properties)
            said = str(result.get("said", ""))
            row = FaultRow(
                fault=_format_test_name(report.nodeid),
                seconds=self._seconds.get(report.nodeid, 0.0),
                left=int(str(result["left"])) if said and "left" in result else None,
                passed=report.nodeid not in self._failed,
                said=said,
            )
            self.rows.append(row)
            print(row, flush=True)


def _format_test_name(nodeid: str) -> str:
    """Return a test's name as a sentence."""
    return nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " ")


def run(places: list[Path], arguments: list[str]) -> int:
    """Run the tests in these folders and files, and print a row for each."""
    table = FaultTable()
    os.environ.setdefault("MESHBOARD_PATIENCE", "1")  # what is promised in seconds is held to them
    print(HEADER)
    plain = ["-p", "no:terminal", "-o", "addopts=--strict-markers --timeout=300"]  # our table instead of its lines
    options = [*plain, "-m", "slow or not slow", *arguments]
    code = int(pytest.main([*map(str, places), *options], plugins=[table]))
    failed = sum(not row.passed for row in table.rows)
    print(f"{len(table.rows) - failed} passed, {failed} failed")
    return code


def main() -> int:
    here = Path(__file__).parent
    others = [here.parent / test for test in OTHER_TESTS]
    return run([here, here.parent / "cluster" / "test_faults.py", *others], sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
