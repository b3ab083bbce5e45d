"""A run whose telemetry a test made up, on a real site: what a browser is shown of it."""

from __future__ import annotations

import time
from typing import Any

import msgpack

from contracts.names import telemetry_stream
from tests.support.timelines import pipelined
from tests.support.web import Site

LAYOUTS = {4: {"dp": 2, "tp": 2}, 64: {"dp": 8, "tp": 2, "pp": 4}}
TRAIN = {"steps": 100, "global_batch": 64, "micro_batches": 4}


def run_of(site: Site, ranks: int, *, steps: tuple[int, ...] = (8, 16), seconds: int = 30) -> str:
    """A queued job of so many ranks and a stream that tells traffic by the half second, and steps event by event."""
    layout = LAYOUTS[ranks]
    spec = {"model": {"preset": "gpt-tiny"}, "layout": layout, "train": TRAIN, "name": f"{ranks} ranks made up"}
    job = site.submit(spec)
    tell_traffic(site, job, ranks, seconds)
    client = site.redis.client()
    for step in steps:
        items = pipelined(layout.get("pp", 1), layout["dp"], layout["tp"], step=step)
        for first in range(0, len(items), 16):
            _add(client, job, {"time": time.time(), "items": items[first : first + 16]})
    client.close()
    return job


def tell_traffic(site: Site, job: str, ranks: int, seconds: int) -> None:
    """Counters that grow, faster on even ranks, with a pause in the middle; and a step each second."""
    now = time.time() - seconds
    client = site.redis.client()
    for tick in range(2 * seconds):
        if abs(tick - seconds) < 3:
            continue
        at = now + tick / 2
        items: list[dict[str, Any]] = []
        for rank in range(ranks):
            large = (tick + 1) * (2_000_000 if rank % 2 else 4_000_000)
            cells = [cell("dp", 2, large), cell("tp", 2, (tick + 1) * 500_000)]
            items.append({"kind": "traffic", "rank": rank, "time": at, "cells": cells, "dropped": 0})
            if tick % 2:
                items.append(step(rank, at, tick // 2 + 1, cells))
        _add(client, job, {"time": at, "items": items})
    client.close()


def cell(axis: str, size: int, payload: int) -> dict[str, Any]:
    base = {"phase": "step", "op": "all_reduce", "axis": axis, "group_size": size, "busy_s": 0.1}
    return {**base, "count": 4, "completed": 4, "payload_bytes": payload, "algorithmic_bytes": payload}


def step(rank: int, at: float, number: int, cells: list[dict[str, Any]]) -> dict[str, Any]:
    parts = {"data": 0.01, "optimizer": 0.02, "exposed": {"dp": 0.1 + 0.3 * (rank % 4 == 1), "tp": 0.05}, "hidden": {}}
    figures = {"step_s": 1.0, "tokens": 1000, "loss": 4.0, "grad_norm": 1.0, "learning_rate": 1e-3}
    base = {"kind": "step", "rank": rank, "time": at, "step": number, "ran": number, "steps": 100}
    return {**base, **figures, "cells": cells, "parts": parts}


def _add(client: Any, job: str, batch: dict[str, Any]) -> None:
    packed = msgpack.packb({"v": 1, "job": job, "attempt": 1, "host": "a", **batch})
    client.xadd(telemetry_stream(job, 1), {"b": packed, "n": client.xlen(telemetry_stream(job, 1))})
