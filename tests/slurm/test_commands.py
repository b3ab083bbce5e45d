"""Run the commands of Slurm against a real Slurm, and classify their failures."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from jobs.queue.slurm.commands import CommandRunner, Slurm, SlurmUnavailableError, SubmissionRejectedError
from jobs.queue.slurm.script import Site, build_submission, get_log_folder
from jobs.queue.slurm.states import SlurmJob, describe_end, describe_wait, format_job_name
from planner.facts.parse_spec import parse_spec
from planner.facts.spec import JobSpec
from tests.slurm.cluster import CPUS, Cluster
from tests.slurm.login import Login
from tests.support.processes import wait_until

pytestmark = pytest.mark.slow

SLURM = Slurm(CommandRunner())


def build_spec(dp: int = 1, **asked: object) -> JobSpec:
    data = {"model": {"preset": "gpt-tiny"}, "layout": {"dp": dp}, "train": {"global_batch": dp}}
    return parse_spec({**data, "resources": {"engine": "slurm", "slurm": asked}})


def build_script(body: str) -> str:
    return f"#!/bin/sh\n{body}\n"


def find_job(name: str, slurm: Slurm = SLURM) -> SlurmJob:
    return next(job for job in slurm.list_jobs() if job.name == name)


def wait_for(name: str, *states: str, timeout_s: float = 30) -> SlurmJob:
    def reached() -> SlurmJob | None:
        job = find_job(name)
        return job if job.state in states else None

    job = wait_until(reached, f"{name} is {states}", timeout_s)
    assert job is not None
    return job


def options(slurm: Cluster, job: str, asked: JobSpec | None = None) -> tuple[str, tuple[str, ...]]:
    site = Site(str(slurm.folder), "python", "https://board")
    SLURM.make_folder(get_log_folder(site.folder))
    made = build_submission(asked or build_spec(), job, 1, {}, site, 300)
    return made.name, made.options


def test_job_is_found_by_name_with_its_end(slurm: Cluster) -> None:
    name, argv = options(slurm, "ends")
    job = SLURM.submit(argv, build_script("exit 3"))
    ended_job = wait_for(name, "FAILED")
    assert ended_job.id == job
    assert describe_end(ended_job) == ("failed", f"Slurm: the batch script failed; job {job} on node0, FAILED")


def test_missing_work_folder_is_reported_and_starts_nothing(slurm: Cluster) -> None:
    name, argv = options(slurm, "nowhere")
    job = SLURM.submit([*argv, "--output=/nonexistent/out"], build_script("true"))
    assert describe_end(wait_for(name, "FAILED")).reason == (
        f"Slurm: the batch script failed (JobLaunchFailure); job {job} on node0, FAILED"
    )


def test_requested_resources_are_allocated(slurm: Cluster) -> None:
    asked = build_spec(dp=4, nodes=2, cpus_per_rank=2, partition="other", time_limit="0:10:00")
    name, argv = options(slurm, "asks", asked)
    SLURM.submit(argv, build_script("sleep 60"))
    assert wait_for(name, "RUNNING").nodes == "node[0-1]"
    shown = slurm.command("scontrol", "show", "job", find_job(name).id)
    assert re.search(r"Partition=other .*", shown)
    assert f"NumNodes=2 NumCPUs=8 NumTasks=2 CPUs/Task={CPUS}" in shown
    assert "TimeLimit=00:10:00" in shown
    assert "Requeue=0" in shown
    SLURM.cancel([find_job(name).id])
    assert wait_for(name, "CANCELLED").state == "CANCELLED"


def test_waiting_job_has_a_readable_reason(slurm: Cluster) -> None:
    first, argv = options(slurm, "first", build_spec(dp=8, nodes=2, time_limit="0:05:00"))
    running = SLURM.submit(argv, build_script("sleep 60"))
    wait_for(first, "RUNNING")
    second, argv = options(slurm, "second")
    waiting = SLURM.submit(argv, build_script("true"))
    pending = wait_until(
        lambda: next((j for j in SLURM.list_jobs() if j.name == second and j.start and j.reason), None), "a start"
    )
    assert pending is not None
    assert re.fullmatch(
        r"Slurm: waiting for (Resources: not enough free nodes with the requested resources|Priority: .*), "
        r"expected start 20\d\d-\d\d-\d\d \d\d:\d\d UTC",
        describe_wait(pending),
    )
    assert pending.start is not None
    assert 0 < pending.start.timestamp() - time.time() <= 360, "in UTC, five minutes from now"
    SLURM.cancel([running, waiting])


def test_impossible_request_is_rejected_with_the_message_of_slurm(slurm: Cluster) -> None:
    _, argv = options(slurm, "refused", build_spec(partition="nowhere"))
    with pytest.raises(SubmissionRejectedError, match=r"^[Ii]nvalid partition name specified$"):
        SLURM.submit(argv, build_script("true"))
    _, argv = options(slurm, "refused", build_spec(exclude="nowhere[1-3]"))
    with pytest.raises(SubmissionRejectedError, match="Invalid node name specified"):
        SLURM.submit(argv, build_script("true"))


def test_job_that_cannot_run_waits_with_its_reason(slurm: Cluster) -> None:
    name, argv = options(slurm, "large", build_spec(dp=12, nodes=12))
    SLURM.submit(argv, build_script("true"))
    wait_until(lambda: find_job(name).reason == "PartitionConfig", "Slurm has considered it")
    assert (
        describe_wait(find_job(name))
        == "Slurm: waiting for PartitionConfig: the partition lacks the requested resources"
    )


def test_second_submit_of_a_name_waits_for_the_first(slurm: Cluster) -> None:
    name, argv = options(slurm, "twice")
    first = SLURM.submit(argv, build_script("sleep 60"))
    wait_for(name, "RUNNING")
    second = SLURM.submit(argv, build_script("true"))
    both = {job.id: job for job in SLURM.list_jobs() if job.name == name}
    assert both[first].state == "RUNNING"
    assert (both[second].state, both[second].reason) == ("PENDING", "Dependency")
    SLURM.cancel([first])
    wait_until(lambda: {j.id: j.state for j in SLURM.list_jobs()}[second] == "COMPLETED", "the second runs", 20)


def test_nothing_is_rejected_while_slurmctld_is_unavailable(slurm: Cluster) -> None:
    _, argv = options(slurm, "early")
    slurm.stop_controller()
    try:
        with pytest.raises(SlurmUnavailableError, match="sbatch"):
            SLURM.submit(argv, build_script("true"))
        with pytest.raises(SlurmUnavailableError, match="squeue"):
            SLURM.list_jobs()
    finally:
        slurm.start_controller()


def test_job_continues_while_slurmctld_restarts(slurm: Cluster) -> None:
    name, argv = options(slurm, "survivor")
    job = SLURM.submit(argv, build_script("sleep 60"))
    wait_for(name, "RUNNING")
    slurm.stop_controller(signal.SIGTERM)
    slurm.start_controller()
    assert wait_for(name, "RUNNING").id == job
    SLURM.cancel([job])
    wait_for(name, "CANCELLED")


def test_node_power_loss_ends_its_job(slurm: Cluster) -> None:
    name, argv = options(slurm, "powerless")
    job = SLURM.submit(argv, build_script("sleep 60"))
    node = wait_for(name, "RUNNING").nodes
    slurm.lose_power(node)
    try:
        failed = wait_for(name, "NODE_FAIL", timeout_s=60)
        assert describe_end(failed) == ("lost", f"Slurm: a node failed (NodeDown); job {job} on {node}, NODE_FAIL")
    finally:
        slurm.start_node(node)


def test_ssh_gives_equal_results_and_no_text_reaches_a_shell(slurm: Cluster, login: Login) -> None:
    remote = Slurm(CommandRunner(login.address, str(login.config)))
    name, argv = options(slurm, "remote")
    job = remote.submit([*argv, "--comment=$(touch /tmp/meshboard-shell); `id` ' \" &"], build_script("sleep 60"))
    wait_until(lambda: find_job(name, remote).state == "RUNNING", "it runs")
    assert "Comment=$(touch /tmp/meshboard-shell); `id` ' \" &" in slurm.command("scontrol", "show", "job", job)
    assert not Path("/tmp/meshboard-shell").exists()
    remote.cancel([job])
    wait_for(name, "CANCELLED")


def test_stopped_login_node_is_unavailable_until_it_restarts(slurm: Cluster, login: Login) -> None:
    remote = Slurm(CommandRunner(login.address, str(login.config)))
    remote.list_jobs()
    login.stop()
    with pytest.raises(SlurmUnavailableError, match="Cannot reach the login node root@login"):
        remote.list_jobs()
    login.start()
    remote.list_jobs()


def test_missing_command_is_unavailable(slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/usr/sbin")
        with pytest.raises(SlurmUnavailableError, match="squeue cannot start"):
            SLURM.list_jobs()


def test_job_name_is_unique_per_attempt() -> None:
    assert format_job_name("abc", 12) == "meshboard-abc-12"
