"""Build telemetry batches, step timelines, and a synthetic run. Read the messages of a WebSocket frame."""

from __future__ import annotations

import time
import zlib
from typing import TYPE_CHECKING, Any

import msgpack

from contracts.names import telemetry_stream
from contracts.telemetry.items import TimelineItem

if TYPE_CHECKING:
    from tests.support.web import Site

DP, TP, PP = 0, 1, 2  # indexes in the groups of an item
SYNTHETIC_LAYOUTS = {4: {"dp": 2, "tp": 2}, 64: {"dp": 8, "tp": 2, "pp": 4}}
SYNTHETIC_TRAIN = {"steps": 100, "global_batch": 64, "micro_batches": 4}
RANKS_PER_BATCH = 16


def unpack_messages(frame: bytes | str) -> list[dict[str, Any]]:
    """Return the messages of a frame, which has one message or a list, and may be deflated."""
    content = msgpack.unpackb(frame)
    if "deflated" in content:
        content = msgpack.unpackb(zlib.decompress(content["deflated"]))
    return content if isinstance(content, list) else [content]


def build_cell(count: int, payload: int, **fields: Any) -> dict[str, Any]:
    cell = {"phase": "step", "op": "all_reduce", "axis": "dp", "group_size": 2, "busy_s": 0.01 * count}
    counters = {"count": count, "completed": count, "payload_bytes": payload, "algorithmic_bytes": payload}
    return {**cell, **counters, **fields}


def build_traffic(rank: int, time: float, *cells: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "traffic", "rank": rank, "time": time, "cells": list(cells), "dropped": 0}


def build_batch(time: float, *items: dict[str, Any]) -> dict[str, Any]:
    return {"v": 1, "job": "j", "attempt": 1, "time": time, "items": list(items)}


def build_timeline_batch(job: str, *items: TimelineItem, attempt: int = 1, offset_s: float = 0.0) -> dict[str, Any]:
    clock = {"offset_s": offset_s, "within_s": 0.001}
    return {"v": 1, "job": job, "attempt": attempt, "time": 1001.0, "items": list(items), "host": "a", "clock": clock}


def build_timeline(
    rank: int,
    *,
    step: int = 8,
    began: float = 1000.0,
    groups: list[dict[str, Any]] | None = None,
    calls: list[tuple[Any, ...]] | None = None,
    spans: list[tuple[Any, ...]] | None = None,
    step_s: float = 0.1,
) -> TimelineItem:
    """Build the timeline of a step of one rank. Times are in microseconds since `began`.

    Args:
        calls: Tuples (group, op, sequence, issued, blocked, ended, bytes, peer).
        spans: Tuples (work, chunk, micro-batch, from, to).
    """
    call_names = ("group", "op", "sequence", "issued_us", "blocked_us", "ended_us", "payload_bytes", "peer")
    span_names = ("work", "chunk", "micro_batch", "from_us", "to_us")
    item: Any = {
        "kind": "timeline",
        "rank": rank,
        "time": began + step_s,
        "step": step,
        "began": began,
        "step_s": step_s,
        "groups": groups or [{"axis": "dp", "ranks": [0, 1], "nth": 0}],
        "calls": _transpose(call_names, calls),
        "spans": _transpose(span_names, spans),
        "left_out": 0,
    }
    timeline: TimelineItem = item
    return timeline


def _transpose(names: tuple[str, ...], rows: list[tuple[Any, ...]] | None) -> dict[str, list[Any]]:
    columns = zip(*rows, strict=True) if rows else [()] * len(names)
    return dict(zip(names, map(list, columns), strict=True))


def build_late_rank_step(began: float = 1000.0, step: int = 8) -> list[TimelineItem]:
    """Build a step with one all-reduce over dp: rank 1 issues it 30 ms after rank 0, and it takes 10 ms."""
    work = [("forward", 0, 0, 0, 20_000), ("backward", 0, 0, 20_000, 50_000)]
    slow = [("forward", 0, 0, 0, 40_000), ("backward", 0, 0, 40_000, 80_000)]
    calls = [(DP, "all_reduce", 1, 50_000, 40_000, 90_000, 4000, -1)]
    late_calls = [(DP, "all_reduce", 1, 80_000, 10_000, 90_000, 4000, -1)]
    return [
        build_timeline(0, step=step, began=began, spans=work, calls=calls),
        build_timeline(1, step=step, began=began, spans=slow, calls=late_calls),
    ]


