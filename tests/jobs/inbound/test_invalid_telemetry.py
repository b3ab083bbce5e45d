"""Invalid telemetry of one host does not affect other jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import redis
from django.contrib.auth.models import User
from django.utils import timezone

from contracts.names import telemetry_stream
from jobs.models import Attempt, Host, Job, Member, Status
from jobs.operations.metrics.collection import read_rank_metrics
from jobs.pages.jobs import live_figures
from jobs.queue.termination import IdleWatch
from tests.jobs.api.job_events import make_step_item

INVALID = [
    {"other": b"1"},
    {"b": b"\xc1 no msgpack"},
    {"b": msgpack.packb(7)},
    {"b": msgpack.packb({"v": 1})},
    {"b": msgpack.packb({"items": 7})},
    {"b": msgpack.packb({"items": [7, {}, {"kind": []}, {"kind": "step"}, {"kind": "phase", "steps": "x"}]})},
    {
        "b": msgpack.packb(
            {"items": [{**make_step_item(3), "step": "third"}, {**make_step_item(3), "cells": [{"phase": 1}]}]}
        )
    },
]


@pytest.mark.parametrize("entry", INVALID, ids=[str(number) for number in range(len(INVALID))])
def test_ignores_invalid_entries(
    entry: Any,
    owner: User,
    make_jobs: Callable[..., list[Job]],
    make_host: Callable[..., Host],
    live_redis: redis.Redis,
) -> None:
    make_host()
    hostile, honest = make_jobs(2, status=Status.RUNNING, idle_limit_s=3600)
    live_redis.xadd(telemetry_stream(hostile.id, 1), entry)
    for number in (5, 6):
        batch = {"items": [{**make_step_item(number), "time": float(number)}]}
        live_redis.xadd(telemetry_stream(honest.id, 1), {"b": msgpack.packb(batch)})
    keys = [(hostile.id, 1), (honest.id, 1)]
    idle = IdleWatch()
    idle.stop_idle_runs(live_redis)
    assert [idle._progress[key][0] for key in keys] == [-1, 6]
    assert live_figures.read_progress(keys) == {keys[0]: None, keys[1]: live_figures.LatestStep(6, 4.0)}
    assert live_figures.read_traffic_rates(keys) == {keys[0]: None, keys[1]: 0.0}
    assert [metrics and metrics[0].step for metrics in read_rank_metrics({(*key, 0): 1 for key in keys}).values()] == [
        {},
        6,
    ]


def test_traffic_rate_is_the_sum_over_hosts(
    make_jobs: Callable[..., list[Job]], make_host: Callable[..., Host], live_redis: redis.Redis
) -> None:
    """Rates need the streams of all hosts of a run."""
    (job,) = make_jobs(1, status=Status.RUNNING, num_slots=2)
    attempt = Attempt.objects.create(job=job, number=1)
    cell = {"phase": "step", "op": "all_reduce", "axis": "dp", "group_size": 2, "count": 1, "completed": 1}
    for node in (0, 1):
        metrics = {"host_name": f"host-{node}", "first_rank": node, "num_ranks": 1, "ordered": timezone.now()}
        Member.objects.create(attempt=attempt, node=node, host=make_host(f"host-{node}"), **metrics)
        for number in (5, 6):
            counted_cell = {**cell, "payload_bytes": 100 * number, "algorithmic_bytes": 0, "busy_s": 0.0}
            item = {**make_step_item(number, rank=node), "time": float(number), "cells": [counted_cell]}
            live_redis.xadd(telemetry_stream(job.id, 1, node), {"b": msgpack.packb({"items": [item]})})
    assert live_figures.read_traffic_rates([(job.id, 1)]) == {(job.id, 1): 200.0}
    few = [(f"{number}", 1) for number in range(live_figures.MAX_STREAMS - 1)]
    assert (job.id, 1) not in {key[:2] for key in live_figures.list_streams([*few, (job.id, 1)])}, (
        "a rate needs all streams of the run"
    )
