"""The telemetry buffer: limited bytes, and a count of dropped items."""

from __future__ import annotations

import msgpack

from contracts.telemetry.batches import GapItem, Item
from contracts.telemetry.items import Cell, CheckpointItem, LogItem, PhaseItem, TrafficItem
from workers.host.supervisor.telemetry_buffer import (
    ENVELOPE_BYTES,
    MAX_ITEM_BYTES,
    MAX_ITEMS,
    MAX_ITEMS_BYTES,
    MAX_LATE_LOG_BYTES,
    MAX_LOG_BYTES,
    MAX_SEGMENT_BYTES,
    TelemetryBuffer,
)

PLENTY = 2**40


def traffic(payload_bytes: int, axis: str = "dp") -> TrafficItem:
    cell = Cell(
        phase="step",
        op="all_reduce",
        axis=axis,
        group_size=2,
        count=payload_bytes // 10,
        completed=payload_bytes // 10,
        payload_bytes=payload_bytes,
        algorithmic_bytes=payload_bytes,
        busy_s=0.0,
    )
    return TrafficItem(kind="traffic", rank=0, time=0.0, cells=[cell], dropped=0)


def phase() -> PhaseItem:
    return PhaseItem(kind="phase", rank=0, time=0.0, phase="step")


def log(number: int, chars: int, rank: int = 0) -> LogItem:
    return LogItem(kind="log", rank=rank, time=0.0, first=number, lines=["x" * chars])


def problem(chars: int) -> CheckpointItem:
    return CheckpointItem(
        kind="checkpoint",
        rank=0,
        time=0.0,
        step=1,
        name=None,
        num_bytes=0,
        stall_s=0.0,
        save_s=0.0,
        problem="x" * chars,
    )


def taken(board: TelemetryBuffer, room: int = PLENTY, log_room: int = PLENTY) -> list[Item]:
    load = board.take(room, log_room)
    return [] if load is None else load.items


def test_keeps_only_the_newest_traffic_counters() -> None:
    board = TelemetryBuffer()
    board.add(traffic(10))
    board.add(traffic(30))
    assert [i["cells"][0]["payload_bytes"] for i in taken(board) if i["kind"] == "traffic"] == [30]


def test_counts_dropped_items_as_a_gap() -> None:
    board = TelemetryBuffer()
    for _ in range(MAX_ITEMS + 7):
        board.add(phase())
    load = board.take(PLENTY, PLENTY)
    assert load is not None
    first, *rest = load.items
    assert first == GapItem(kind="gap", time=first["time"], items=7)
    assert len(rest) == MAX_ITEMS


def test_limits_the_bytes_of_large_items() -> None:
    board = TelemetryBuffer()
    size = len(msgpack.packb(problem(200_000)))
    count = MAX_ITEMS_BYTES // size + 5
    for _ in range(count):
        board.add(problem(200_000))
    first, *rest = taken(board)
    assert len(rest) == MAX_ITEMS_BYTES // size
    assert first["kind"] == "gap"
    assert first["items"] + len(rest) == count


def test_item_larger_than_a_batch_becomes_a_gap() -> None:
    board = TelemetryBuffer()
    board.add(problem(MAX_ITEM_BYTES))
    assert [item["kind"] for item in taken(board)] == ["gap"]


def test_counts_dropped_lines_at_their_place() -> None:
    board = TelemetryBuffer()
    chars = MAX_SEGMENT_BYTES // 2
    many = MAX_LOG_BYTES // chars + 50
    for number in range(many):
        board.add(log(number, chars))
    board.add(log(0, 10, rank=1))
    logs = [item for item in taken(board) if item["kind"] == "log"]
    loud = [item for item in logs if item["rank"] == 0]
    assert loud[0]["skipped"] == loud[0]["first"] == many - len(loud) > 0
    assert [item["first"] for item in loud] == list(range(loud[0]["first"], many))
    assert sum(len(msgpack.packb(item)) for item in loud) <= MAX_LOG_BYTES
    assert [item["lines"] for item in logs if item["rank"] == 1] == [["x" * 10]], "a loud rank silences no other"


def test_thins_fast_lines_to_the_newest_and_counts_the_rest() -> None:
    board, lines, result, missing = TelemetryBuffer(), 0, 0, 0
    for _ in range(40):
        batch = LogItem(kind="log", rank=0, time=0.0, first=lines, lines=[f"{lines + i:099d}" for i in range(2000)])
        lines += 2000
        board.add(batch)
        for item in taken(board, log_room=MAX_SEGMENT_BYTES):
            assert item["kind"] == "log"
            missing += item.get("skipped", 0)
            assert item["first"] == int(item["lines"][0]) == result + missing
            result += len(item["lines"])
        board.thin_logs()
    waiting = [item for item in taken(board) if item["kind"] == "log"]
    assert sum(len(msgpack.packb(item)) for item in waiting) <= MAX_LATE_LOG_BYTES
    missing += sum(item.get("skipped", 0) for item in waiting)
    assert result + missing + sum(len(item["lines"]) for item in waiting) == lines
    assert missing > 0


def test_counts_lines_dropped_at_the_end() -> None:
    board = TelemetryBuffer()
    for rank in range(50):
        board.add(log(0, MAX_SEGMENT_BYTES - 100, rank))
    board.thin_logs()
    board.flush_skipped(late=False)
    assert not board.is_empty()
    result = [item for item in taken(board) if item["kind"] == "log"]
    assert {item["rank"] for item in result} == set(range(50))
    assert all(len(item["lines"]) + item.get("skipped", 0) == 1 for item in result)
    assert {item["first"] for item in result if not item["lines"]} == {1}
    assert board.is_empty()
    board.add(log(1, 1))
    board.flush_skipped(late=True)
    (last,) = (item for item in taken(board) if item["kind"] == "log")
    assert (last["first"], last["lines"], last["skipped"]) == (2, [], 1)


def test_batches_fit_their_limit_and_contain_everything() -> None:
    board, room = TelemetryBuffer(), 20_000
    for number in range(200):
        board.add(traffic(number, axis=f"group {number}"))
        board.add(problem(100))
        board.add(log(number, 300))
    loads = []
    while (load := board.take(room, room)) is not None:
        assert len(msgpack.packb(load.items)) <= load.size + 16 <= room + 16
        loads.append(load)
    items = [item for load in loads for item in load.items]
    assert len(loads) > 5
    assert sum(len(item["cells"]) for item in items if item["kind"] == "traffic") == 200
    assert sum(item["kind"] == "checkpoint" for item in items) == 200
    assert sum(len(item["lines"]) for item in items if item["kind"] == "log") == 200


def test_takes_nothing_without_space() -> None:
    board = TelemetryBuffer()
    board.add(phase())
    assert board.take(ENVELOPE_BYTES - 1, PLENTY) is None
    assert [item["kind"] for item in taken(board)] == ["phase"]
