"""Faults of hosts in a gang: at most one attempt lives, no process is left, and the board reports the cause."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from contracts.control import VERSION, Gang, LaunchOrder, Node
from contracts.names import TASK_LAUNCH, gang_key, host_queue
from tests.cluster.cluster import Cluster, cluster
from tests.cluster.jobs import check_verified, endless, training
from tests.support.processes import wait_until

SQUARE = {"dp": 2, "tp": 2}
LEASE_S = 25
GROUP_TIMEOUT_S = 100  # longer than any cut here, so a test ends each job
END_S = 15.0  # from the failure until no process is left


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    board = {"MESHBOARD_LEASE_S": str(LEASE_S)}
    timeout = {"MESHBOARD_GROUP_TIMEOUT_S": str(GROUP_TIMEOUT_S)}
    with cluster(tmp_path_factory.mktemp("cluster"), board_settings=board, **timeout) as made:
        yield made


@pytest.fixture
def gang(hosts: Cluster) -> Iterator[str]:
    """Run a job on two of the hosts, and check at the end that no process is left."""
    job = hosts.submit(endless("endless", SQUARE))
    hosts.wait_for(job, "running")
    hosts.wait_for_steps(job)
    yield job
    if not hosts.job(job)["finished"]:
        hosts.cancel(job)
    for attempt in range(1, hosts.job(job)["attempt"] + 1):
        wait_until(
            lambda attempt=attempt: not hosts.processes(job, attempt), f"no process of attempt {attempt} is left"
        )


def wait_until_none_left(hosts: Cluster, job: str, within_s: float = END_S, attempt: int = 1) -> None:
    wait_until(lambda: not hosts.processes(job, attempt), f"all processes of {job} end", within_s, 0.1)


def check_queued_again(hosts: Cluster, job: str, cause: str, within_s: float) -> None:
    """Check that the first attempt ended because of a host, and that a second one follows. Cancel the job."""
    reason = f"queued again, because the host failed: the gang did not start: {cause}"
    wait_until(lambda: reason in [change["reason"] for change in hosts.job(job)["history"]], reason, within_s, 0.5)
    wait_until_none_left(hosts, job)
    hosts.wait_for(job, "starting", "running")
    hosts.cancel(job)


def test_killed_rank_ends_the_gang_and_is_named(hosts: Cluster, gang: str) -> None:
    os.kill(hosts.rank_pid(gang, 3), signal.SIGKILL)
    wait_until_none_left(hosts, gang)
    exit = hosts.wait_for(gang, "failed", timeout_s=END_S)["exit"]
    assert (exit["rank"], exit["signal"]) == (3, "SIGKILL")
    assert exit["reason"].startswith("rank 3 was killed by SIGKILL")


def test_killed_supervisor_ends_the_gang(hosts: Cluster, gang: str) -> None:
    _, second = hosts.member_hosts(gang)
    second.run("pkill", "-KILL", "-f", "workers.host.supervisor")
    wait_until_none_left(hosts, gang)
    job = hosts.wait_for(gang, "lost", timeout_s=END_S)
    assert "the supervisor ended" in job["history"][-1]["reason"]


def test_power_loss_queues_the_job_again_and_nothing_else(hosts: Cluster, gang: str) -> None:
    _, second = hosts.member_hosts(gang)
    third = next(machine for machine in hosts.machines.values() if machine not in hosts.member_hosts(gang))
    other = hosts.submit(endless("healthy", {"dp": 2}))
    hosts.wait_for(other, "running")
    second.power_off()
    absent = hosts.wait_for(gang, "unreachable", timeout_s=60)
    assert absent["history"][-1]["reason"].startswith(f"no contact with host {second.name}")
    second.power_on()
    second.start_worker()
    # The host worker reports its restart first if it checks its attempts before the controller sees the new boot.
    causes = (f"host {second.name} was rebooted", "the machine or container of the host restarted")
    reasons = {f"queued again, because the host failed: {cause}" for cause in causes}
    found = wait_until(lambda: reasons & {change["reason"] for change in hosts.job(gang)["history"]}, "a restart", 90)
    assert len(found) == 1
    wait_until_none_left(hosts, gang)
    hosts.cancel(gang)
    assert [member["host"] for member in hosts.job(other)["members"]] == [third.name]
    hosts.wait_for_steps(other)
    hosts.cancel(other)


@pytest.mark.parametrize("way", ["both ways", "towards the host"])
def test_network_cut_of_half_the_lease_is_survived(hosts: Cluster, gang: str, way: str) -> None:
    _, second = hosts.member_hosts(gang)
    if way == "both ways":
        second.cable.cut()
    else:
        second.cable.cut_inbound()
    time.sleep(LEASE_S / 2)  # the cut itself
    second.cable.restore()
    hosts.wait_for_steps(gang)
    assert [change["status"] for change in hosts.job(gang)["history"]][:3] == ["queued", "starting", "running"]
    assert hosts.job(gang)["status"] == "running"


def test_disconnected_host_ends_its_ranks_after_the_lease(hosts: Cluster, gang: str) -> None:
    first, second = hosts.member_hosts(gang)
    cut = time.monotonic()
    second.cable.cut()
    wait_until(lambda: not hosts.processes(gang, on=second), "its ranks have ended", LEASE_S + END_S + 5)
    assert time.monotonic() - cut > LEASE_S - 5
    assert hosts.processes(gang, on=first), "silence alone ends nothing on the other"
    members = hosts.wait_for(gang, "unreachable", timeout_s=60)["members"]
    assert [(member["host"], member["silent"]) for member in members] == [(first.name, False), (second.name, True)]
    second.cable.restore()
    job = hosts.wait_for(gang, "lost", timeout_s=60)
    assert "no contact with the board for 25 s" in job["history"][-1]["reason"]
    wait_until_none_left(hosts, gang)


def test_returning_lost_host_ends_its_old_ranks(hosts: Cluster, gang: str) -> None:
    _, second = hosts.member_hosts(gang)
    # the host cannot even notice that its lease is over
    second.run("pkill", "-STOP", "-f", "workers.host.supervisor")
    second.cable.cut()
    hosts.wait_for(gang, "unreachable", timeout_s=60)
    hosts.call("POST", f"hosts/{second.name}/give-up")
    hosts.wait_for(gang, "lost", timeout_s=END_S)
    assert hosts.processes(gang, on=second), "the cut host trains on"
    hosts.call("POST", f"jobs/{gang}/requeue")
    wait_until(lambda: "may still run on silent host" in hosts.job(gang)["wait_reason"], "it waits for the lease", 10)
    second.cable.restore()
    wait_until_none_left(hosts, gang, 60)
    hosts.wait_for(gang, "running", timeout_s=120)
    starts = [change for change in hosts.job(gang)["history"] if change["status"] == "starting"]
    assert [start["attempt"] for start in starts] == [1, 2]
    assert hosts.processes(gang, 1) == []


def test_elastic_job_resumes_smaller_on_the_remaining_host(hosts: Cluster) -> None:
    job = hosts.submit(endless("elastic", {"dp": 4}, checkpoint_every=5, keep_checkpoints=1))
    hosts.wait_for(job, "running")
    wait_until(lambda: hosts.call("GET", f"jobs/{job}/checkpoints"), "the job reported a checkpoint", 60, 0.3)
    first, second = hosts.member_hosts(job)
    third = next(machine for machine in hosts.machines.values() if machine not in (first, second))
    try:
        third.power_off()
        second.power_off()
        hosts.wait_for(job, "unreachable", timeout_s=60)
        wait_until(lambda: hosts.hosts()[third.name]["state"] == "silent", "the third host is missed too", 60, 0.3)
        hosts.call("POST", f"hosts/{second.name}/give-up")
        hosts.wait_for(job, "lost", timeout_s=END_S + 15)
        offer = hosts.call("GET", f"jobs/{job}/smaller")
        assert offer["ranks"] == 2
        assert offer["checkpoint"]
        hosts.call("POST", f"jobs/{job}/smaller")
        hosts.wait_for(job, "running", timeout_s=LEASE_S + 120)  # after the lease of the lost host ends
        wait_until(lambda: hosts.get_step(job, 2) > 5, "the job resumes from its checkpoint", 60, 0.3)
        assert [member["host"] for member in hosts.job(job)["members"]] == [first.name]
        hosts.cancel(job)
    finally:
        for machine in (second, third):
            machine.power_on()
            machine.start_worker()
        for name in (second.name, third.name):
            wait_until(lambda name=name: hosts.hosts()[name]["state"] == "connected", f"{name} is back", 60, 0.3)


def test_repeated_and_late_orders_start_nothing(hosts: Cluster, gang: str) -> None:
    before = hosts.processes(gang)
    machines = hosts.member_hosts(gang)
    sender = Celery(broker=hosts.board.redis.url)
    nodes = [Node(host=machine.name, address=machine.cable.address, ranks=2) for machine in machines]
    spec = hosts.job(gang)["spec"]

    def send(attempt: int, expires: float) -> None:
        for node, machine in enumerate(machines):
            place = Gang(node=node, nodes=nodes, lease_s=LEASE_S)
            order = LaunchOrder(
                v=VERSION, job=gang, attempt=attempt, spec=spec, slots=[0, 1], expires=expires, gang=place
            )
            sender.send_task(TASK_LAUNCH, args=[order], queue=host_queue(machine.name))

    logs = [len(machine.worker_log.read_text()) for machine in machines]
    for _ in range(5):
        send(1, time.time() + 60)
    send(2, time.time() - 1)

    def refused() -> bool:
        texts = [machine.worker_log.read_text()[seen:] for machine, seen in zip(machines, logs, strict=True)]
        return all("refused the order" in text for text in texts)

    wait_until(refused, "the late one is refused")
    hosts.wait_for_steps(gang)
    assert hosts.processes(gang) == before
    assert hosts.processes(gang, 2) == []


def test_slow_link_slows_the_job_and_nothing_else(hosts: Cluster) -> None:
    for machine in hosts.machines.values():
        machine.cable.slow("20mbit")
    try:
        job = hosts.wait_for(hosts.submit(training("slow link", SQUARE)), "succeeded", timeout_s=180)
    finally:
        for machine in hosts.machines.values():
            machine.cable.slow("10gbit")
    check_verified(job, 4)


@pytest.mark.parametrize("node", [0, 1], ids=["the first", "the second"])
def test_gang_is_queued_again_after_a_host_was_not_ready(hosts: Cluster, node: int) -> None:
    """The launcher stops at its start, so the other hosts wait for its ranks or for its store."""
    job = hosts.submit(endless("not ready", SQUARE))
    hosts.wait_for(job, "starting")
    late = hosts.member_hosts(job)[node]
    its = f"[w]orkers.host.launch.*/{late.name}/runs/{job}/"  # a namespace of the network sees all processes
    late.run("sh", "-c", f"until pkill -STOP -f '{its}'; do sleep 0.05; done")
    check_queued_again(hosts, job, f"host {late.name} was not ready within 120 s", 170)


def test_gang_is_queued_again_if_the_first_host_stops_during_rank_start(hosts: Cluster) -> None:
    """Without the check, the other hosts would wait for its store forever, because torch has no timeout after a
    connect.
    """
    job = hosts.submit(endless("stands", SQUARE))
    hosts.wait_for(job, "starting")
    first, _ = hosts.member_hosts(job)
    wait_until(lambda: hosts.has_rank(job, 0), "a rank is there", 60, 0.02)
    first.run("pkill", "-STOP", "-f", f"[w]orkers.host.launch.*/{first.name}/runs/{job}/")
    check_queued_again(hosts, job, f"host {first.name} did not answer within 30 s", 90)


def test_gang_is_queued_again_if_the_first_host_stops_after_ready(hosts: Cluster) -> None:
    """The other hosts connect to its store, which accepts connections and never answers."""
    job = hosts.submit(endless("stops", SQUARE))
    hosts.wait_for(job, "starting")
    first, second = hosts.member_hosts(job)
    its = {machine: f"[w]orkers.host.launch.*/{machine.name}/runs/{job}/" for machine in (first, second)}
    second.run("sh", "-c", f"until pkill -STOP -f '{its[second]}'; do sleep 0.05; done")
    redis: Any = hosts.board.redis.client()
    wait_until(lambda: redis.hexists(gang_key(job, 1), "0"), f"{first.name} is ready", 60)
    assert not redis.hexists(gang_key(job, 1), "1")
    first.run("pkill", "-STOP", "-f", its[first])
    second.run("pkill", "-CONT", "-f", its[second])
    check_queued_again(hosts, job, f"host {first.name} did not answer within 30 s", 120)
