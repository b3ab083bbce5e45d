"""Outage of board services while a gang trains. MINUTES=20 sets the duration, and the default is one minute."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.cluster import Cluster, cluster
from tests.cluster.jobs import endless, training
from tests.support.processes import wait_until

AWAY_S = 60 * float(os.environ.get("MINUTES", "1"))
SQUARE = {"dp": 2, "tp": 2}
PAIR = {"dp": 2}
pytestmark = pytest.mark.timeout(900 + 4 * AWAY_S)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start two hosts that a gang fills, with a lease longer than the outages here."""
    group = {"MESHBOARD_GROUP_TIMEOUT_S": str(int(AWAY_S) + 600)}
    board = {"MESHBOARD_LEASE_S": str(int(AWAY_S) + 600)}
    with cluster(tmp_path_factory.mktemp("cluster"), names=("anna", "bert"), board_settings=board, **group) as made:
        yield made


@pytest.fixture
def gang(hosts: Cluster) -> Iterator[str]:
    """Run a job on both hosts, and check at the end that no process is left."""
    job = build_gang_spec(hosts, "endless")
    yield job
    if not hosts.job(job)["finished"]:
        hosts.cancel(job)
    wait_until(lambda: not hosts.processes(job), "no process of it is left")


def build_gang_spec(hosts: Cluster, name: str) -> str:
    """Return a spec that trains on both hosts."""
    job = hosts.submit(endless(name, SQUARE))
    hosts.wait_for(job, "running")
    hosts.wait_for_steps(job)
    return job


def statuses(hosts: Cluster, job: str) -> list[str]:
    return [change["status"] for change in hosts.job(job)["history"]]


def wait_while_training(hosts: Cluster, job: str, seconds: float = AWAY_S) -> None:
    """Wait for `seconds`, and check that the job trains."""
    before = len(hosts.processes(job))
    time.sleep(seconds)  # the fault itself
    assert len(hosts.processes(job)) == before


def kill_controllers(hosts: Cluster) -> None:
    for controller in hosts.controllers:
        controller.send_signal(signal.SIGKILL)
        controller.wait()
    hosts.controllers = []


def test_controller_outage_of_minutes_loses_nothing(hosts: Cluster, gang: str) -> None:
    kill_controllers(hosts)
    waiting = hosts.submit(training("meanwhile", SQUARE))
    before = hosts.get_step(gang)
    wait_while_training(hosts, gang)
    assert hosts.get_step(gang) > before
    hosts.controllers = [hosts.start_controller()]
    hosts.cancel(gang)
    assert hosts.wait_for(waiting, "succeeded", timeout_s=180)["attempt"] == 1
    assert statuses(hosts, gang) == ["queued", "starting", "running", "cancelling", "cancelled"]


def test_job_that_ended_during_controller_outage_succeeds(hosts: Cluster) -> None:
    job = hosts.submit(training("ends", SQUARE, steps=40))
    hosts.wait_for(job, "running")
    kill_controllers(hosts)
    wait_until(lambda: not hosts.processes(job), "it ends", 120, 0.3)
    hosts.controllers = [hosts.start_controller()]
    assert hosts.wait_for(job, "succeeded", timeout_s=60)["attempt"] == 1


def test_second_controller_takes_over_after_the_first_dies(hosts: Cluster, gang: str) -> None:
    first, second = hosts.controllers[0], hosts.start_controller()
    hosts.controllers.append(second)
    time.sleep(3)  # waits for the lock
    first.send_signal(signal.SIGKILL)
    first.wait()
    hosts.controllers = [second]
    began = time.monotonic()
    hosts.cancel(gang)
    assert time.monotonic() - began < 40
    job = hosts.wait_for(hosts.submit(training("after", SQUARE)), "succeeded", timeout_s=180)
    assert (job["attempt"], statuses(hosts, job["id"]).count("starting")) == (1, 1)


def test_redis_outage_and_restore_from_older_dump_loses_no_job(hosts: Cluster, gang: str) -> None:
    redis = hosts.board.redis
    redis.client().save()
    hosts.cancel(gang)
    later = build_gang_spec(hosts, "after the dump")  # missing in the dump
    redis.stop(signal.SIGKILL)
    wait_while_training(hosts, later)
    redis.start()
    hosts.wait_for(later, "running", timeout_s=60)
    hosts.wait_for_steps(later, timeout_s=60)
    time.sleep(35)  # the time of silence until the board reports it
    job: dict[str, Any] = hosts.job(later)
    assert (job["status"], job["attempt"]) == ("running", 1)
    assert "lost" not in statuses(hosts, later)
    assert hosts.processes(gang) == [], "orders in the older dump start no job again"
    hosts.cancel(later)


def test_database_outage_of_a_minute_loses_nothing(hosts: Cluster, gang: str) -> None:
    hosts.database.stop()
    answer = hosts.board.call("GET", "/api/v1/jobs", headers=hosts.board.build_token_header("staff"))
    before = hosts.get_step(gang)
    wait_while_training(hosts, gang, min(60.0, AWAY_S))
    assert hosts.get_step(gang) > before
    hosts.database.start()
    assert answer.status == 503
    wait_until(
        lambda: (
            hosts.board.call("GET", f"/api/v1/jobs/{gang}", headers=hosts.board.build_token_header("staff")).status
            == 200
        ),
        "the board answers again",
        30,
    )
    assert statuses(hosts, gang) == ["queued", "starting", "running"]
    hosts.cancel(gang)


def test_network_cut_of_thirty_seconds_is_survived(hosts: Cluster, gang: str) -> None:
    bert = hosts.machines["bert"]
    bert.cable.cut()
    wait_while_training(hosts, gang, 30.0)
    bert.cable.restore()
    hosts.wait_for_steps(gang)
    hosts.wait_for(gang, "running", timeout_s=60)
    assert set(statuses(hosts, gang)) <= {"queued", "starting", "running", "unreachable"}
    assert hosts.job(gang)["attempt"] == 1


def test_preempted_gang_saves_on_all_hosts_after_the_same_step(hosts: Cluster) -> None:
    spec = endless("gives way", SQUARE, checkpoint_every=90_000)
    job = hosts.submit({**spec, "run": {"preemptible": True}})
    hosts.wait_for(job, "running")
    hosts.wait_for_steps(job)
    urgent = hosts.submit(training("urgent", PAIR))
    hosts.call("POST", "queue/actions", {"action": "priority", "jobs": [urgent], "priority": 9})
    hosts.wait_for(urgent, "succeeded", timeout_s=180)
    hosts.wait_for(job, "running", timeout_s=180)
    changes = [change for change in hosts.job(job)["history"] if change["status"] == "cancelled"]
    assert len(changes) == 1
    assert "to make room for a job with higher priority; newest checkpoint" in changes[0]["reason"]
    stopped = int(changes[0]["reason"].rpartition("step-")[2])
    wait_until(lambda: hosts.get_step(job, 2) > stopped, "the job resumes from there", 90, 0.3)
    hosts.cancel(job)
