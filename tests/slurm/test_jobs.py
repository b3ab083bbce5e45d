"""Jobs of a board on a real Slurm: the board shows their state, and at most one attempt lives."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from jobs.queue.slurm.commands import check_site
from jobs.queue.slurm.script import Site
from tests.slurm.cluster import Cluster
from tests.slurm.installation import Installation
from tests.support.board import Board
from tests.support.processes import wait_until

pytestmark = pytest.mark.slow

LONG = 100_000  # number of steps: until the test ends it
START_S = 150  # start of torch on a busy machine


def build_spec(steps: int = 5, nodes: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "name": "on slurm",
        "model": {"preset": "gpt-tiny"},
        "layout": {"dp": 2, "tp": 2} if nodes > 1 else {"dp": 2},
        "train": {"steps": steps, "global_batch": 4, "seq_len": 32, "eval_every": 0},
        "resources": {"engine": "slurm", "slurm": {"nodes": nodes, **more}},
    }


def wait_for_end(board: Board, job: str, timeout_s: float = 90) -> dict[str, Any]:
    return board.wait_for_status(job, "succeeded", "failed", "lost", "cancelled", timeout_s=timeout_s)


def list_reasons(job: dict[str, Any]) -> list[tuple[str, str]]:
    return [(change["status"], change["reason"]) for change in job["history"]]


def list_trainer_processes(installed: Installation) -> set[int]:
    """Return the rank processes on the cluster's nodes."""
    mark, found = f"--spec={installed.folder}/".encode(), set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("nodes", [1, 2])
def test_job_runs_on_slurm_and_reports_everything(slurm: Cluster, installed: Installation, nodes: int) -> None:
    job = wait_for_end(installed.board, installed.board.submit(build_spec(nodes=nodes, partition="other")))
    assert (job["status"], job["exit"]["reason"]) == ("succeeded", "finished after step 5")
    where = "node[0-1]" if nodes == 2 else "node0"
    assert job["engine"] == "slurm"
    result = job["engine_told"]
    assert (result["partition"], result["nodes"]) == ("other", where)
    assert result["state"] in ("RUNNING", "COMPLETING", "COMPLETED")
    assert [member["host"] for member in job["members"]] == [f"node{n}" for n in range(nodes)]
    rows = [row for rows in job["exit"]["summary"]["verdict"].values() for row in rows]
    assert len(job["exit"]["summary"]["verdict"]) == 2 * nodes
    assert sum(abs(row["measured_bytes"] - row["predicted_bytes"]) for row in rows) == 0
    assert sum(row["measured_bytes"] for row in rows) > 0


def test_cancelled_job_ends_on_nodes_and_in_slurm(slurm: Cluster, installed: Installation) -> None:
    board = installed.board
    job = board.submit(build_spec(LONG))
    board.wait_for_status(job, "running", timeout_s=START_S)
    board.call("POST", f"jobs/{job}/cancel")
    result = wait_for_end(board, job)
    assert result["status"] == "cancelled"
    assert list_trainer_processes(installed) == set()
    wait_until(
        lambda: slurm.get_job_state(result["engine_id"]) not in ("RUNNING", "COMPLETING"), "Slurm's job ends", 30
    )


def test_job_waits_in_slurm_queue_with_reason_and_can_be_cancelled(slurm: Cluster, installed: Installation) -> None:
    board = installed.board
    blocker = slurm.submit_script("#!/bin/sh\nsleep 300\n", "--nodes=2", "--exclusive", "--time=5")
    job = board.submit(build_spec(time_limit="0:10:00"))

    def waits() -> dict[str, Any] | None:
        found = board.get_job(job)
        return found if "expected start" in found["wait_reason"] else None

    result = wait_until(waits, "Slurm's reason is reported", 60)
    assert result is not None
    assert result["status"] == "queued"
    assert result["wait_reason"].startswith(("Slurm: waiting for Resources", "Slurm: waiting for Priority"))
    board.call("POST", f"jobs/{job}/cancel")
    assert wait_for_end(board, job)["status"] == "cancelled"
    assert slurm.get_job_state(result["engine_id"]) == "CANCELLED"
    slurm.command("scancel", blocker)


