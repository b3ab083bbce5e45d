"""Sample board with a running job, a waiting job, hosts, and telemetry."""

from __future__ import annotations

import time
from typing import Any

import msgpack
import redis
from django.contrib.auth.models import User
from django.utils import timezone

from contracts.names import telemetry_stream
from jobs.models import Attempt, Host, Job, Lease, Member, Status
from jobs.queue import actions, lifecycle
from tests.planner.wrong_specs import GOOD

USE = {
    "busy_percent": 25.0,
    "memory_bytes": 2**30,
    "gpus": [],
    "disks": [{"use": "runs", "path": "/x", "free_bytes": 5, "total_bytes": 9}],
}


def make_host_row(name: str = "host-a", slots: int = 8, **fields: Any) -> Host:
    defaults = {"device": "cpu", "device_name": "", "memory_bytes": 1, "boot_id": "b", "use": USE}
    return Host.objects.create(name=name, slots=slots, last_seen=timezone.now(), **{**defaults, **fields})


def make_running_job(owner: User, host: Host, name: str = "runs") -> Job:
    """Create a running job whose attempt is on a host and has the verdict slow."""
    job, _ = actions.submit(owner, {**GOOD, "name": name})
    lifecycle.start_jobs({job.id: (1, "placed")})
    lifecycle.change_status(job.id, 1, Status.RUNNING, "running")
    attempt = Attempt.objects.create(job=job, number=1, diagnosis={"state": "slow"})
    Member.objects.create(
        attempt=attempt,
        node=0,
        host=host,
        host_name=host.name,
        first_rank=0,
        num_ranks=4,
        ordered=timezone.now(),
    )
    return job


def fill_board(owner: User) -> Job:
    """Fill the board, and return its running job."""
    host_a = make_host_row()
    for name in ("controller", "recorder"):
        Lease.objects.create(name=name, ticked=timezone.now())
    actions.submit(owner, GOOD)
    return make_running_job(owner, host_a)


def cell(axis: str, payload: int, count: int, phase: str = "step") -> dict[str, Any]:
    cell = {"phase": phase, "op": "all_reduce", "axis": axis, "group_size": 2, "count": count, "completed": count}
    return {**cell, "payload_bytes": payload, "algorithmic_bytes": payload, "busy_s": 0.1}


def send_step(client: redis.Redis, job: str, step: int, ranks: int = 2, step_s: float = 0.5) -> None:
    """Send the end of a step from each rank, with 1,000 bytes over dp and 300 over tp per step."""
    items = [
        {
            "kind": "step",
            "rank": rank,
            "time": time.time(),
            "step": step,
            "ran": step,
            "steps": 100,
            "step_s": step_s * (1 + rank),
            "tokens": 512,
            "loss": 4.0 / step if rank == 0 else None,
            "grad_norm": None,
            "learning_rate": 0.1,
            "cells": [cell("dp", 1000 * step, step), cell("tp", 300 * step, step), cell("dp", 7, 1, "setup")],
        }
        for rank in range(ranks)
    ]
    batch = {"v": 1, "job": job, "attempt": 1, "time": time.time(), "items": items}
    client.xadd(telemetry_stream(job, 1), {"b": msgpack.packb(batch), "n": step})


def send_traffic(client: redis.Redis, job: str, entries: int = 100) -> None:
    """Send traffic entries of a rank during a long step."""
    item = {"kind": "traffic", "rank": 0, "time": time.time(), "cells": [cell("tp", 5, 1)], "dropped": 0}
    batch = msgpack.packb({"v": 1, "job": job, "attempt": 1, "time": time.time(), "items": [item]})
    for _ in range(entries):
        client.xadd(telemetry_stream(job, 1), {"b": batch, "n": 1})
