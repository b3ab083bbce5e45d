"""Test the helpers of tests: time limits of ranks, waits for jobs, and the order of modules."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SLOWEST_MODULES, sort_slowest_first
from tests.support.board import Board
from tests.support.host import Host
from tests.support.processes import ROOT, is_gone
from tests.support.ranks import run_to_completion

LAUNCHER = """
import subprocess, sys
rank = "import signal\\ndef stuck_here():\\n    signal.pause()\\nstuck_here()"
print(subprocess.Popen([sys.executable, "-c", rank], start_new_session=True).pid, flush=True)
subprocess.Popen([sys.executable, "-c", rank], start_new_session=True).wait()
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


def test_sorts_slow_modules_first_and_keeps_the_order_of_others() -> None:
    ids = ["a.py::one", "b.py::one", "c.py::one[x::y]", "b.py::two", "d.py::one"]
    assert sort_slowest_first([(name, name) for name in ids], ("c.py", "b.py")) == [
        "c.py::one[x::y]",
        "b.py::one",
        "b.py::two",
        "a.py::one",
        "d.py::one",
    ]


def test_lists_each_slow_module_once() -> None:
    assert [module for module in SLOWEST_MODULES if not (ROOT / module).is_file()] == []
    assert set(Counter(SLOWEST_MODULES).values()) == {1}


def test_runs_slow_modules_first(request: pytest.FixtureRequest) -> None:
    slow = [item.nodeid.split("::")[0] in SLOWEST_MODULES for item in request.session.items]
    assert slow == sorted(slow, reverse=True)


def test_exempts_imported_objects_from_garbage_collection() -> None:
    assert gc.get_freeze_count() > 0
