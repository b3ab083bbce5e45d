"""Checkpoints of a gang whose hosts share no storage: a retry resumes on any host, and never restarts silently."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster, cluster
from tests.cluster.jobs import endless
from tests.cluster.machine import Machine
from tests.support.processes import wait_until

SAVING = {"checkpoint_every": 5, "keep_checkpoints": 1}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    names = ("anna", "bert", "cleo", "dora")
    with cluster(tmp_path_factory.mktemp("cluster"), names, shared=False) as made:
        yield made


def list_saved_checkpoints(hosts: Cluster, job: str, machine: str) -> list[str]:
    """Return the complete checkpoints of a job on a host's own disk."""
    root = hosts.machines[machine].checkpoint_root
    return sorted(str(path.parent.relative_to(root)) for path in (root / job).rglob("manifest.json"))


def list_lenders(machine: Machine) -> int:
    """Return processes of a machine that send a checkpoint or wait to send."""
    return int(machine.run("sh", "-c", "pgrep -fc '[w]orkers.checkpoint.lend' || true"))


def kill_rank(hosts: Cluster, job: str, rank: int = 3) -> None:
    os.kill(hosts.rank_pid(job, rank), signal.SIGKILL)
    hosts.wait_for(job, "failed", timeout_s=30)


@contextlib.contextmanager
def drained(hosts: Cluster, *machines: Machine) -> Iterator[None]:
    for machine in machines:
        hosts.call("POST", f"hosts/{machine.name}/drain")
    try:
        yield
    finally:
        for machine in machines:
            hosts.call("POST", f"hosts/{machine.name}/undrain")


def check_resumed(hosts: Cluster, job: str, attempt: int = 2) -> None:
    """Check that the attempt resumes from the saved step."""
    hosts.wait_for(job, "running", timeout_s=120)
    wait_until(lambda: hosts.get_step(job, attempt) > 0, "it makes steps", 60, 0.3)
    assert hosts.get_step(job, attempt) > 5


@pytest.fixture
def failed_job(hosts: Cluster) -> str:
    """Create a job over two hosts that saved and then failed."""
    job = hosts.submit(endless("saves", {"dp": 2, "tp": 2}, **SAVING))
    hosts.wait_for(job, "running")
    lead = hosts.member_hosts(job)[0]
    wait_until(
        lambda: list_saved_checkpoints(hosts, job, lead.name), "a checkpoint is complete on the lead's host", 90, 0.3
    )
    wait_until(lambda: hosts.get_step(job) > 7, "the job makes steps", 60, 0.3)
    kill_rank(hosts, job)
    return job


def test_retry_resumes_if_only_one_host_has_the_files(hosts: Cluster, failed: str) -> None:
    first, second = hosts.member_hosts(failed)
    assert list_saved_checkpoints(hosts, failed, first.name)
    assert list_saved_checkpoints(hosts, failed, second.name) == []
    with drained(hosts, *(one for one in hosts.machines.values() if one not in (first, second))):
        hosts.call("POST", f"jobs/{failed_job}/requeue")
        check_resumed(hosts, failed)
    assert list_saved_checkpoints(hosts, failed, second.name), "the files were brought"
    hosts.cancel(failed)


def test_retry_on_other_hosts_receives_the_files(hosts: Cluster, failed: str) -> None:
    first, second = hosts.member_hosts(failed)
    (name,) = list_saved_checkpoints(hosts, failed, first.name)
    with drained(hosts, first, second):
        hosts.call("POST", f"jobs/{failed_job}/requeue")
        check_resumed(hosts, failed)
        others = hosts.member_hosts(failed)
    assert not {first, second} & set(others)
    assert [list_saved_checkpoints(hosts, failed, one.name)[0] for one in others] == [name, name]
    wait_until(lambda: list_lenders(first) == 0, "who sent it has ended", 15)
    hosts.cancel(failed)


def test_single_host_job_on_loopback_receives_the_files_as_well(hosts: Cluster) -> None:
    job = hosts.submit(endless("alone", {"dp": 2}, **SAVING))
    hosts.wait_for(job, "running")
    (first,) = hosts.member_hosts(job)
    wait_until(lambda: list_saved_checkpoints(hosts, job, first.name), "a checkpoint is complete", 90, 0.3)
    wait_until(lambda: hosts.get_step(job) > 7, "the job makes steps", 60, 0.3)
    kill_rank(hosts, job, rank=1)
    with drained(hosts, first):
        hosts.call("POST", f"jobs/{job}/requeue")
        check_resumed(hosts, job)
        assert hosts.member_hosts(job) != [first]
    hosts.cancel(job)


def test_retry_fails_and_names_the_files_if_their_host_is_down(hosts: Cluster, failed: str) -> None:
    first, _ = hosts.member_hosts(failed)
    (name,) = list_saved_checkpoints(hosts, failed, first.name)
    first.power_off()
    try:
        wait_until(lambda: hosts.hosts()[first.name]["state"] == "silent", "it is missed", 60, 0.3)
        hosts.call("POST", f"jobs/{failed_job}/requeue")
        job = hosts.wait_for(failed, "failed", timeout_s=120)
    finally:
        first.power_on()
        first.start_worker()
    reason = job["history"][-1]["reason"]
    assert f"Checkpoint {name} of an earlier attempt on host {first.name} is missing" in reason
    assert first.name not in {member["host"] for member in job["members"]}
    # The retry resumes on any host once the host with the files is back.
    wait_until(lambda: hosts.hosts()[first.name]["state"] == "connected", "it is back", 60, 0.3)
    hosts.call("POST", f"jobs/{failed_job}/requeue")
    check_resumed(hosts, failed, 3)
    hosts.cancel(failed)
