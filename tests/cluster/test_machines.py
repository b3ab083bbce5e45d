"""Hosts with a wrong clock or a full disk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from contracts.names import telemetry_stream
from tests.cluster.cluster import Cluster, cluster
from tests.cluster.jobs import check_verified, training
from tests.cluster.machine import Machine

SQUARE = {"dp": 2, "tp": 2}
FAST_S = 300
# Rank 2 on the second host fails first. Rank 0 on the first host fails two seconds later with another error.
SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(1))
time.sleep({2: 0, 0: 2}.get(rank, 30))
raise ValueError(f"broke on rank {rank}")
"""


def prepare(machine: Machine) -> None:
    if machine.name == "anna":
        machine.skew_clock(-FAST_S)
    if machine.name == "bert":
        machine.limit_disk(8)
    scripts = machine.folder / "scripts"
    scripts.mkdir(parents=True)
    (scripts / "breaks.py").write_text(SCRIPT)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start hosts of which anna has a slow clock and bert a small disk."""
    with cluster(tmp_path_factory.mktemp("cluster"), names=("anna", "bert"), prepare=prepare) as made:
        yield made


def batches(hosts: Cluster, job: str, node: int) -> list[dict[str, Any]]:
    entries: Any = hosts.board.redis.client().xrange(telemetry_stream(job, 1, node))
    return [msgpack.unpackb(fields[b"b"]) for _, fields in entries]


def test_slow_clock_is_measured_and_times_use_the_board_clock(hosts: Cluster) -> None:
    anna = hosts.machines["anna"]
    assert abs(float(anna.run("date", "+%s")) - float(hosts.machines["bert"].run("date", "+%s")) + FAST_S) < 5
    job = hosts.wait_for(hosts.submit(training("clocks", SQUARE)), "succeeded", timeout_s=180)
    check_verified(job, 4)
    nodes = [member["node"] for member in job["members"] if member["host"] == "anna"]
    seconds: dict[bool, dict[int, float]] = {True: {}, False: {}}
    for node in (0, 1):
        sent = batches(hosts, job["id"], node)
        clock = sent[-1]["clock"]
        off = FAST_S if node in nodes else 0
        assert abs(clock["offset_s"] - off) < 0.1
        assert clock["within_s"] < 0.1
        for item in (item for batch in sent for item in batch["items"] if item["kind"] == "step"):
            seconds[node in nodes][item["step"]] = item["time"]
    for step, time_s in seconds[True].items():
        assert abs(time_s - seconds[False][step]) < 2, "a step ends on all hosts at once"


def test_first_failure_by_the_board_clock_is_the_cause(hosts: Cluster) -> None:
    spec = {"kind": "script", "name": "breaks", "layout": {"dp": 4}, "script": {"path": "breaks.py"}}
    job = hosts.wait_for(hosts.submit(spec), "failed", timeout_s=120)
    anna = next(member for member in job["members"] if member["host"] == "anna")
    expected = 2 if anna["first_rank"] == 0 else 0
    if expected == 2:  # by its own clock, anna's rank failed five minutes earlier
        assert (job["exit"]["rank"], "broke on rank 2" in job["exit"]["reason"]) == (2, True)
    assert any("Traceback" in line for line in job["exit"]["log_tail"])


def test_full_disk_on_one_host_ends_no_job(hosts: Cluster) -> None:
    bert = hosts.machines["bert"]
    job = hosts.submit(training("full disk", SQUARE, steps=60))
    hosts.wait_for(job, "running")
    with contextlib.suppress(Exception):  # dd fails once the disk is full, as intended
        bert.run("sh", "-c", f"dd if=/dev/zero of={bert.run_dir}/full bs=64k 2>/dev/null")
    try:
        check_verified(hosts.wait_for(job, "succeeded", timeout_s=180), 4)
    finally:
        bert.run("rm", f"{bert.run_dir}/full")
