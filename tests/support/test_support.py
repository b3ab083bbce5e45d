"""Test the helpers of tests: time limits of ranks, waits for jobs, and the order of modules."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.board import Board
from tests.support.durations import DurationWriter, read_durations, sort_longest_first
from tests.support.host import Host
from tests.support.processes import ROOT, is_gone, scale_timeout
from tests.support.ranks import run_to_completion

LAUNCHER = """
import subprocess, sys
rank = "import signal\\ndef stuck_here():\\n    signal.pause()\\nstuck_here()"
print(subprocess.Popen([sys.executable, "-c", rank], start_new_session=True).pid, flush=True)
subprocess.Popen([sys.executable, "-c", rank], start_new_session=True).wait()
"""
SUITE = """
import signal, subprocess, sys
from tests.support.reaper import fork_under_reaper
signal.signal(int(sys.argv[1]), signal.SIG_DFL)  # nohup ignores SIGHUP
fork_under_reaper()
launcher = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)"
subprocess.run([sys.executable, "-c", launcher], check=True)
signal.pause()
"""
EXIT_REPORT: Any = {
    "job": "job-1",
    "attempt": 1,
    "outcome": "failed",
    "reason": "rank 0 ended with exit code 1",
    "log_tail": ["RuntimeError: out of memory"],
}
FAILED_JOB = {
    "status": "failed",
    "finished": "2026-11-29T09:00:00Z",
    "attempt": 1,
    "history": [{"status": "failed", "reason": EXIT_REPORT["reason"]}],
    "exit": EXIT_REPORT,
}


def test_timeout_reports_stacks_and_ends_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHBOARD_PATIENCE", "1")
    with pytest.raises(AssertionError, match=r"longer than 5 s") as caught:
        run_to_completion([sys.executable, "-c", LAUNCHER], os.environ, limit_s=5)
    assert str(caught.value).count("in stuck_here") == 2
    first = next(line for line in str(caught.value).splitlines() if line.isdigit())
    assert is_gone(int(first))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_suite_ends_orphans_in_other_sessions(number: signal.Signals) -> None:
    argv = [sys.executable, "-c", SUITE, str(int(number))]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as suite:
        assert suite.stdout is not None
        orphan = int(suite.stdout.readline())
        suite.send_signal(number)
        try:
            code = suite.wait(scale_timeout(30))
        finally:
            suite.kill()
    assert code == -number
    assert is_gone(orphan)


class FailedBoard(Board):
    """A board whose only job has failed."""

    def get_job(self, job_id: str) -> dict[str, Any]:
        return FAILED_JOB


class FailedHost(Host):
    """A host whose only job has failed without a step."""

    def __init__(self) -> None:
        pass

    def read_reports(self, job: str) -> list[Any]:
        return [{"job": job, "attempt": 1, "state": "exited", "exit": EXIT_REPORT}]

    def read_items(self, job: str, kind: str, attempt: int = 1) -> list[Any]:
        return []


@pytest.mark.parametrize(
    "wait",
    [
        lambda folder: FailedBoard(folder, None).wait_for_status("job-1", "running", "succeeded"),  # type: ignore[arg-type]
        lambda folder: FailedBoard(folder, None).wait_for_line("job-1", "step 1"),  # type: ignore[arg-type]
        lambda _: FailedHost().wait_for_steps("job-1"),
    ],
    ids=["status", "line", "steps"],
)
def test_waits_fail_at_once_after_another_final_status(wait: Callable[[Path], object], tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"failed: rank 0 ended with exit code 1\n  RuntimeError: out of memory"):
        wait(tmp_path)
    assert time.monotonic() - began < 5


def test_timeout_of_a_wait_shows_the_status(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MESHBOARD_PATIENCE", "0")
    queued = {**FAILED_JOB, "status": "queued", "finished": None, "history": [], "exit": None}
    monkeypatch.setattr(FailedBoard, "get_job", lambda *_: queued)
    with pytest.raises(AssertionError) as caught:
        FailedBoard(tmp_path, None).wait_for_status("job-1", "running")  # type: ignore[arg-type]
    assert caught.value.__notes__ == ["At the end, it is queued: no reason"]


def test_starts_the_longest_scope_first_and_keeps_the_order_within() -> None:
    browser = ["tests/e2e/test_x.py::one", "tests/e2e/test_y.py::one"]
    ids = ["a.py::one", "b.py::one", "c.py::one[x::y]", "b.py::two", *browser]
    durations = {"a.py": 1.0, "b.py": 5.0, "c.py": 7.0, "tests/e2e/test_x.py": 4.0, "tests/e2e/test_y.py": 4.0}
    assert sort_longest_first([(name, name) for name in ids], durations) == [
        *browser,
        "c.py::one[x::y]",
        "b.py::one",
        "b.py::two",
        "a.py::one",
    ]


def test_starts_modules_in_the_order_of_the_table(request: pytest.FixtureRequest) -> None:
    items = [(item.nodeid, item) for item in request.session.items]
    assert [item for _, item in items] == sort_longest_first(items, read_durations())


def test_writes_durations_of_both_tiers(tmp_path: Path) -> None:
    writer = DurationWriter(tmp_path / "durations.csv")
    for keywords, seconds in ({}, 2.0), ({"extended": 1}, 30.0):
        for when in "setup", "call", "teardown":
            writer.pytest_runtest_logreport(
                pytest.TestReport("a.py::one", ("a.py", 1, "one"), keywords, "passed", None, when, duration=seconds)
            )
    writer.pytest_sessionfinish(exitstatus=1)
    assert not (tmp_path / "durations.csv").exists()
    writer.pytest_sessionfinish(exitstatus=0)
    assert (tmp_path / "durations.csv").read_text().splitlines()[1] == "a.py,1,6.0,1,90.0"
    assert read_durations(tmp_path / "durations.csv") == {"a.py": 6.0}


def test_exempts_imported_objects_from_garbage_collection() -> None:
    assert gc.get_freeze_count() > 0
