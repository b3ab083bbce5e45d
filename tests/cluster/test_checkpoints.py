"""Checkpoints of a gang whose hosts share nothing: a retry goes on wherever it is placed, and never anew in silence."""

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


def saved(hosts: Cluster, job: str, machine: str) -> list[str]:
    """Complete checkpoints of a job on a host's own disk."""
    root = hosts.machines[machine].checkpoint_root
    return sorted(str(path.parent.relative_to(root)) for path in (root / job).rglob("manifest.json"))


def lenders(machine: Machine) -> int:
    """Processes of it that send a checkpoint, or wait to."""
    return int(machine.run("sh", "-c", "pgrep -fc '[w]orkers.checkpoint.lend' || true"))


def break_one(hosts: Cluster, job: str, rank: int = 3) -> None:
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


def goes_on(hosts: Cluster, job: str, attempt: int = 2) -> None:
    """From where it was."""
    hosts.wait_for(job, "running", timeout_s=120)
    wait_until(lambda: hosts.step(job, attempt) > 0, "it makes steps", 60, 0.3)
    assert hosts.step(job, attempt) > 5


@pytest.fixture
def failed(hosts: Cluster) -> str:
    """A job over two hosts that saved, and then failed."""
    job = hosts.submit(endless("saves", {"dp": 2, "tp": 2}, **SAVING))
    hosts.wait_for(job, "running")
    lead = hosts.member_hosts(job)[0]
    wait_until(lambda: saved(hosts, job, lead.name), "a checkpoint is complete on the lead's host", 90, 0.3)
    wait_until(lambda: hosts.step(job) > 7, "it goes on", 60, 0.3)
    break_one(hosts, job)
    return job


def test_a_retry_goes_on_though_no_host_but_one_has_the_files(hosts: Cluster, failed: str) -> None:
    first, second = hosts.member_hosts(failed)
    assert saved(hosts, failed, first.name)
    assert saved(hosts, failed, second.name) == []
    with drained(hosts, *(one for one in hosts.machines.values() if one not in (first, second))):
        hosts.call("POST", f"jobs/{failed}/requeue")
        goes_on(hosts, failed)
    assert saved(hosts, failed, second.name), "the files were brought"
    hosts.cancel(failed)


def test_a_retry_elsewhere_is_sent_the_files_by_the_host_that_has_them(hosts: Cluster, failed: str) -> None:
    first, second = hosts.member_hosts(failed)
    (name,) = saved(hosts, failed, first.name)
    with drained(hosts, first, second):
        hosts.call("POST", f"jobs/{failed}/requeue")
        goes_on(hosts, failed)
        others = hosts.member_hosts(failed)
    assert not {first, second} & set(others)
    assert [saved(hosts, failed, one.name)[0] for one in others] == [name, name]
    wait_until(lambda: lenders(first) == 0, "who sent it has ended", 15)
    hosts.cancel(failed)


def test_so_is_a_job_of_one_host_though_its_ranks_meet_on_loopback(hosts: Cluster) -> None:
    job = hosts.submit(endless("alone", {"dp": 2}, **SAVING))
    hosts.wait_for(job, "running")
    (first,) = hosts.member_hosts(job)
    wait_until(lambda: saved(hosts, job, first.name), "a checkpoint is complete", 90, 0.3)
    wait_until(lambda: hosts.step(job) > 7, "it goes on", 60, 0.3)
    break_one(hosts, job, rank=1)
    with drained(hosts, first):
        hosts.call("POST", f"jobs/{job}/requeue")
        goes_on(hosts, job)
        assert hosts.member_hosts(job) != [first]
    hosts.cancel(job)


def test_where_that_host_is_down_the_retry_fails_and_says_where_the_files_are(hosts: Cluster, failed: str) -> None:
    first, _ = hosts.member_hosts(failed)
    (name,) = saved(hosts, failed, first.name)
    first.power_off()
    try:
        wait_until(lambda: hosts.hosts()[first.name]["state"] == "silent", "it is missed", 60, 0.3)
        hosts.call("POST", f"jobs/{failed}/requeue")
        job = hosts.wait_for(failed, "failed", timeout_s=120)
    finally:
        first.power_on()
        first.start_worker()
    reason = job["history"][-1]["reason"]
    assert f"Checkpoint {name} of an earlier attempt on host {first.name} is missing" in reason
    assert first.name not in {member["host"] for member in job["members"]}
    # Once it is back it goes on, on whichever hosts.
    wait_until(lambda: hosts.hosts()[first.name]["state"] == "connected", "it is back", 60, 0.3)
    hosts.call("POST", f"jobs/{failed}/requeue")
    goes_on(hosts, failed, 3)
    hosts.cancel(failed)
