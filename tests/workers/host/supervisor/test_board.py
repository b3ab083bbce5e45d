"""What waits for Redis is bounded in bytes, and what is dropped is counted."""

from __future__ import annotations

import msgpack

from contracts.telemetry.batches import GapItem, Item
from contracts.telemetry.steps import Cell, CheckpointItem, LogItem, PhaseItem, TrafficItem
from workers.host.supervisor.board import (
    ENVELOPE_BYTES,
    LATE_LOG_BYTES,
    LOG_BYTES,
    MAX_WAITING,
    MOST_BYTES,
    SEGMENT_BYTES,
    WAITING_BYTES,
    Board,
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


def taken(board: Board, room: int = PLENTY, log_room: int = PLENTY) -> list[Item]:
    load = board.take(room, log_room)
    return [] if load is None else load.items


def test_traffic_is_thinned_to_the_newest_counters() -> None:
    board = Board()
    board.add(traffic(10))
    board.add(traffic(30))
    assert [i["cells"][0]["payload_bytes"] for i in taken(board) if i["kind"] == "traffic"] == [30]


def test_too_many_items_leave_a_gap_of_their_number() -> None:
    board = Board()
    for _ in range(MAX_WAITING + 7):
        board.add(phase())
    load = board.take(PLENTY, PLENTY)
    assert load is not None
    first, *rest = load.items
    assert first == GapItem(kind="gap", time=first["time"], items=7)
    assert len(rest) == MAX_WAITING


def test_few_but_large_items_are_bounded_in_bytes_too() -> None:
    board = Board()
    size = len(msgpack.packb(problem(200_000)))
    count = WAITING_BYTES // size + 5
    for _ in range(count):
        board.add(problem(200_000))
    first, *rest = taken(board)
    assert len(rest) == WAITING_BYTES // size
    assert first["kind"] == "gap"
    assert first["items"] + len(rest) == count


def test_an_item_that_no_entry_could_hold_is_a_gap() -> None:
    board = Board()
    board.add(problem(MOST_BYTES))
    assert [item["kind"] for item in taken(board)] == ["gap"]


def test_lines_that_had_to_go_are_counted_where_they_are_missing() -> None:
    board = Board()
    chars = SEGMENT_BYTES // 2
    many = LOG_BYTES // chars + 50
    for number in range(many):
        board.add(log(number, chars))
    board.add(log(0, 10, rank=1))
    logs = [item for item in taken(board) if item["kind"] == "log"]
    loud = [item for item in logs if item["rank"] == 0]
    assert loud[0]["skipped"] == loud[0]["first"] == many - len(loud) > 0
    assert [item["first"] for item in loud] == list(range(loud[0]["first"], many))
    assert sum(len(msgpack.packb(item)) for item in loud) <= LOG_BYTES
    assert [item["lines"] for item in logs if item["rank"] == 1] == [["x" * 10]], "a loud rank silences no other"


def test_lines_that_come_too_fast_are_thinned_to_the_newest_with_every_one_counted() -> None:
    board, lines, told, missing = Board(), 0, 0, 0
    for _ in range(40):
        batch = LogItem(kind="log", rank=0, time=0.0, first=lines, lines=[f"{lines + i:099d}" for i in range(2000)])
        lines += 2000
        board.add(batch)
        for item in taken(board, log_room=SEGMENT_BYTES):
            assert item["kind"] == "log"
            missing += item.get("skipped", 0)
            assert item["first"] == int(item["lines"][0]) == told + missing
            told += len(item["lines"])
        board.thin_logs()
    waiting = [item for item in taken(board) if item["kind"] == "log"]
    assert sum(len(msgpack.packb(item)) for item in waiting) <= LATE_LOG_BYTES
    missing += sum(item.get("skipped", 0) for item in waiting)
    assert told + missing + sum(len(item["lines"]) for item in waiting) == lines
    assert missing > 0


def test_lines_dropped_at_the_end_are_counted_though_none_comes_behind_them() -> None:
    board = Board()
    for rank in range(50):
        board.add(log(0, SEGMENT_BYTES - 100, rank))
    board.thin_logs()
    board.tell_skipped(late=False)
    assert not board.is_empty()
    told = [item for item in taken(board) if item["kind"] == "log"]
    assert {item["rank"] for item in told} == set(range(50))
    assert all(len(item["lines"]) + item.get("skipped", 0) == 1 for item in told)
    assert {item["first"] for item in told if not item["lines"]} == {1}
    assert board.is_empty()
    board.add(log(1, 1))
    board.tell_skipped(late=True)
    (last,) = (item for item in taken(board) if item["kind"] == "log")
    assert (last["first"], last["lines"], last["skipped"]) == (2, [], 1)


def test_a_load_fits_its_room_and_everything_gets_out_in_the_end() -> None:
    board, room = Board(), 20_000
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


def test_without_room_nothing_is_taken() -> None:
    board = Board()
    board.add(phase())
    assert board.take(ENVELOPE_BYTES - 1, PLENTY) is None
    assert [item["kind"] for item in taken(board)] == ["phase"]
