"""The board's parts away for minutes while a gang trains: MINUTES=20 for as long as that; one minute each otherwise."""

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
    """Two hosts, which a gang fills, and a lease that outlasts what is done here."""
    group = {"MESHBOARD_GROUP_TIMEOUT_S": str(int(AWAY_S) + 600)}
    board = {"MESHBOARD_LEASE_S": str(int(AWAY_S) + 600)}
    with cluster(tmp_path_factory.mktemp("cluster"), names=("anna", "bert"), board_settings=board, **group) as made:
        yield made


@pytest.fixture
def gang(hosts: Cluster) -> Iterator[str]:
    """A running job on both hosts; at its end nothing of it is left."""
    job = across(hosts, "endless")
    yield job
    if not hosts.job(job)["finished"]:
        hosts.cancel(job)
    wait_until(lambda: not hosts.processes(job), "nothing of it is left")


def across(hosts: Cluster, name: str) -> str:
    """One that trains on both hosts."""
    job = hosts.submit(endless(name, SQUARE))
    hosts.wait_for(job, "running")
    hosts.wait_for_steps(job)
    return job


def statuses(hosts: Cluster, job: str) -> list[str]:
    return [change["status"] for change in hosts.job(job)["history"]]


def away(hosts: Cluster, job: str, seconds: float = AWAY_S) -> None:
    """So long; what trains does so all the while."""
    before = len(hosts.processes(job))
    time.sleep(seconds)  # the fault itself
    assert len(hosts.processes(job)) == before


def kill_controllers(hosts: Cluster) -> None:
    for controller in hosts.controllers:
        controller.send_signal(signal.SIGKILL)
        controller.wait()
    hosts.controllers = []


def test_the_controller_away_for_minutes_loses_nothing(hosts: Cluster, gang: str) -> None:
    kill_controllers(hosts)
    waiting = hosts.submit(training("meanwhile", SQUARE))
    before = hosts.step(gang)
    away(hosts, gang)
    assert hosts.step(gang) > before
    hosts.controllers = [hosts.start_controller()]
    hosts.cancel(gang)
    assert hosts.wait_for(waiting, "succeeded", timeout_s=180)["attempt"] == 1
    assert statuses(hosts, gang) == ["queued", "starting", "running", "cancelling", "cancelled"]


def test_what_ended_while_the_controller_was_away_has_ended_well(hosts: Cluster) -> None:
    job = hosts.submit(training("ends", SQUARE, steps=40))
    hosts.wait_for(job, "running")
    kill_controllers(hosts)
    wait_until(lambda: not hosts.processes(job), "it ends", 120, 0.3)
    hosts.controllers = [hosts.start_controller()]
    assert hosts.wait_for(job, "succeeded", timeout_s=60)["attempt"] == 1


def test_of_two_controllers_the_second_goes_on_when_the_first_dies(hosts: Cluster, gang: str) -> None:
    first, second = hosts.controllers[0], hosts.start_controller()
    hosts.controllers.append(second)
    time.sleep(3)  # it waits its turn
    first.send_signal(signal.SIGKILL)
    first.wait()
    hosts.controllers = [second]
    began = time.monotonic()
    hosts.cancel(gang)
    assert time.monotonic() - began < 40
    job = hosts.wait_for(hosts.submit(training("after", SQUARE)), "succeeded", timeout_s=180)
    assert (job["attempt"], statuses(hosts, job["id"]).count("starting")) == (1, 1)


def test_redis_away_for_minutes_and_back_from_an_older_dump_loses_no_job(hosts: Cluster, gang: str) -> None:
    redis = hosts.board.redis
    redis.client().save()
    hosts.cancel(gang)
    later = across(hosts, "after the dump")  # of which the dump knows nothing
    redis.stop(signal.SIGKILL)
    away(hosts, later)
    redis.start()
    hosts.wait_for(later, "running", timeout_s=60)
    hosts.wait_for_steps(later, timeout_s=60)
    time.sleep(35)  # as long as silence would take to be told
    job: dict[str, Any] = hosts.job(later)
    assert (job["status"], job["attempt"]) == ("running", 1)
    assert "lost" not in statuses(hosts, later)
    assert hosts.processes(gang) == [], "what the older dump ordered does not start again"
    hosts.cancel(later)


def test_the_database_away_for_a_minute_loses_nothing(hosts: Cluster, gang: str) -> None:
    hosts.database.stop()
    answer = hosts.board.call("GET", "/api/v1/jobs", headers=hosts.board.build_token_header("staff"))
    before = hosts.step(gang)
    away(hosts, gang, min(60.0, AWAY_S))
    assert hosts.step(gang) > before
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


def test_a_cut_of_exactly_thirty_seconds_is_survived(hosts: Cluster, gang: str) -> None:
    bert = hosts.machines["bert"]
    bert.cable.cut()
    away(hosts, gang, 30.0)
    bert.cable.mend()
    hosts.wait_for_steps(gang)
    hosts.wait_for(gang, "running", timeout_s=60)
    assert set(statuses(hosts, gang)) <= {"queued", "starting", "running", "unreachable"}
    assert hosts.job(gang)["attempt"] == 1


def test_a_gang_that_gives_way_saves_on_all_hosts_after_the_same_step(hosts: Cluster) -> None:
    spec = endless("gives way", SQUARE, checkpoint_every=90_000)
    job = hosts.submit({**spec, "run": {"preemptible": True}})
    hosts.wait_for(job, "running")
    hosts.wait_for_steps(job)
    urgent = hosts.submit(training("urgent", PAIR))
    hosts.call("POST", "queue/actions", {"action": "priority", "jobs": [urgent], "priority": 9})
    hosts.wait_for(urgent, "succeeded", timeout_s=180)
    hosts.wait_for(job, "running", timeout_s=180)
    told = [change for change in hosts.job(job)["history"] if change["status"] == "cancelled"]
    assert len(told) == 1
    assert "to make room for a job with higher priority; newest checkpoint" in told[0]["reason"]
    stopped = int(told[0]["reason"].rpartition("step-")[2])
    wait_until(lambda: hosts.step(job, 2) > stopped, "it goes on from there", 90, 0.3)
    hosts.cancel(job)
