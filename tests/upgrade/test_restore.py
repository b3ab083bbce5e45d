"""Restore a backup on another board while jobs run, and check that running and ended jobs are correct."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import urllib.error
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.support.processes import ROOT, RedisServer, wait_until
from tests.upgrade.services import BoardServices
from workers.host.processes import find_processes

SPEC: dict[str, Any] = {
    "name": "goes on",
    "model": {"preset": "gpt-tiny"},
    "layout": {"dp": 2},
    "train": {"steps": 100_000, "global_batch": 4, "seq_len": 32, "eval_every": 0},
}
SOON = {**SPEC, "name": "ends before the restore", "train": {**SPEC["train"], "steps": 600}}
SHORT = {**SPEC, "name": "before", "train": {**SPEC["train"], "steps": 3, "warmup_steps": 1}}


def database(kind: str, request: pytest.FixtureRequest, name: str) -> str:
    if kind == "sqlite":
        return ""
    url: str = request.getfixturevalue("postgres_url")
    with psycopg.connect(url, autocommit=True) as server:
        server.execute(f"CREATE DATABASE {name}")
    return f"{url.rpartition('/')[0]}/{name}"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_restored_board_finds_the_running_job(
    request: pytest.FixtureRequest, redis_service: RedisServer, tmp_path: Path, kind: str
) -> None:
    first = BoardServices(tmp_path / "first", redis_service, database(kind, request, "saved"))
    second = first.replace(tmp_path / "second", database(kind, request, "restored"))
    saved, state = tmp_path / "saved.tar", tmp_path / "host"
    first.prepare()
    second.token = first.token
    try:
        with contextlib.ExitStack() as hosts:
            with first.run():
                hosts.enter_context(first.run_host("gpu-1", state))
                ended = first.call("POST", "jobs", SHORT)["id"]
                wait_until(lambda: first.get_status(ended) == "succeeded", "a first job has ended", 120, 0.5)
                history = wait_until(lambda: count_steps(first, ended), "its history is kept", 60, 0.5)
                job = first.call("POST", "jobs", SPEC)["id"]
                soon = first.call("POST", "jobs", SOON)["id"]
                for one in (job, soon):
                    wait_until(lambda one=one: first.get_status(one) == "running", "the job runs", 120, 0.5)
                first.manage("backup", str(saved))
                assert first.get_status(job) == first.get_status(soon) == "running", "saving harms no job"
                wait_until(lambda: first.get_status(soon) == "succeeded", "the shorter one has ended", 240, 0.5)
            ranks = find_processes(job, 1)
            assert len(ranks) >= SPEC["layout"]["dp"]
            second.manage("restore", str(saved))
            with second.run():
                wait_until(
                    lambda: second.call("GET", f"jobs/{job}")["host"] == "gpu-1", "the new board has the job", 60
                )
                before = len(count_steps(second, job))
                wait_until(lambda: len(count_steps(second, job)) > before, "and hears of its next steps", 60, 0.5)
                assert second.get_status(job) == "running"
                assert set(ranks) <= set(find_processes(job, 1)), "nothing was started again"
                assert count_steps(second, ended) == history
                wait_until(
                    lambda: second.get_status(soon) != "running", "its host is asked how the shorter one ended", 120
                )
                assert second.get_status(soon) == "succeeded"
                second.call("POST", f"jobs/{job}/cancel")
                wait_until(lambda: second.get_status(job) == "cancelled", "its orders reach the host", 60, 0.5)
                result = [change["status"] for change in second.call("GET", f"jobs/{job}")["history"]]
                assert result[-3:] == ["running", "cancelling", "cancelled"]
    finally:
        subprocess.run([sys.executable, "-m", "workers.host.stop", str(state / "runs")], cwd=ROOT, check=False)


def count_steps(board: BoardServices, job: str) -> list[Any]:
    """Return the number of steps in the history."""
    try:
        result = board.call("GET", f"jobs/{job}/history/steps")
    except urllib.error.HTTPError:
        return []
    columns = result.get("columns", result)
    return list(columns["step"])