def test_node_power_loss_loses_the_attempt_and_the_next_runs_elsewhere(slurm: Cluster, installed: Installation) -> None:
    board = installed.board
    job = board.submit(build_spec(LONG))
    board.wait_for_status(job, "running", timeout_s=START_S)
    node = board.get_job(job)["members"][0]["host"]
    slurm.lose_power(node)
    try:
        result = wait_for_end(board, job)
        assert result["status"] == "lost"
        assert result["history"][-1]["reason"].startswith("Slurm: a node failed (NodeDown); job ")
        board.call("POST", f"jobs/{job}/requeue")
        again = board.wait_for_status(job, "running", timeout_s=START_S)
        assert again["attempt"] == 2
        assert again["members"][0]["host"] != node
        board.call("POST", f"jobs/{job}/cancel")
        assert wait_for_end(board, job)["status"] == "cancelled"
    finally:
        slurm.start_node(node)


def test_disconnected_node_ends_its_ranks_on_return(slurm: Cluster, installed: Installation) -> None:
    board = installed.board
    job = board.submit(build_spec(LONG))
    board.wait_for_status(job, "running", timeout_s=START_S)
    node = board.get_job(job)["members"][0]["host"]
    slurm.cut(node)
    try:
        assert wait_for_end(board, job)["status"] == "lost"
    finally:
        slurm.reconnect(node)
    wait_until(lambda: not list_trainer_processes(installed), "its ranks end", 60)


def test_time_limit_is_reported_and_keeps_reported_data(slurm: Cluster, installed: Installation) -> None:
    board = installed.board
    job = board.submit(build_spec(LONG, time_limit="0:01:00"))
    result = wait_for_end(board, job, timeout_s=150)
    assert result["status"] == "failed"
    assert result["history"][-1]["reason"].startswith("Slurm: the job reached its time limit; job ")
    assert result["exit"]["summary"]["losses"]


def test_failure_before_the_supervisor_connects_shows_the_script_output(
    slurm: Cluster, installed: Installation
) -> None:
    board, certificate = installed.board, installed.front.certificate
    right = certificate.read_text()
    try:
        certificate.write_text("no certificate\n")
        result = wait_for_end(board, board.submit(build_spec()))
    finally:
        certificate.write_text(right)
    assert result["status"] == "failed"
    assert "the batch script failed" in result["history"][-1]["reason"]
    assert "meshboard: " in result["history"][-1]["reason"]


def test_doctor_finds_the_problem_that_blocks_jobs(slurm: Cluster, installed: Installation) -> None:
    site = Site(str(installed.folder), str(installed.python), installed.front.url)
    (accounts,) = check_site(site)
    assert (accounts.level, accounts.words.partition(":")[0]) == (
        "warn",
        "Slurm accounting (sacct) is off, so Meshboard may not learn why a Slurm job ended",
    )
    wrong = site._replace(python="/usr/bin/true", board="http://localhost", ca_file="/nonexistent")
    failed = [found.words for found in check_site(wrong) if found.level == "fail"]
    assert [re.findall(r"MESHBOARD_\w+", words) for words in failed] == [
        ["MESHBOARD_SLURM_CA_FILE"],
        ["MESHBOARD_SLURM_BOARD"],
    ]
    result, _ = check_site(site._replace(python="/usr/bin/false"))
    assert result.words == "MESHBOARD_SLURM_PYTHON is /usr/bin/false, which cannot import Meshboard: exit code 1"


def test_slurmctld_restart_changes_nothing(slurm: Cluster, installed: Installation) -> None:
    board = installed.board
    job = board.submit(build_spec(LONG))
    board.wait_for_status(job, "running", timeout_s=START_S)
    slurm.stop_controller(signal.SIGTERM)  # a killed slurmctld forgets the unsaved last seconds
    try:
        waiting = board.submit(build_spec())
        wait_until(lambda: "Cannot query Slurm" in board.get_job(waiting)["wait_reason"], "the failure is reported", 60)
    finally:
        slurm.start_controller()
    assert wait_for_end(board, waiting)["status"] == "succeeded"
    assert [status for status, _ in list_reasons(board.get_job(job))] == ["queued", "starting", "running"]
    board.call("POST", f"jobs/{job}/cancel")
    assert wait_for_end(board, job)["status"] == "cancelled"


def test_board_outage_ends_no_job(slurm: Cluster, installed: Installation) -> None:
    board = installed.board
    job = board.submit(build_spec(600))
    board.wait_for_status(job, "running", timeout_s=START_S)
    installed.front.stop()
    wait_until(lambda: not list_trainer_processes(installed), "the job completes during the outage", 120)
    installed.front.start()
    assert wait_for_end(board, job)["status"] == "succeeded"
