"""Checkpoints of a gang whose hosts share nothing: a retry goes on where its files are, and never anew in silence."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster, cluster
from tests.cluster.jobs import endless
from tests.support.processes import wait_until

SAVING = {"checkpoint_every": 5, "keep_checkpoints": 1}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster"), shared=False) as made:
        yield made


def saved(hosts: Cluster, job: str, machine: str) -> list[str]:
    """Complete checkpoints of a job on a host's own disk."""
    root = hosts.machines[machine].checkpoint_root
    return sorted(str(path.parent.relative_to(root)) for path in (root / job).rglob("manifest.json"))


def break_one(hosts: Cluster, job: str, attempt: int = 1) -> None:
    os.kill(hosts.rank_pid(job, 3, attempt), signal.SIGKILL)
    hosts.wait_for(job, "failed", timeout_s=30)


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
    hosts.call("POST", f"jobs/{failed}/requeue")
    hosts.wait_for(failed, "running", timeout_s=120)
    wait_until(lambda: hosts.step(failed, 2) > 0, "it makes steps", 60, 0.3)
    assert hosts.step(failed, 2) > 5, "it went on from where it was"
    assert saved(hosts, failed, second.name), "the files were brought"
    hosts.cancel(failed)


def test_where_no_host_has_the_files_it_fails_and_says_where_they_are(hosts: Cluster, failed: str) -> None:
    first, second = hosts.member_hosts(failed)
    (name,) = saved(hosts, failed, first.name)
    hosts.call("POST", f"hosts/{first.name}/drain")
    try:
        hosts.call("POST", f"jobs/{failed}/requeue")
        job = hosts.wait_for(failed, "failed", timeout_s=120)
    finally:
        hosts.call("POST", f"hosts/{first.name}/undrain")
    reason = job["history"][-1]["reason"]
    assert f"checkpoint {name} was written by an earlier attempt, on host {first.name}" in reason
    assert first.name not in {member["host"] for member in job["members"]}
    # Where the files are it goes on.
    hosts.call("POST", f"hosts/{second.name}/drain")
    try:
        hosts.call("POST", f"jobs/{failed}/requeue")
        hosts.wait_for(failed, "running", timeout_s=120)
        wait_until(lambda: hosts.step(failed, 3) > 5, "it went on from where it was", 60, 0.3)
        hosts.cancel(failed)
    finally:
        hosts.call("POST", f"hosts/{second.name}/undrain")
