"""Run the Slurm engine with a real Slurm on this machine (`make slurm`), and print how many tests passed and failed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import get_missing_requirement


class Count:
    """Print a line for each finished test as a pytest plugin."""

    def __init__(self) -> None:
        self.passed = self.failed = 0

    def pytest_addoption(self, parser: pytest.Parser) -> None:
        """Add the option that pytest-django reads from the terminal plugin, which is disabled here."""
        parser.addoption("--verbose", type=int, default=0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed += 1
            print(f"\nFAIL {report.nodeid} ({report.when})\n{report.longreprtext}", flush=True)
        elif report.when == "call" and report.passed:
            self.passed += 1
            print(f"{report.duration:6.1f} s  {report.nodeid.rpartition('::')[2].replace('_', ' ')}", flush=True)


def main() -> int:
    if reason := get_missing_requirement():
        print(f"skipped: {reason}")
        return 0
    count = Count()
    options = ["-p", "no:terminal", "-o", "addopts=--strict-markers --timeout=400", *sys.argv[1:]]
    code = int(pytest.main([str(Path(__file__).parent), *options], plugins=[count]))
    print(f"{count.passed} passed, {count.failed} failed")
    return code


if __name__ == "__main__":
    sys.exit(main())
