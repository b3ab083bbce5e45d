"""Jobs of a whole board on a real Slurm: what the page shows of them, and that one attempt lives at most."""

from __future__ import annotations

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

LONG = 100_000  # steps: until it is ended
START_S = 150  # torch on a busy machine


def spec(steps: int = 5, nodes: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "name": "on slurm",
        "model": {"preset": "gpt-tiny"},
        "layout": {"dp": 2, "tp": 2} if nodes > 1 else {"dp": 2},
        "train": {"steps": steps, "global_batch": 4, "seq_len": 32, "eval_every": 0},
        "resources": {"engine": "slurm", "slurm": {"nodes": nodes, **more}},
    }


def ended(board: Board, job: str, timeout_s: float = 90) -> dict[str, Any]:
    return board.wait_for_status(job, "succeeded", "failed", "lost", "cancelled", timeout_s=timeout_s)


def reasons(job: dict[str, Any]) -> list[tuple[str, str]]:
    return [(change["status"], change["reason"]) for change in job["history"]]


def trainers(installed: Installation) -> set[int]:
    """Processes of ranks on the cluster's nodes."""
    mark, found = f"--spec={installed.folder}/".encode(), set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_runs_on_slurm_and_all_of_it_is_told(slurm: Cluster, installed: Installation, nodes: int) -> None:
    job = ended(installed.board, installed.board.submit(spec(nodes=nodes, partition="other")))
    assert (job["status"], job["exit"]["reason"]) == ("succeeded", "finished after step 5")
    where = "node[0-1]" if nodes == 2 else "node0"
    assert job["engine"] == "slurm"
    told = job["engine_told"]
    assert (told["partition"], told["nodes"]) == ("other", where)
    assert told["state"] in ("RUNNING", "COMPLETING", "COMPLETED")
    assert [member["host"] for member in job["members"]] == [f"node{n}" for n in range(nodes)]
    rows = [row for rows in job["exit"]["summary"]["verdict"].values() for row in rows]
    assert len(job["exit"]["summary"]["verdict"]) == 2 * nodes
    assert sum(abs(row["measured_bytes"] - row["predicted_bytes"]) for row in rows) == 0
    assert sum(row["measured_bytes"] for row in rows) > 0


def test_a_cancelled_job_ends_on_its_nodes_and_in_slurm(slurm: Cluster, installed: Installation) -> None:
    board = installed.board
    job = board.submit(spec(LONG))
    board.wait_for_status(job, "running", timeout_s=START_S)
    board.call("POST", f"jobs/{job}/cancel")
    told = ended(board, job)
    assert told["status"] == "cancelled"
    assert trainers(installed) == set()
    wait_until(lambda: slurm.state_of(told["engine_id"]) not in ("RUNNING", "COMPLETING"), "Slurm's job ends", 30)


def test_a_job_waits_in_slurm_s_queue_with_its_reason_and_is_cancelled_there(
    slurm: Cluster, installed: Installation
) -> None:
    board = installed.board
    blocker = slurm.batch("#!/bin/sh\nsleep 300\n", "--nodes=2", "--exclusive", "--time=5")
    job = board.submit(spec(time_limit="0:10:00"))

    def waits() -> dict[str, Any] | None:
        found = board.get_job(job)
        return found if "expected start" in found["wait_reason"] else None

    told = wait_until(waits, "Slurm's reason is told", 60)
    assert told is not None
    assert told["status"] == "queued"
    assert told["wait_reason"].startswith(("Slurm: waiting for Resources", "Slurm: waiting for Priority"))
    board.call("POST", f"jobs/{job}/cancel")
    assert ended(board, job)["status"] == "cancelled"
    assert slurm.state_of(told["engine_id"]) == "CANCELLED"
    slurm.command("scancel", blocker)


