"""Faults of a whole installation, and the states that its API reports."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.board import Board, run_board
from tests.support.processes import is_gone, list_session_pids, wait_until
from workers.disk import read_json
from workers.host.attempts import get_attempt_dir

ENDLESS: dict[str, Any] = {
    "name": "endless",
    "model": {"preset": "gpt-tiny"},
    "layout": {"dp": 2},
    "train": {"steps": 100_000, "global_batch": 4, "seq_len": 32, "eval_every": 0},
}


pytestmark = pytest.mark.slow  # a whole installation whose parts are killed in turn


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Board]:
    with run_board(tmp_path_factory.mktemp("faults")) as made:
        yield made


@pytest.fixture
def running_job(installation: Board) -> Iterator[str]:
    job = installation.submit(ENDLESS)
    installation.wait_for_status(job, "running")
    installation.wait_for_line(job, "step 2/")
    yield job
    if installation.get_job(job)["status"] not in ("failed", "lost", "cancelled"):
        installation.call("POST", f"jobs/{job}/cancel")
        installation.wait_for_status(job, "cancelled")
    assert installation.list_processes(job) == []


def statuses(installation: Board, job: str) -> list[str]:
    return [change["status"] for change in installation.get_job(job)["history"]]


def test_job_survives_a_killed_host_worker(installation: Board, running_job: str) -> None:
    worker = installation.info["pids"]["host"]
    os.killpg(worker, signal.SIGKILL)
    wait_until(lambda: installation.info["pids"]["host"] != worker, "the runner starts another host worker")
    before = len(installation.read_log("host"))
    wait_until(lambda: "ready" in installation.read_log("host")[before:], "the new worker is ready")
    step = wait_until(lambda: last_step(installation, running_job), "a step is logged")
    wait_until(lambda: last_step(installation, running_job) > step + 10, "training goes on")
    assert statuses(installation, running_job) == ["queued", "starting", "running"]


def last_step(installation: Board, job: str) -> int:
    log = next((installation.state / "runs" / job / "1" / "logs").rglob("attempt_*/0/stdout.log"))
    lines = [line for line in log.read_text().splitlines() if line.startswith("step ")]
    return int(lines[-1].split()[1].split("/")[0]) if lines else 0


def test_job_survives_killed_controller_and_web(installation: Board, running_job: str) -> None:
    pids = installation.info["pids"]
    for name in ("controller", "web"):
        os.killpg(pids[name], signal.SIGKILL)
    wait_until(
        lambda: {n: installation.info["pids"][n] for n in ("controller", "web")}.items().isdisjoint(pids.items()),
        "both are started again",
    )
    installation.wait_for_status(running_job, "running")
    assert statuses(installation, running_job) == ["queued", "starting", "running"]
    # The next service continues and receives the report of the end.
    resumed = "The other controller has ended"
    wait_until(lambda: resumed in installation.read_log("controller"), "the lease of the killed one ends", 30)
    installation.call("POST", f"jobs/{running_job}/cancel")
    installation.wait_for_status(running_job, "cancelled")
    assert [*list_session_pids(pids["controller"]), *list_session_pids(pids["web"])] == []


def test_job_with_a_killed_supervisor_is_lost(installation: Board, running_job: str) -> None:
    attempt = get_attempt_dir(installation.state / "runs", running_job, 1)
    pids = installation.list_processes(running_job)
    os.kill(read_json(attempt.pid_file)["pid"], signal.SIGKILL)
    wait_until(lambda: all(is_gone(pid) for pid in pids), "nothing is left", 1)
    job = installation.wait_for_status(running_job, "lost", timeout_s=40)
    assert "supervisor ended" in job["exit"]["reason"]


def test_job_with_a_killed_rank_fails_with_its_last_lines(installation: Board, running_job: str) -> None:
    victim = next(
        pid
        for pid in installation.list_processes(running_job)
        if b"RANK=0" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    )
    os.kill(victim, signal.SIGKILL)
    end = installation.wait_for_status(running_job, "failed")["exit"]
    assert (end["rank"], end["signal"]) == (0, "SIGKILL")
    assert end["reason"].startswith("rank 0 was killed by SIGKILL after step ")
    assert any(line.startswith("step ") for line in end["log_tail"])


def test_training_survives_a_killed_redis(installation: Board, running_job: str) -> None:
    redis_pid = installation.info["pids"]["redis"]
    step = last_step(installation, running_job)
    os.killpg(redis_pid, signal.SIGKILL)
    wait_until(lambda: installation.info["pids"]["redis"] != redis_pid, "Redis is started again")
    wait_until(lambda: last_step(installation, running_job) > step + 20, "training goes on")
    installation.call("POST", f"jobs/{running_job}/cancel")
    end = installation.wait_for_status(running_job, "cancelled")
    assert statuses(installation, running_job) == ["queued", "starting", "running", "cancelling", "cancelled"]
    assert end["exit"]["summary"]["steps"] >= step + 20


def test_killed_services_leave_no_process(installation: Board) -> None:
    for name, pid in installation.info["pids"].items():
        before = list_session_pids(pid)
        assert pid in before
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda name=name, pid=pid: installation.info["pids"][name] != pid, f"{name} is started again")
        assert [p for p in before if not is_gone(p)] == [], name

    def answers() -> bool:
        try:
            return bool(installation.call("GET", "hosts"))
        except OSError:  # the web process is starting
            return False

    wait_until(answers, "the API answers")


def test_full_redis_loses_no_submit(installation: Board) -> None:
    spec = {**ENDLESS, "name": "while full", "train": {**ENDLESS["train"], "steps": 20}}
    server = installation.connect_redis()
    before = server.config_get("maxmemory")["maxmemory"]
    server.config_set("maxmemory", 1)
    try:
        job = installation.submit(spec)
        assert installation.get_job(job)["status"] == "queued"
    finally:
        server.config_set("maxmemory", before)
    installation.wait_for_status(job, "succeeded")
