"""Counters are exact whatever happens to the records; a collective is counted where it was issued."""

from __future__ import annotations

import threading

import pytest

from workers.meter.recorder import Recorder


def test_cells_sum_what_was_issued_and_what_completed():
    recorder = Recorder(rank=0)
    recorder.label("3", "tp")
    recorder.issue("all_reduce", "3", 4, 1000)()
    recorder.issue("all_reduce", "3", 4, 24)
    (cell,) = recorder.cells()
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


def test_a_collective_completes_in_the_phase_and_axis_it_was_issued_in():
    recorder = Recorder(rank=0)
    recorder.set_phase("step")
    recorder.step = 7
    pending = recorder.issue("broadcast", "0", 2, 8)
    recorder.set_phase("eval")
    recorder.label("0", "dp")
    recorder.step = 8
    recorder.label("1", "world")
    recorder.issue("broadcast", "1", 2, 8)  # its twin of the next phase, still on its way
    pending.complete(0.25)
    assert [c["completed"] for c in recorder.cells("eval")] == [0]
    (cell,) = recorder.cells("step")
    assert (cell["axis"], cell["completed"], cell["busy_s"]) == ("world", 1, 0.25)
    (record,), dropped = recorder.drain()
    assert (record.phase, record.axis, record.step, record.duration_s, dropped) == ("step", "world", 7, 0.25, 0)


def test_a_work_waited_for_twice_completes_once():
    recorder = Recorder(rank=0)
    pending = recorder.issue("send", "0", 2, 8)
    pending()
    pending()
    assert recorder.cells()[0]["completed"] == 1
    assert len(recorder.drain()[0]) == 1


def test_groups_of_two_sizes_under_one_axis_have_a_cell_each():
    recorder = Recorder(rank=0)
    recorder.issue("all_gather", "a", 2, 100)
    recorder.issue("all_gather", "b", 4, 100)
    small, large = recorder.cells()
    assert (small["group_size"], small["count"], small["payload_bytes"], small["algorithmic_bytes"]) == (2, 1, 100, 50)
    assert (large["group_size"], large["count"], large["payload_bytes"], large["algorithmic_bytes"]) == (4, 1, 100, 75)


def test_what_is_not_shared_evenly_leaves_as_the_caller_says():
    recorder = Recorder(rank=0)
    recorder.issue("all_to_all", "0", 4, 1000, 990)
    recorder.issue("all_to_all", "0", 4, 400)
    (cell,) = recorder.cells()
    assert (cell["payload_bytes"], cell["algorithmic_bytes"]) == (1400, 990 + 300)


def test_a_full_buffer_drops_the_oldest_record_and_no_count():
    recorder = Recorder(rank=0, capacity=10)
    for size in range(25):
        recorder.issue("send", "0", 2, size)()
    records, dropped = recorder.drain()
    assert [record.payload_bytes for record in records] == list(range(15, 25))
    assert dropped == recorder.dropped == 15
    (cell,) = recorder.cells()
    assert (cell["count"], cell["completed"], cell["payload_bytes"]) == (25, 25, sum(range(25)))


def test_counters_stay_exact_when_many_threads_issue_and_complete():
    recorder = Recorder(rank=0, capacity=100)

    def collectives() -> None:
        for _ in range(5000):
            recorder.issue("all_reduce", "0", 2, 3)()

    threads = [threading.Thread(target=collectives) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (cell,) = recorder.cells()
    assert (cell["count"], cell["completed"], cell["payload_bytes"]) == (40_000, 40_000, 120_000)
    assert len(recorder.drain()[0]) + recorder.dropped == 40_000


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda r: r.set_phase("warmup"), "phase must be one of"),
        (lambda r: r.label("0", "xp"), "axis must be one of"),
        (lambda r: Recorder(0, capacity=0), "at least 1"),
    ],
)
def test_unknown_words_are_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        wrong(Recorder(rank=0))
