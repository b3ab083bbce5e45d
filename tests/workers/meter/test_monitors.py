"""A rank reports its progress during a stall."""

from __future__ import annotations

from workers.meter.monitors import MAX_STACK_FRAMES, MAX_STALL_GROUPS, STALL_S, StallMonitor, get_stall
from workers.meter.recorder import Recorder


def still(recorder: Recorder, seconds: float) -> None:
    """Move the last progress into the past."""
    recorder.last_progress_s -= seconds


def test_reports_repeatedly_during_a_stall_and_once_at_its_end():
    recorder = Recorder(rank=3)
    watch = StallMonitor(recorder)
    assert watch.poll() is None
    still(recorder, STALL_S)
    first = watch.poll()
    assert first is not None
    assert STALL_S <= first["still"] < STALL_S + 10
    assert watch.poll() is None, "not twice within its period"
    watch._reported_s -= STALL_S
    assert watch.poll() is not None
    recorder.issue("all_reduce", "0", 2, 8)
    moved = watch.poll()
    assert moved is not None
    assert moved["still"] == 0
    assert watch.poll() is None


def test_every_event_is_progress():
    recorder = Recorder(rank=0)
    pending = recorder.issue("all_reduce", "0", 2, 8)
    for move in (
        pending,
        lambda: recorder.set_phase("eval"),
        lambda: recorder.begin_step(1),
        lambda: recorder.issue("send", "0", 2, 8, peer=1),
    ):
        still(recorder, 1000)
        before = recorder.last_progress_s
        move()
        assert recorder.last_progress_s > before + 500


def test_reports_oldest_collective_in_flight_of_each_group():
    recorder = Recorder(rank=0)
    recorder.end_step(41)
    for number in range(MAX_STALL_GROUPS + 5):
        recorder.add_group(f"{number}", [0, 1])
        recorder.issue("barrier", f"{number}", 2, 0)()
    recorder.issue("all_gather", f"{MAX_STALL_GROUPS + 4}", 2, 64)
    recorder.issue("all_reduce", f"{MAX_STALL_GROUPS + 4}", 2, 8)
    recorder.blocking = recorder.issue("recv", "0", 2, 4, peer=1)
    told = get_stall(recorder, 5.0)
    assert (told["step"], told["phase"], told["still"], len(told["groups"])) == (41, "setup", 5.0, MAX_STALL_GROUPS)
    first, second, third, *_ = told["groups"]
    assert (first["op"], first["peer"], first["sequence"], first["blocking"]) == ("recv", 1, 1, True)
    assert (first["issued"], first["ended"]) == (1, 1), "a receive does not count as a collective"
    assert (second["op"], second["payload_bytes"], second["sequence"], second["blocking"]) == (
        "all_gather",
        64,
        2,
        False,
    )
    assert (second["issued"], second["ended"]) == (3, 1)
    assert "op" not in third


def test_reports_innermost_frames_of_a_deep_stack():
    recorder = Recorder(rank=0)

    def deeper(levels: int) -> list[str]:
        return deeper(levels - 1) if levels else get_stall(recorder, 0.0)["stack"]

    stack = deeper(100)
    assert len(stack) == MAX_STACK_FRAMES
    assert stack[0].endswith("deeper")
    assert stack[-1].rpartition(" in ")[2] == "get_stall"