def test_a_node_that_loses_its_power_loses_the_attempt_and_the_next_one_runs_elsewhere(
    slurm: Cluster, installed: Installation
) -> None:
    board = installed.board
    job = board.submit(spec(LONG))
    board.wait_for_status(job, "running", timeout_s=START_S)
    node = board.get_job(job)["members"][0]["host"]
    slurm.lose_power(node)
    try:
        told = ended(board, job)
        assert told["status"] == "lost"
        assert told["history"][-1]["reason"].startswith("Slurm: a node failed (NodeDown); job ")
        board.call("POST", f"jobs/{job}/requeue")
        again = board.wait_for_status(job, "running", timeout_s=START_S)
        assert again["attempt"] == 2
        assert again["members"][0]["host"] != node
        board.call("POST", f"jobs/{job}/cancel")
        assert ended(board, job)["status"] == "cancelled"
    finally:
        slurm.start_node(node)


def test_a_node_that_is_cut_off_ends_its_ranks_when_it_is_back(slurm: Cluster, installed: Installation) -> None:
    board = installed.board
    job = board.submit(spec(LONG))
    board.wait_for_status(job, "running", timeout_s=START_S)
    node = board.get_job(job)["members"][0]["host"]
    slurm.cut(node)
    try:
        assert ended(board, job)["status"] == "lost"
    finally:
        slurm.mend(node)
    wait_until(lambda: not trainers(installed), "its ranks end", 60)


def test_a_job_past_its_time_limit_says_so_and_keeps_what_it_told(slurm: Cluster, installed: Installation) -> None:
    board = installed.board
    job = board.submit(spec(LONG, time_limit="0:01:00"))
    told = ended(board, job, timeout_s=150)
    assert told["status"] == "failed"
    assert told["history"][-1]["reason"].startswith("Slurm: the job reached its time limit; job ")
    assert told["exit"]["summary"]["losses"]


def test_what_fails_before_a_supervisor_speaks_is_told_from_the_script_s_output(
    slurm: Cluster, installed: Installation
) -> None:
    board, certificate = installed.board, installed.front.certificate
    right = certificate.read_text()
    try:
        certificate.write_text("no certificate\n")
        told = ended(board, board.submit(spec()))
    finally:
        certificate.write_text(right)
    assert told["status"] == "failed"
    assert "the batch script failed" in told["history"][-1]["reason"]
    assert "meshboard: " in told["history"][-1]["reason"]


def test_the_doctor_finds_what_keeps_jobs_from_running(slurm: Cluster, installed: Installation) -> None:
    site = Site(str(installed.folder), str(installed.python), installed.front.url)
    (accounts,) = check_site(site)
    assert (accounts.level, accounts.words.partition(":")[0]) == (
        "warn",
        "Slurm accounting (sacct) is off, so Meshboard may not learn why a Slurm job ended",
    )
    wrong = site._replace(python="/usr/bin/true", board="http://localhost", ca_file="/nonexistent")
    failed = [found.words.partition(":")[0] for found in check_site(wrong) if found.level == "fail"]
    assert failed == ["MESHBOARD_SLURM_CA_FILE", "MESHBOARD_SLURM_BOARD"]
    told, _ = check_site(site._replace(python="/usr/bin/false"))
    assert told.words == "MESHBOARD_SLURM_PYTHON is /usr/bin/false, which cannot import Meshboard: exit code 1"


def test_slurmctld_restarted_in_the_middle_changes_nothing(slurm: Cluster, installed: Installation) -> None:
    board = installed.board
    job = board.submit(spec(LONG))
    board.wait_for_status(job, "running", timeout_s=START_S)
    slurm.stop_controller(signal.SIGTERM)  # killed, it forgets what it did not save in the last seconds
    try:
        waiting = board.submit(spec())
        wait_until(lambda: "Cannot query Slurm" in board.get_job(waiting)["wait_reason"], "the trouble is told", 60)
    finally:
        slurm.start_controller()
    assert ended(board, waiting)["status"] == "succeeded"
    assert [status for status, _ in reasons(board.get_job(job))] == ["queued", "starting", "running"]
    board.call("POST", f"jobs/{job}/cancel")
    assert ended(board, job)["status"] == "cancelled"


def test_the_board_away_ends_no_job(slurm: Cluster, installed: Installation) -> None:
    board = installed.board
    job = board.submit(spec(600))
    board.wait_for_status(job, "running", timeout_s=START_S)
    installed.front.stop()
    wait_until(lambda: not trainers(installed), "it trains to its end with nobody listening", 120)
    installed.front.start()
    assert ended(board, job)["status"] == "succeeded"
