"""A killed runner: no service survives, and a surviving job can be reached again."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import redis

from contracts.names import telemetry_stream
from tests.support.board import Board, run_board, start_runner
from tests.support.processes import is_gone, list_session_pids, wait_until

ENDLESS: dict[str, Any] = {
    "name": "endless",
    "model": {"preset": "gpt-tiny"},
    "layout": {"dp": 2},
    "train": {"steps": 100_000, "global_batch": 4, "seq_len": 32, "eval_every": 0},
}


@pytest.mark.slow
def test_job_that_survives_a_killed_runner_can_be_cancelled(tmp_path: Path) -> None:
    with run_board(tmp_path / "var") as first:
        job = first.submit(ENDLESS)
        first.wait_for_status(job, "running")
        first.wait_for_line(job, "step 2/")
        ranks, services = (
            first.list_processes(job),
            [p for pid in first.info["pids"].values() for p in list_session_pids(pid)],
        )
        first.process.kill()
        first.process.wait()
        with run_board(tmp_path / "var") as second:
            assert [pid for pid in services if not is_gone(pid)] == []
            assert not any(is_gone(pid) for pid in ranks)
            before = last_entry(second, job)
            wait_until(lambda: last_entry(second, job) > before, "telemetry goes on", 30)
            assert [change["status"] for change in second.get_job(job)["history"]] == ["queued", "starting", "running"]
            second.call("POST", f"jobs/{job}/cancel")
            second.wait_for_status(job, "cancelled", timeout_s=30)
            wait_until(lambda: all(is_gone(pid) for pid in ranks), "its ranks have ended", 15)


@pytest.mark.slow
def test_closed_terminal_stops_everything(tmp_path: Path) -> None:
    process = start_runner(tmp_path, subprocess.PIPE)
    terminal = process.stdout
    assert terminal
    assert any(b"Ctrl-C" in line for line in terminal), "it never came up"
    up = Board(tmp_path, process)
    job = up.submit(ENDLESS)
    up.wait_for_status(job, "running")
    left = [*up.list_processes(job), *up.info["pids"].values()]
    terminal.close()
    process.send_signal(signal.SIGHUP)
    process.wait(60)
    stayed = [pid for pid in left if not is_gone(pid)]
    for pid in stayed:
        os.kill(pid, signal.SIGKILL)
    assert stayed == []


def last_entry(up: Board, job: str) -> str:
    """Return the ID of the newest entry in the job's stream."""
    environment = Path(f"/proc/{up.info['pids']['web']}/environ").read_bytes().split(b"\0")
    url = next(e.partition(b"=")[2].decode() for e in environment if e.startswith(b"MESHBOARD_REDIS_URL="))
    client = redis.Redis.from_url(url, socket_timeout=5)
    newest: Any = client.xrevrange(telemetry_stream(job, 1), count=1)
    return str(newest[0][0].decode()) if newest else ""
