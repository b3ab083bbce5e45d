"""Traffic between hosts and inside hosts, per level of an axis, predicted and measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils import timezone

from jobs.models import Attempt, Host, Member
from jobs.planning.host_traffic import HostTraffic, compute_host_traffic
from jobs.queue import actions
from planner.cost.traffic import get_step_traffic
from planner.facts.parse_spec import parse_spec

STEPS = 3
SPEC: dict[str, Any] = {
    "model": {"preset": "mixtral-tiny"},
    "train": {"global_batch": 8, "seq_len": 32, "micro_batches": 2},
}
HSDP: dict[str, Any] = {"dp": 4, "zero": 3, "dp_replicas": 2}
INSIDE = {"tp": 2, "sequence_parallel": True}


def make_traffic(
    owner: User, make_host: Callable[..., Host], layout: dict[str, Any], *, ended: bool = True, **more: int
) -> HostTraffic:
    """Return the traffic of a run over two hosts, whose ranks counted the bytes of the trainer."""
    spec = parse_spec({**SPEC, "layout": layout})
    half = spec.layout.world_size // 2
    hosts = [make_host(name, slots=half) for name in ("host-a", "host-b")]
    job, _ = actions.submit(owner, spec.model_dump())
    cells = {
        str(rank): [
            {
                "phase": "step",
                "op": row.op,
                "axis": row.axis,
                "group_size": row.group_size,
                "payload_bytes": STEPS * row.payload_bytes,
            }
            for row in get_step_traffic(spec, rank)
        ]
        for rank in range(spec.layout.world_size)
    }
    cells["0"].append({"phase": "eval", "op": "all_reduce", "axis": "dp", "group_size": 2, "payload_bytes": 10**9})
    exit_report = {"summary": {"steps": STEPS, "cells": cells, **more}} if ended else None
    attempt = Attempt.objects.create(job=job, number=1, exit=exit_report)
    for node, host in enumerate(hosts):
        place = {"first_rank": node * half, "num_ranks": half, "ordered": timezone.now()}
        Member.objects.create(attempt=attempt, node=node, host=host, host_name=host.name, **place)
    return compute_host_traffic(job)


@pytest.mark.usefixtures("db")
@pytest.mark.parametrize(
    "layout",
    [
        HSDP,
        {**HSDP, **INSIDE},
        {"dp": 2, **INSIDE, "zero": 1},
        {"pp": 2, "dp": 2, "tp": 2},
        {"dp": 4, "ep": 2, "zero": 2},
    ],
    ids=str,
)
def test_measured_traffic_equals_prediction_per_level(
    owner: User, make_host: Callable[..., Host], layout: dict[str, Any]
) -> None:
    rows = make_traffic(owner, make_host, layout)
    assert (rows["hosts"], rows["steps"]) == (["host-a", "host-b"], STEPS)
    spec, total = parse_spec({**SPEC, "layout": layout}), Counter[str]()
    for rank in range(spec.layout.world_size):
        for sent in get_step_traffic(spec, rank):
            total[sent.axis] += STEPS * sent.payload_bytes
    for row in rows["levels"]:
        assert row["predicted"] == row["measured"], row
        assert row["measured"] is not None
        total[row["axis"]] -= sum(row["measured"].values())  # type: ignore[arg-type]  # a TypedDict of integers
    assert set(total.values()) == {0}, "every byte belongs to a level"


@pytest.mark.usefixtures("db")
def test_hsdp_shards_inside_hosts_and_reduces_between_hosts(owner: User, make_host: Callable[..., Host]) -> None:
    shards, replicas = [row for row in make_traffic(owner, make_host, HSDP)["levels"] if row["axis"] == "dp"]
    assert (shards["level"], shards["groups"], shards["groups_across"]) == ("shards", 2, 0)
    assert (replicas["level"], replicas["groups"], replicas["groups_across"]) == ("replicas", 2, 2)
    assert shards["predicted_step"]["across_bytes"] == replicas["predicted_step"]["inside_bytes"] == 0
    assert shards["predicted_step"]["inside_bytes"] > replicas["predicted_step"]["across_bytes"] > 0


@pytest.mark.usefixtures("db")
def test_running_job_has_predicted_traffic_only(owner: User, make_host: Callable[..., Host]) -> None:
    rows = make_traffic(owner, make_host, HSDP, ended=False)
    assert rows["steps"] == 0
    assert {(row["measured"], row["predicted"]) for row in rows["levels"]} == {(None, None)}
    assert rows["levels"][0]["predicted_step"]["inside_bytes"] > 0


@pytest.mark.usefixtures("db")
def test_incomplete_summary_has_no_measured_traffic(owner: User, make_host: Callable[..., Host]) -> None:
    rows = make_traffic(owner, make_host, HSDP, cells_left_out=1)
    assert (rows["steps"], rows["left_out"]) == (0, 1)
    assert {(row["measured"], row["predicted"]) for row in rows["levels"]} == {(None, None)}
