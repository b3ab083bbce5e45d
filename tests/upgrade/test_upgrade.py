"""Upgrade a board while a job runs on a host of an older version, and check that the run ends well.

The older version is a checkout that uses the packages installed here.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT, RedisServer, wait_until
from tests.upgrade.services import BoardServices, export_older_version
from tests.upgrade.test_restore import SHORT, SPEC, count_steps, database
from workers.host.processes import find_processes


@pytest.fixture
def older(tmp_path: Path) -> Path:
    return export_older_version(tmp_path / "older")


def get_code_path(pid: int) -> set[str]:
    """Return the PYTHONPATH of a process."""
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return {text.decode().partition("=")[2] for text in environ if text.startswith(b"PYTHONPATH=")}


def is_receiving_steps(board: BoardServices, job: str) -> None:
    """Return True if the job runs and more of its steps arrive."""
    known = len(count_steps(board, job))
    wait_until(lambda: len(count_steps(board, job)) > known, "more of its steps are heard of", 90, 0.5)
    assert board.get_status(job) == "running"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_run_continues_during_an_upgrade(
    request: pytest.FixtureRequest, older: Path, redis_service: RedisServer, tmp_path: Path, kind: str
) -> None:
    before = BoardServices(tmp_path / "board", redis_service, database(kind, request, "upgraded"), root=older)
    after = BoardServices(tmp_path / "board", redis_service, before.database_url)
    after.port = before.port
    state = tmp_path / "host"
    before.prepare()
    after.token = before.token
    spec: dict[str, Any] = {**SPEC, "train": {**SPEC["train"], "steps": 2500}}
    try:
        with contextlib.ExitStack() as host:
            with before.run():
                worker = host.enter_context(before.run_host("gpu-1", state))
                job = before.call("POST", "jobs", spec)["id"]
                wait_until(lambda: before.get_status(job) == "running", "the job runs", 120, 0.5)
                ranks = find_processes(job, 1)
                assert get_code_path(worker.pid) == {str(older)}
            after.manage("migrate", "--verbosity", "0")
            with after.run():
                is_receiving_steps(after, job)
                assert set(ranks) <= set(find_processes(job, 1))
                [listed] = after.call("GET", "hosts")
                assert (listed["name"], listed["state"]) == ("gpu-1", "connected")
                order = after.call("POST", "jobs", SHORT)["id"]
                wait_until(
                    lambda: after.get_status(order) == "succeeded",
                    "the host accepts orders and reports their end",
                    120,
                    0.5,
                )
                host.close()
                with after.run_host("gpu-1", state) as newer:
                    assert get_code_path(newer.pid) == {str(ROOT)}
                    is_receiving_steps(after, job)
                    assert set(ranks) <= set(find_processes(job, 1)), "the new worker took it over"
                    wait_until(lambda: after.get_status(job) == "succeeded", "it ends as if nothing had been", 300, 0.5)
                    result = after.call("GET", f"jobs/{job}")
                    assert [h["status"] for h in result["history"]][-2:] == ["running", "succeeded"]
                    assert result["attempt"] == 1
                    next_one = after.call("POST", "jobs", SHORT)["id"]
                    wait_until(lambda: after.get_status(next_one) == "succeeded", "the next job runs as well", 120, 0.5)
    finally:
        subprocess.run([sys.executable, "-m", "workers.host.stop", str(state / "runs")], cwd=ROOT, check=False)
