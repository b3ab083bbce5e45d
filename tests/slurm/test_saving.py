"""A run saves after the warning of Slurm, and its next attempt resumes from the checkpoint."""

from __future__ import annotations

import contextlib
import urllib.error
from typing import Any

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.installation import Installation
from tests.slurm.test_jobs import LONG, START_S, build_spec, list_reasons, wait_for_end
from tests.support.board import Board
from tests.support.processes import wait_until

pytestmark = pytest.mark.slow


def saving(nodes: int, **asked: Any) -> dict[str, Any]:
    """Build a run that saves a checkpoint only on request."""
    made = build_spec(LONG, nodes, **asked)
    made["train"]["checkpoint_every"] = LONG - 1
    return made


def stopped_after(reason: str) -> int:
    return int(reason.partition("after step ")[2].partition(" ")[0])


def steps_before(board: Board, job: str) -> int:
    """Wait for a step, cancel the running attempt, and return the number of steps before its start."""

    def trains() -> bool:
        with contextlib.suppress(urllib.error.HTTPError):  # no checkpoint exists yet
            return bool(board.call("GET", f"jobs/{job}/history/steps")["columns"]["step"])
        return False

    wait_until(trains, "it trains on", 90)
    board.call("POST", f"jobs/{job}/cancel")
    result = wait_for_end(board, job)
    assert result["status"] == "cancelled"
    summary: dict[str, int] = result["exit"]["summary"]
    return summary["steps"] - summary.get("ran_steps", summary["steps"])


def test_run_saves_before_its_time_limit_and_resumes(slurm: Cluster, installed: Installation) -> None:
    board = installed.board
    job = board.submit(saving(1, time_limit="0:01:00"))
    result = wait_for_end(board, job, timeout_s=150)
    stopped = result["exit"]["summary"]["steps"]
    name = f"{job}/1/step-{stopped:08d}"
    assert result["history"][-1]["reason"] == (
        f"stopped after step {stopped} because the Slurm time limit is near; newest checkpoint {name}; "
        "a retry resumes from it"
    )
    assert result["status"] == "failed"
    board.call("POST", f"jobs/{job}/requeue")
    board.wait_for_status(job, "running", timeout_s=START_S)
    assert steps_before(board, job) == stopped


def test_preempted_run_over_two_nodes_saves_requeues_and_resumes(slurm: Cluster, installed: Installation) -> None:
    board = installed.board
    job = board.submit(saving(2))
    board.wait_for_status(job, "running", timeout_s=START_S)
    urgent = slurm.submit_script("#!/bin/sh\nsleep 300\n", "--nodes=2", "--exclusive", "--time=5", "--partition=urgent")
    again = wait_until(lambda: (result := board.get_job(job))["attempt"] == 2 and result, "the job is queued again", 90)
    assert again
    ends = [reason for status, reason in list_reasons(again) if status == "cancelled"]
    assert len(ends) == 1
    assert " because Slurm preempted the job; newest checkpoint " in ends[0]
    stopped = stopped_after(ends[0])
    wait_until(lambda: slurm.get_job_state(urgent) == "RUNNING", "the urgent job has the nodes", 60)
    slurm.command("scancel", urgent)
    board.wait_for_status(job, "running", timeout_s=START_S)
    assert steps_before(board, job) == stopped


@pytest.mark.parametrize("nodes", [1, 2])
def test_run_cancelled_in_slurm_saves_within_killwait_and_resumes(
    slurm: Cluster, installed: Installation, nodes: int
) -> None:
    board = installed.board
    job = board.submit(saving(nodes))
    board.wait_for_status(job, "running", timeout_s=START_S)
    slurm.command("scancel", board.get_job(job)["engine_id"])
    result = wait_for_end(board, job)
    stopped = result["exit"]["summary"]["steps"]
    assert result["history"][-1]["reason"] == (
        f"stopped after step {stopped} because Slurm requested it; "
        f"newest checkpoint {job}/1/step-{stopped:08d}; a retry resumes from it"
    )
    assert result["status"] == "failed"
    board.call("POST", f"jobs/{job}/requeue")
    board.wait_for_status(job, "running", timeout_s=START_S)
    assert steps_before(board, job) == stopped


def test_run_preempted_by_sigterm_saves_and_resumes(slurm: Cluster, installed: Installation) -> None:
    """Most clusters preempt like this: SIGTERM when the GraceTime begins, and no signal that a job selected."""
    board, usual = installed.board, slurm.conf.read_text()
    slurm.configure(usual.replace("SlurmctldParameters=preempt_send_user_signal\n", ""))
    try:
        job = board.submit(saving(2))
        board.wait_for_status(job, "running", timeout_s=START_S)
        urgent = slurm.submit_script(
            "#!/bin/sh\nsleep 300\n", "--nodes=2", "--exclusive", "--time=5", "--partition=urgent"
        )
        again = wait_until(
            lambda: (result := board.get_job(job))["attempt"] == 2 and result, "the job is queued again", 90
        )
        assert again
        (reason,) = [reason for status, reason in list_reasons(again) if status == "cancelled"]
        assert " because Slurm preempted the job; newest checkpoint " in reason
        slurm.command("scancel", urgent)
        board.wait_for_status(job, "running", timeout_s=START_S)
        assert steps_before(board, job) == stopped_after(reason)
    finally:
        slurm.configure(usual)
