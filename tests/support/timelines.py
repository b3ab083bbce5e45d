"""Steps event by event as ranks tell them, small enough to reckon by hand, or as large as asked for."""

from __future__ import annotations

from typing import Any

from contracts.telemetry import TimelineItem

DP, TP = 0, 1  # places in an item's groups


def item(
    rank: int,
    *,
    step: int = 8,
    began: float = 1000.0,
    groups: list[dict[str, Any]] | None = None,
    calls: list[tuple[Any, ...]] | None = None,
    spans: list[tuple[Any, ...]] | None = None,
    step_s: float = 0.1,
) -> TimelineItem:
    """`calls`: (group, op, sequence, issued, blocked, ended, bytes, peer); `spans`: (work, chunk, micro-batch, from,
    to); microseconds."""
    columns = list(zip(*(calls or []), strict=True)) or [()] * 8
    works = list(zip(*(spans or []), strict=True)) or [()] * 5
    names = ("group", "op", "sequence", "issued_us", "blocked_us", "ended_us", "payload_bytes", "peer")
    made: Any = {
        "kind": "timeline",
        "rank": rank,
        "time": began + step_s,
        "step": step,
        "began": began,
        "step_s": step_s,
        "groups": groups or [{"axis": "dp", "ranks": [0, 1], "nth": 0}],
        "calls": dict(zip(names, map(list, columns), strict=True)),
        "spans": dict(zip(("work", "chunk", "micro_batch", "from_us", "to_us"), map(list, works), strict=True)),
        "left_out": 0,
    }
    found: TimelineItem = made
    return found


def late(began: float = 1000.0, step: int = 8) -> list[TimelineItem]:
    """Two ranks reduce over dp: rank 1 comes 30 ms after rank 0, and the transfer takes 10 ms."""
    work = [("forward", 0, 0, 0, 20_000), ("backward", 0, 0, 20_000, 50_000)]
    slow = [("forward", 0, 0, 0, 40_000), ("backward", 0, 0, 40_000, 80_000)]
    return [
        item(0, step=step, began=began, spans=work, calls=[(0, "all_reduce", 1, 50_000, 40_000, 90_000, 4000, -1)]),
        item(1, step=step, began=began, spans=slow, calls=[(0, "all_reduce", 1, 80_000, 10_000, 90_000, 4000, -1)]),
    ]


def batch(job: str, *items: TimelineItem, attempt: int = 1, offset_s: float = 0.0) -> dict[str, Any]:
    clock = {"offset_s": offset_s, "within_s": 0.001}
    return {"v": 1, "job": job, "attempt": attempt, "time": 1001.0, "items": list(items), "host": "a", "clock": clock}
