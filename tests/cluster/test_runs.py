"""Jobs over several hosts, whatever these are called: as right as on one, and no byte off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from planner.facts.layout import axis_ranks
from planner.facts.parse import parse_spec
from tests.cluster.cluster import NAMES, Cluster, cluster
from tests.cluster.jobs import check_true, training


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three hosts: one knows all names, one itself as Debian does, one not even itself."""
    folder = tmp_path_factory.mktemp("cluster")
    with cluster(folder, etc_hosts={"anna": "127.0.0.1 localhost\n127.0.1.1 anna", "bert": ""}) as made:
        yield made


def test_the_hosts_names_are_hostile(hosts: Cluster) -> None:
    anna, bert, _ = (hosts.machines[name] for name in NAMES)
    assert anna.run("getent", "ahostsv4", "anna").split()[0] == "127.0.1.1"
    assert bert.run("sh", "-c", "getent hosts bert || echo unknown").strip() == "unknown"
    assert anna.run("hostname").strip() == "anna"


LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "dp across, tp inside": ({"dp": 2, "tp": 2}, 2),
    "pp across, tp inside": ({"pp": 2, "tp": 2}, 2),
    "cp across, tp inside": ({"cp": 2, "tp": 2}, 2),
    "zero-3 over three hosts": ({"dp": 6, "zero": 3}, 3),
    "hsdp: shards inside, replicas across": ({"dp": 4, "zero": 3, "dp_replicas": 2}, 2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_runs_over_hosts_as_on_one(hosts: Cluster, name: str) -> None:
    layout, num_hosts = LAYOUTS[name]
    spec = training(name, layout, micro_batches=2 if "pp" in layout else 1)
    ranks = parse_spec(spec).layout.world_size
    job = hosts.wait_for(hosts.submit(spec), "succeeded", timeout_s=180)
    check_true(job, ranks)
    members = job["members"]
    assert len(members) == num_hosts
    assert [member["first_rank"] for member in members] == list(range(0, ranks, ranks // num_hosts))
    home = {rank: m["node"] for m in members for rank in range(m["first_rank"], m["first_rank"] + m["num_ranks"])}
    if "tp" in layout:
        for rank in range(ranks):
            assert len({home[peer] for peer in axis_ranks(rank, "tp", parse_spec(spec).layout)}) == 1, "tp is inside"


def test_two_jobs_share_a_host(hosts: Cluster) -> None:
    jobs = [hosts.submit(training(f"three ranks {number}", {"dp": 3})) for number in (1, 2)]
    ended = [hosts.wait_for(job, "succeeded", timeout_s=180) for job in jobs]
    for job in ended:
        check_true(job, 3)
    first, second = ({member["host"] for member in job["members"]} for job in ended)
    assert len(first & second) == 1