def build_pipeline_step(
    pp: int, dp: int, tp: int, *, micro_batches: int = 4, layers: int = 4, step: int = 8
) -> list[TimelineItem]:
    """Build a synthetic GPipe step of all ranks, in which rank 1 is a third slower.

    Each layer has an all-reduce over tp. The step ends with an all-reduce over dp.
    """
    forward, backward, shift = 2_000, 4_000, 300
    items = []
    for rank in range(pp * dp * tp):
        stage, replica, shard = rank // (dp * tp), rank // tp % dp, rank % tp
        slowdown = 4 / 3 if rank == 1 else 1.0
        groups = [
            {"axis": "dp", "ranks": [stage * dp * tp + r * tp + shard for r in range(dp)], "nth": 0},
            {"axis": "tp", "ranks": [stage * dp * tp + replica * tp + s for s in range(tp)], "nth": 0},
            {"axis": "pp", "ranks": [s * dp * tp + replica * tp + shard for s in range(pp)], "nth": 0},
        ]
        spans, calls, sequence = [], [], {DP: 0, TP: 0, PP: 0}

        def add_call(group: int, op: str, issued: float, ended: float, size: int, peer: int = -1) -> None:
            sequence[group] += 1  # noqa: B023  # called in the same iteration
            start, end = int(issued), int(ended)
            calls.append((group, op, sequence[group], start, end - start, end, size, peer))  # noqa: B023

        def add_work(kind: str, micro: int, began: float, length: int) -> None:
            spans.append((kind, stage, micro, int(began), int(began + length)))  # noqa: B023
            for layer in range(layers if tp > 1 else 0):
                issued = began + (layer + 1) * length / layers - shift
                delay = 0 if slowdown > 1 else shift  # noqa: B023
                add_call(TP, "all_reduce", issued - delay, issued + shift / 2, 2**16)

        for micro in range(micro_batches):
            began = (stage + micro) * (forward + 2 * shift)
            if stage > 0:
                add_call(PP, "recv", began - 2 * shift, began, 2**18, rank - dp * tp)
            add_work("forward", micro, began, forward)
            if stage < pp - 1:
                add_call(PP, "send", began + forward, began + forward + 2 * shift, 2**18, rank + dp * tp)
        backward_start = (pp + micro_batches) * (forward + 2 * shift)
        for micro in range(micro_batches):
            began = backward_start + (pp - 1 - stage + micro) * (backward + 2 * shift)
            if stage < pp - 1:
                add_call(PP, "recv", began - 2 * shift, began, 2**18, rank + dp * tp)
            add_work("backward", micro, began, backward)
            if stage > 0:
                add_call(PP, "send", began + backward, began + backward + 2 * shift, 2**18, rank - dp * tp)
        last_end = backward_start + (pp + micro_batches) * (backward + 2 * shift)
        end = (pp - 1 - stage + micro_batches) * (backward + 2 * shift) * (slowdown if stage == 0 else 1)
        add_call(DP, "all_reduce", backward_start + end, last_end + 4_000 * slowdown, 2**24)
        spans.append(("optimizer", -1, -1, last_end + 4_000, last_end + 5_000))
        step_s = (last_end + 5_000) / 1e6
        items.append(build_timeline(rank, step=step, groups=groups, calls=calls, spans=spans, step_s=step_s))
    return items


def create_synthetic_run(site: Site, ranks: int, *, steps: tuple[int, ...] = (8, 16), seconds: int = 30) -> str:
    """Submit a job, and write its telemetry: traffic every half second, and timelines of `steps`."""
    layout = SYNTHETIC_LAYOUTS[ranks]
    name = f"{ranks} ranks made up"
    job = site.submit_job({"model": {"preset": "gpt-tiny"}, "layout": layout, "train": SYNTHETIC_TRAIN, "name": name})
    client = site.redis.client()
    _add_traffic(client, job, ranks, seconds)
    for step in steps:
        items = build_pipeline_step(layout.get("pp", 1), layout["dp"], layout["tp"], step=step)
        for first in range(0, len(items), RANKS_PER_BATCH):
            _add_batch(client, job, {"time": time.time(), "items": items[first : first + RANKS_PER_BATCH]})
    client.close()
    return job


def _add_traffic(client: Any, job: str, ranks: int, seconds: int) -> None:
    """Write a step every second, and counters that grow faster on even ranks, with a pause in the middle."""
    start = time.time() - seconds
    for tick in range(2 * seconds):
        if abs(tick - seconds) < 3:
            continue
        now = start + tick / 2
        items: list[dict[str, Any]] = []
        for rank in range(ranks):
            payload = (tick + 1) * (2_000_000 if rank % 2 else 4_000_000)
            cells = [
                build_cell(4, payload, busy_s=0.1),
                build_cell(4, (tick + 1) * 500_000, axis="tp", busy_s=0.1),
            ]
            items.append(build_traffic(rank, now, *cells))
            if tick % 2:
                items.append(_build_step(rank, now, tick // 2 + 1, cells))
        _add_batch(client, job, {"time": now, "items": items})


def _build_step(rank: int, now: float, number: int, cells: list[dict[str, Any]]) -> dict[str, Any]:
    parts = {"data": 0.01, "optimizer": 0.02, "exposed": {"dp": 0.1 + 0.3 * (rank % 4 == 1), "tp": 0.05}, "hidden": {}}
    figures = {"step_s": 1.0, "tokens": 1000, "loss": 4.0, "grad_norm": 1.0, "learning_rate": 1e-3}
    base = {"kind": "step", "rank": rank, "time": now, "step": number, "ran": number, "steps": 100}
    return {**base, **figures, "cells": cells, "parts": parts}


def _add_batch(client: Any, job: str, batch: dict[str, Any]) -> None:
    packed = msgpack.packb({"v": 1, "job": job, "attempt": 1, "host": "a", **batch})
    client.xadd(telemetry_stream(job, 1), {"b": packed, "n": client.xlen(telemetry_stream(job, 1))})
