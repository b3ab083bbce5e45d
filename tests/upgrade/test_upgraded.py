"""A board of an older version is upgraded while a job runs on a host of that version: the run goes on, and ends well.

The older version is a checkout of its own; the packages installed here serve both.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT, RedisServer, wait_until
from tests.upgrade.older import files_before
from tests.upgrade.services import Services
from tests.upgrade.test_restored import SHORT, SPEC, database, steps_of
from workers.host.processes import find_processes


@pytest.fixture
def older(tmp_path: Path) -> Path:
    return files_before(tmp_path / "older")


def code_of(pid: int) -> set[str]:
    """Where a process' PYTHONPATH leads."""
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return {text.decode().partition("=")[2] for text in environ if text.startswith(b"PYTHONPATH=")}


def heard_of(board: Services, job: str) -> None:
    """The job runs, and more of its steps arrive."""
    known = len(steps_of(board, job))
    wait_until(lambda: len(steps_of(board, job)) > known, "more of its steps are heard of", 90, 0.5)
    assert board.status(job) == "running"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_run_goes_on_over_an_upgrade(
    request: pytest.FixtureRequest, older: Path, redis_service: RedisServer, tmp_path: Path, kind: str
) -> None:
    before = Services(tmp_path / "board", redis_service, database(kind, request, "upgraded"), root=older)
    after = Services(tmp_path / "board", redis_service, before.database_url)
    after.port = before.port
    state = tmp_path / "host"
    before.prepare()
    after.token = before.token
    spec: dict[str, Any] = {**SPEC, "train": {**SPEC["train"], "steps": 2500}}
    try:
        with contextlib.ExitStack() as host:
            with before.working():
                worker = host.enter_context(before.host("gpu-1", state))
                job = before.call("POST", "jobs", spec)["id"]
                wait_until(lambda: before.status(job) == "running", "the job runs", 120, 0.5)
                ranks = find_processes(job, 1)
                assert code_of(worker.pid) == {str(older)}
            after.manage("migrate", "--verbosity", "0")
            with after.working():
                heard_of(after, job)
                assert set(ranks) <= set(find_processes(job, 1))
                [listed] = after.call("GET", "hosts")
                assert (listed["name"], listed["state"]) == ("gpu-1", "connected")
                order = after.call("POST", "jobs", SHORT)["id"]
                wait_until(
                    lambda: after.status(order) == "succeeded", "it takes orders, and tells of their end", 120, 0.5
                )
                host.close()
                with after.host("gpu-1", state) as newer:
                    assert code_of(newer.pid) == {str(ROOT)}
                    heard_of(after, job)
                    assert set(ranks) <= set(find_processes(job, 1)), "the new worker took it over"
                    wait_until(lambda: after.status(job) == "succeeded", "it ends as if nothing had been", 300, 0.5)
                    told = after.call("GET", f"jobs/{job}")
                    assert [h["status"] for h in told["history"]][-2:] == ["running", "succeeded"]
                    assert told["attempt"] == 1
                    next_one = after.call("POST", "jobs", SHORT)["id"]
                    wait_until(lambda: after.status(next_one) == "succeeded", "the next job runs as well", 120, 0.5)
    finally:
        subprocess.run([sys.executable, "-m", "workers.host.stop", str(state / "runs")], cwd=ROOT, check=False)
