"""What waits for Redis is bounded, and what is dropped is counted."""

from __future__ import annotations

from contracts.telemetry import Cell, GapItem, LogItem, PhaseItem, TrafficItem
from workers.host.supervisor.board import MAX_LOG_CHARS, MAX_WAITING, Board


def traffic(payload_bytes: int) -> TrafficItem:
    cell = Cell(
        phase="step",
        op="all_reduce",
        axis="dp",
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


def log(number: int, chars: int) -> LogItem:
    return LogItem(kind="log", rank=0, time=0.0, first=number, lines=["x" * chars])


def test_traffic_is_thinned_to_the_newest_counters_and_loses_no_byte() -> None:
    board = Board("job", 1)
    board.add(traffic(10))
    unsent = board.take()
    assert unsent is not None
    board.add(traffic(30))
    board.give_back(unsent)
    batch = board.take()
    assert batch is not None
    assert [item["cells"][0]["payload_bytes"] for item in batch["items"] if item["kind"] == "traffic"] == [30]
    assert board.summary()["cells"]["0"][0]["payload_bytes"] == 30


def test_items_given_back_come_before_newer_ones() -> None:
    board = Board("job", 1)
    board.add(log(0, 1))
    unsent = board.take()
    assert unsent is not None
    board.add(log(1, 1))
    board.give_back(unsent)
    batch = board.take()
    assert batch is not None
    assert [item["first"] for item in batch["items"] if item["kind"] == "log"] == [0, 1]


def test_too_many_items_leave_a_gap_of_their_number() -> None:
    board = Board("job", 1)
    for _ in range(MAX_WAITING + 7):
        board.add(phase())
    batch = board.take()
    assert batch is not None
    first = batch["items"][0]
    assert first == GapItem(kind="gap", time=batch["time"], items=7)
    assert len(batch["items"]) == 1 + MAX_WAITING


def test_a_chatty_log_is_bounded_in_text_too_across_failed_sends() -> None:
    board = Board("job", 1)
    chars = MAX_LOG_CHARS // 8
    for number in range(12):
        board.add(log(number, chars))
        unsent = board.take()
        assert unsent is not None
        board.give_back(unsent)
    batch = board.take()
    assert batch is not None
    assert batch["items"][0] == GapItem(kind="gap", time=batch["time"], items=4)
    assert [item["first"] for item in batch["items"] if item["kind"] == "log"] == list(range(4, 12))
    board.add(log(12, chars))
    after = board.take()
    assert after is not None
    assert [item["kind"] for item in after["items"]] == ["log"], "the bound starts anew once a batch was sent"
