"""Bytes between hosts are told apart from those inside one, by the levels of an axis; predicted and measured."""

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


def told(
    owner: User, make_host: Callable[..., Host], layout: dict[str, Any], *, ended: bool = True, **also: int
) -> HostTraffic:
    """Of a run over two hosts, whose ranks counted what the trainer sends."""
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
    exit = {"summary": {"steps": STEPS, "cells": cells, **also}} if ended else None
    attempt = Attempt.objects.create(job=job, number=1, exit=exit)
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
def test_what_was_measured_is_what_was_predicted_level_by_level(
    owner: User, make_host: Callable[..., Host], layout: dict[str, Any]
) -> None:
    rows = told(owner, make_host, layout)
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
def test_hsdp_shards_inside_hosts_and_sums_between_them(owner: User, make_host: Callable[..., Host]) -> None:
    shards, replicas = [row for row in told(owner, make_host, HSDP)["levels"] if row["axis"] == "dp"]
    assert (shards["level"], shards["groups"], shards["groups_across"]) == ("shards", 2, 0)
    assert (replicas["level"], replicas["groups"], replicas["groups_across"]) == ("replicas", 2, 2)
    assert shards["predicted_step"]["across_bytes"] == replicas["predicted_step"]["inside_bytes"] == 0
    assert shards["predicted_step"]["inside_bytes"] > replicas["predicted_step"]["across_bytes"] > 0


@pytest.mark.usefixtures("db")
def test_until_it_has_ended_it_is_predicted_alone(owner: User, make_host: Callable[..., Host]) -> None:
    rows = told(owner, make_host, HSDP, ended=False)
    assert rows["steps"] == 0
    assert {(row["measured"], row["predicted"]) for row in rows["levels"]} == {(None, None)}
    assert rows["levels"][0]["predicted_step"]["inside_bytes"] > 0


@pytest.mark.usefixtures("db")
def test_of_a_summary_without_all_ranks_nothing_is_told_as_measured(
    owner: User, make_host: Callable[..., Host]
) -> None:
    rows = told(owner, make_host, HSDP, cells_left_out=1)
    assert (rows["steps"], rows["left_out"]) == (0, 1)
    assert {(row["measured"], row["predicted"]) for row in rows["levels"]} == {(None, None)}
