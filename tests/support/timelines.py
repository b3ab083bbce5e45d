"""Steps event by event as ranks tell them, small enough to reckon by hand, or as large as asked for."""

from __future__ import annotations

from typing import Any

from contracts.telemetry.timeline import TimelineItem

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


def pipelined(
    pp: int, dp: int, tp: int, *, micro_batches: int = 4, layers: int = 4, step: int = 8
) -> list[TimelineItem]:
    """A step of GPipe as every rank would tell it, rank 1 a third slower: micro-batches down the pipe and up again, a
    reduce over tp in every layer, and one over dp at the end. Made up."""
    forward, backward, shift = 2_000, 4_000, 300
    items = []
    for rank in range(pp * dp * tp):
        stage, replica, shard = rank // (dp * tp), rank // tp % dp, rank % tp
        slow = 4 / 3 if rank == 1 else 1.0
        groups = [
            {"axis": "dp", "ranks": [stage * dp * tp + r * tp + shard for r in range(dp)], "nth": 0},
            {"axis": "tp", "ranks": [stage * dp * tp + replica * tp + s for s in range(tp)], "nth": 0},
            {"axis": "pp", "ranks": [s * dp * tp + replica * tp + shard for s in range(pp)], "nth": 0},
        ]
        spans, calls, sequence = [], [], {0: 0, 1: 0, 2: 0}

        def call(group: int, op: str, issued: float, ended: float, size: int, peer: int = -1) -> None:
            sequence[group] += 1  # noqa: B023  # of this rank, as is what it is called for
            at, end = int(issued), int(ended)
            calls.append((group, op, sequence[group], at, end - at, end, size, peer))  # noqa: B023

        def work(kind: str, micro: int, began: float, length: int) -> None:
            spans.append((kind, stage, micro, int(began), int(began + length)))  # noqa: B023
            for layer in range(layers if tp > 1 else 0):
                whole = began + (layer + 1) * length / layers - shift
                call(1, "all_reduce", whole - (0 if slow > 1 else shift), whole + shift / 2, 2**16)  # noqa: B023

        for micro in range(micro_batches):
            began = (stage + micro) * (forward + 2 * shift)
            if stage > 0:
                call(2, "recv", began - 2 * shift, began, 2**18, rank - dp * tp)
            work("forward", micro, began, forward)
            if stage < pp - 1:
                call(2, "send", began + forward, began + forward + 2 * shift, 2**18, rank + dp * tp)
        turn = (pp + micro_batches) * (forward + 2 * shift)
        for micro in range(micro_batches):
            began = turn + (pp - 1 - stage + micro) * (backward + 2 * shift)
            if stage < pp - 1:
                call(2, "recv", began - 2 * shift, began, 2**18, rank + dp * tp)
            work("backward", micro, began, backward)
            if stage > 0:
                call(2, "send", began + backward, began + backward + 2 * shift, 2**18, rank - dp * tp)
        done = turn + (pp + micro_batches) * (backward + 2 * shift)
        mine = turn + (pp - 1 - stage + micro_batches) * (backward + 2 * shift) * (slow if stage == 0 else 1)
        call(0, "all_reduce", mine, done + 4_000 * slow, 2**24)
        spans.append(("optimizer", -1, -1, done + 4_000, done + 5_000))
        items.append(
            item(rank, step=step, began=1000.0, groups=groups, calls=calls, spans=spans, step_s=(done + 5_000) / 1e6)
        )
    return items
