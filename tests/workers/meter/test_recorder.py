"""Counters are exact even if records are dropped, and count a collective in the cell of its issue."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from workers.meter.monitors import build_timeline
from workers.meter.recorder import Recorder
from workers.meter.work import time_wait


def test_cells_sum_issued_and_completed_collectives():
    recorder = Recorder(rank=0)
    recorder.label_group("3", "tp")
    recorder.issue("all_reduce", "3", 4, 1000)()
    recorder.issue("all_reduce", "3", 4, 24)
    (cell,) = recorder.get_cells()
    assert cell["busy_s"] >= 0
    assert cell | {"busy_s": 0} == {
        "phase": "setup",
        "op": "all_reduce",
        "axis": "tp",
        "group_size": 4,
        "count": 2,
        "completed": 1,
        "payload_bytes": 1024,
        "algorithmic_bytes": 1536,  # 2 (4 - 1) / 4 of the payload
        "busy_s": 0,
    }


def test_collective_completes_in_phase_and_axis_of_issue():
    recorder = Recorder(rank=0)
    recorder.set_phase("step")
    recorder.step = 7
    pending = recorder.issue("broadcast", "0", 2, 8)
    recorder.set_phase("eval")
    recorder.label_group("0", "dp")
    recorder.step = 8
    recorder.label_group("1", "world")
    recorder.issue("broadcast", "1", 2, 8)  # its twin of the next phase, still on its way
    pending.complete(0.25)
    assert [c["completed"] for c in recorder.get_cells("eval")] == [0]
    (cell,) = recorder.get_cells("step")
    assert (cell["axis"], cell["completed"], cell["busy_s"]) == ("world", 1, 0.25)
    (record,), dropped = recorder.drain()
    assert (record.phase, record.axis, record.step, record.duration_s, dropped) == ("step", "world", 7, 0.25, 0)


def test_second_wait_does_not_complete_again():
    recorder = Recorder(rank=0)
    pending = recorder.issue("send", "0", 2, 8)
    pending()
    pending()
    assert recorder.get_cells()[0]["completed"] == 1
    assert len(recorder.drain()[0]) == 1


def test_group_sizes_have_separate_cells():
    recorder = Recorder(rank=0)
    recorder.issue("all_gather", "a", 2, 100)
    recorder.issue("all_gather", "b", 4, 100)
    small, large = recorder.get_cells()
    assert (small["group_size"], small["count"], small["payload_bytes"], small["algorithmic_bytes"]) == (2, 1, 100, 50)
    assert (large["group_size"], large["count"], large["payload_bytes"], large["algorithmic_bytes"]) == (4, 1, 100, 75)


def test_uneven_splits_count_sent_bytes_of_caller():
    recorder = Recorder(rank=0)
    recorder.issue("all_to_all", "0", 4, 1000, 990)
    recorder.issue("all_to_all", "0", 4, 400)
    (cell,) = recorder.get_cells()
    assert (cell["payload_bytes"], cell["algorithmic_bytes"]) == (1400, 990 + 300)


def test_full_buffer_drops_oldest_record_but_no_count():
    recorder = Recorder(rank=0, capacity=10)
    for size in range(25):
        recorder.issue("send", "0", 2, size)()
    records, dropped = recorder.drain()
    assert [record.payload_bytes for record in records] == list(range(15, 25))
    assert dropped == recorder.dropped == 15
    (cell,) = recorder.get_cells()
    assert (cell["count"], cell["completed"], cell["payload_bytes"]) == (25, 25, sum(range(25)))


def test_counters_are_exact_with_many_threads():
    recorder = Recorder(rank=0, capacity=100)

    def collectives() -> None:
        for _ in range(5000):
            recorder.issue("all_reduce", "0", 2, 3)()

    threads = [threading.Thread(target=collectives) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (cell,) = recorder.get_cells()
    assert (cell["count"], cell["completed"], cell["payload_bytes"]) == (40_000, 40_000, 120_000)
    assert len(recorder.drain()[0]) + recorder.dropped == 40_000


def test_numbers_groups_with_equal_ranks_and_axis_in_creation_order():
    recorder = Recorder(rank=1)
    groups = [recorder.add_group(name, [1, 3]) for name in ("a", "b", "c")]
    other = recorder.add_group("d", [0, 1])
    recorder.label_group("b", "dp")
    recorder.label_group("c", "dp")
    result = [recorder.get_group_ranks(group) for group in (*groups, other)]
    assert [(one["axis"], one["ranks"], one["nth"]) for one in result] == [
        ("world", [1, 3], 0),
        ("dp", [1, 3], 0),
        ("dp", [1, 3], 1),
        ("world", [0, 1], 0),
    ]


def test_renamed_group_keeps_its_sequence_numbers():
    recorder = Recorder(rank=0)
    group = recorder.add_group("early", [0, 1])
    recorder.issue("all_reduce", "early", 2, 8)()
    recorder.groups.rename(group, "late")
    assert recorder.issue("all_reduce", "late", 2, 8).sequence_number == 2
    recorder.add_group("late", [0, 1])
    assert recorder.issue("all_reduce", "late", 2, 8).sequence_number == 1


def test_numbers_sends_and_receives_by_peer():
    recorder = Recorder(rank=4)
    group = recorder.add_group("pp", [4, 6, 8])
    ops = [("send", 1), ("send", 2), ("send", 1), ("recv", 1), ("barrier", None)]
    issued = [recorder.issue(op, "pp", 3, 8, peer=peer) for op, peer in ops]
    assert [(pending.peer, pending.sequence_number) for pending in issued] == [(6, 1), (8, 1), (6, 2), (6, 1), (-1, 1)]
    assert (group.issued, group.ended, len(group.in_flight)) == (1, 0, 5)
    for pending in issued:
        pending()
    assert (group.issued, group.ended, len(group.in_flight)) == (1, 1, 0)


def in_step(recorder: Recorder) -> None:
    recorder.set_phase("step")
    recorder.begin_step(1)


def test_concurrent_collectives_count_once_as_hidden(monkeypatch):
    now = iter(range(100))
    recorder = Recorder(rank=0)
    in_step(recorder)
    monkeypatch.setattr("time.perf_counter", lambda: float(next(now)))
    first = recorder.issue("all_reduce", "0", 2, 8)  # at 0
    second = recorder.issue("all_reduce", "0", 2, 8)  # at 1
    second.complete(0.0)  # at 2
    first.complete(0.0)  # at 3
    recorder.issue("recv", "0", 2, 8, peer=1)  # one posted ahead: who knows when it began to travel
    parts = recorder.end_step(1)
    assert (parts["hidden"], parts["exposed"]) == ({"world": 3.0}, {})


def test_blocked_time_is_exposed_and_the_rest_hidden(monkeypatch):
    now = iter([0.0, 10.0, 20.0, 20.0])
    recorder = Recorder(rank=0)
    in_step(recorder)
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    pending = recorder.issue("all_reduce", "0", 2, 8)  # from 0
    time_wait(pending, 0, lambda: None)  # 10 to 20
    monkeypatch.undo()
    parts = recorder.end_step(1)
    assert (pending.blocked_s, parts["hidden"], parts["exposed"]) == (10.0, {"world": 10.0}, {"world": 10.0})
    in_step(recorder)
    assert recorder.end_step(2)["exposed"] == {}, "each step has its own"


def test_other_thread_has_no_exposed_time():
    recorder = Recorder(rank=0)
    in_step(recorder)
    pending = recorder.issue("send", "0", 2, 8, peer=1)
    thread = threading.Thread(target=lambda: time_wait(pending, 0, lambda: None))
    thread.start()
    thread.join()
    assert recorder.end_step(1)["exposed"] == {}
    assert recorder.get_cells()[0]["completed"] == 1


def test_collective_outside_a_step_is_in_no_breakdown():
    recorder = Recorder(rank=0)
    in_step(recorder)
    recorder.set_phase("proof")
    time_wait(recorder.issue("all_reduce", "0", 2, 8), 0, lambda: None)
    assert recorder.end_step(1) == {"data": 0.0, "optimizer": 0.0, "exposed": {}, "hidden": {}}


def test_trace_ends_with_next_step_and_counts_omitted_events(monkeypatch):
    monkeypatch.setattr("workers.meter.recorder.MAX_CALLS_PER_STEP", 3)
    monkeypatch.setattr("workers.meter.collectives.MAX_CALLS_PER_STEP", 2)
    recorder = Recorder(rank=7)
    recorder.enable_tracing()
    in_step(recorder)
    for _ in range(5):
        recorder.issue("all_reduce", "0", 2, 8)()
    recorder.end_step(1)
    for _ in range(3):
        with recorder.time_span("eval"):
            pass
    assert recorder.take_traces() == []
    recorder.begin_step(2)  # which never ends
    (log,) = recorder.take_traces()
    result = build_timeline(recorder, log)
    assert (result["step"], result["left_out"], result["calls"]["sequence"]) == (1, 2 + 1, [1, 2, 3])
    assert result["spans"]["work"] == ["eval", "eval"]
    assert abs(result["began"] - time.time()) < 60
    assert len(build_timeline(recorder, log, max_events=1)["calls"]["op"]) == 1
    assert build_timeline(recorder, log, max_events=1)["left_out"] == 6
    recorder.close_trace()
    assert recorder.take_traces() == []


def test_number_of_traces_is_bounded():
    recorder = Recorder(rank=0)
    recorder.enable_tracing()
    for step in range(1, 100):
        recorder.begin_step(step)
        recorder.end_step(step)
    assert [log.step for log in recorder.take_traces()] == list(range(91, 99))


def test_records_keep_their_order_if_thread_is_preempted_between_clocks(monkeypatch):
    clock, stands = [100.0], iter([0.0, 0.5] * 9)

    def unix() -> float:
        result = 5000.0 + clock[0]
        clock[0] += next(stands)
        return result

    recorder = Recorder(0)
    for _ in range(3):
        recorder.issue("all_reduce", "g", 2, 1)()
    began = [pending.started_s for pending, _ in recorder._records]
    monkeypatch.setattr("workers.meter.recorder.time", SimpleNamespace(time=unix, perf_counter=lambda: clock[0]))
    starts = [record.start for record in recorder.drain()[0]]
    assert starts == pytest.approx([5000.0 + seconds for seconds in began], abs=1e-6)
    assert recorder.to_unix_s(100.0) == pytest.approx(5100.0, abs=1e-6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda r: r.set_phase("warmup"), "expected one of"),
        (lambda r: r.label_group("0", "xp"), "expected one of"),
        (lambda r: Recorder(0, capacity=0), "at least 1"),
    ],
)
def test_refuses_unknown_terms(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong(Recorder(rank=0))
