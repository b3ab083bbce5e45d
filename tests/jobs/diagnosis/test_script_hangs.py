"""Name hangs of scripts within seconds, from positions and from what the absent rank does. Slow ranks are no hang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from contracts.telemetry.batches import Item
from jobs.runs.diagnosis import Diagnosis, PlannedRun
from planner.facts.parse_spec import parse_spec
from tests.jobs.diagnosis.items import ITEM, NOW, look

WORLD = {"axis": "world", "ranks": [0, 1], "nth": 0}
OTHER = {"axis": "other", "ranks": [0, 1], "nth": 0}
USUAL = "all_reduce of 64 float32"
TRAIN = ["/scripts/train.py:9 in <module>"]
SLEEP = ["/scripts/train.py:6 in <module>"]


def script(world: int = 2) -> Diagnosis:
    """Return the diagnosis of a script that trained until NOW."""
    spec = parse_spec({"kind": "script", "layout": {"dp": world}, "script": {"path": "train.py"}})
    found = Diagnosis(PlannedRun(spec.model_dump(mode="json"), {}, world))
    for rank in range(world):
        found.add(item("start", rank=rank, time=NOW, stage="first step"), 0)
    return found


def item(kind: str, **what: Any) -> Item:
    return ITEM.validate_python({"kind": kind, **what})


def entered(number: int, recent: Sequence[str], group: Any = WORLD, **more: Any) -> dict[str, Any]:
    """Return the position of a rank in the last call of `recent`, number `number`."""
    position = {"group": group, "issued": number, "ended": number - 1, "op": recent[-1].split()[0], "blocking": True}
    return {**position, "call": recent[-1], "recent": list(recent), "sequence": number, "since": NOW, **more}


def past(number: int, recent: Sequence[str] = (), group: Any = WORLD) -> dict[str, Any]:
    return {"group": group, "issued": number, "ended": number, "recent": list(recent)}


def report(found: Diagnosis, rank: int, after: float, groups: Sequence[Any], stack: list[str], **more: Any) -> None:
    told = {"rank": rank, "time": NOW + after, "step": 60, "phase": "step", "still": after, "groups": list(groups)}
    found.add(item("standing", **{**told, "stack": stack, **more}), 0)


def process(found: Diagnosis, rank: int, after: float, state: str = "sleeping", **more: Any) -> None:
    told = {"cpu": 0.01, "throttled": 0.0, "crowded": 0.0, "stack": [], "silent_s": 0.0, **more}
    found.add(item("process", rank=rank, time=NOW + after, state=state, **told), 0)


def play(
    found: Diagnosis, seconds: float, stack: list[str] = SLEEP, source: str = "time.sleep(3600)", **usage: Any
) -> Any:
    """Let rank 0 wait for rank 1 for some seconds, and return the last verdict."""
    after = 2.0
    while after <= seconds:
        report(found, 0, after, [entered(66, [USUAL])], TRAIN, source="loss.backward()")
        report(found, 1, after, [past(65, [USUAL])], stack, source=source)
        for rank, more in ((0, {}), (1, usage)):
            process(found, rank, after + 0.5, **more)
        after += 2.0
    return look(found, NOW + seconds)


def test_sleeping_rank_is_named_with_its_line_within_ten_seconds() -> None:
    found = script()
    assert play(found, 7.0)["state"] != "hung"
    verdict = play(found, 9.0)
    assert verdict["state"] == "hung"
    assert verdict["sentence"] == (
        "Stalled: no progress for 9 s. "
        "Rank 0 waits for rank 1, which did not enter all_reduce 66 on world (ranks 0 and 1)."
    )
    assert verdict["reason"] == "Rank 1 sleeps in train.py:6: `time.sleep(3600)`."
    texts = [fact["text"] for fact in verdict["evidence"]]
    assert "rank 0: in all_reduce of 64 float32 (call 66 on world), at train.py:9: `loss.backward()`" in texts


def test_one_sample_with_cpu_does_not_end_a_hang() -> None:
    """The meter's thread of a rank that sleeps uses a CPU for a moment."""
    found = script()
    play(found, 11.0)
    process(found, 1, 12.5, cpu=0.4)
    verdict = look(found, NOW + 13)
    assert (verdict["state"], verdict["reason"]) == ("hung", "Rank 1 sleeps in train.py:6: `time.sleep(3600)`.")
    process(found, 1, 14.5, cpu=0.4)
    assert look(found, NOW + 15)["state"] != "hung"


@pytest.mark.parametrize(
    ("stack", "source", "usage", "words"),
    [
        (SLEEP, "x = f(x)", {"cpu": 0.9, "state": "running"}, "still computes in train.py:6"),
        (SLEEP, "x = f(x)", {"crowded": 0.8}, "still computes in train.py:6: `x = f(x)`, but waits for a CPU"),
        (SLEEP, "x = f(x)", {"throttled": 0.8}, "A CPU quota throttles rank 1"),
        (["/s/train.py:6 in evaluate"], "time.sleep(40)", {}, "still evaluates in train.py:6 in evaluate"),
        (["/s/train.py:6 in <module>", "/s/train.py:3 in save"], "f()", {}, "A checkpoint is being saved on rank 1"),
        (["/s/train.py:6 in <module>", "/lib/python3.11/x/dataloader.py:7 in next"], "f()", {}, "data is being loaded"),
        (["/s/train.py:6 in <module>", "/lib/python3.11/torch/_inductor/x.py:7 in f"], "f()", {}, "still compiles"),
        (SLEEP, "open(path).read()", {}, "waits for a file or a disk"),
        ([*SLEEP, "/lib/python3.11/site-packages/wandb/x.py:7 in f"], "wandb.finish()", {}, "waits for the network"),
    ],
)
def test_slow_rank_is_named_without_an_alarm(stack: list[str], source: str, usage: Any, words: str) -> None:
    verdict = play(script(), 45.0, stack, source, **usage)
    assert verdict["state"] == "notice"
    assert words in verdict["reason"]


def test_rank_whose_stack_moves_is_slow() -> None:
    found = script()
    for second in range(2, 45, 2):
        verdict = play(found, 2.0)
        report(found, 0, second, [entered(66, [USUAL])], TRAIN)
        report(found, 1, second, [past(65)], [f"/s/train.py:{second} in <module>"])
        process(found, 1, second + 0.5)
        verdict = look(found, NOW + second + 1)
        assert verdict["state"] != "hung"


@pytest.mark.parametrize(("source", "words"), [("lock.acquire()", "a lock"), ("input('? ')", "waits for input")])
def test_lock_and_input_are_named(source: str, words: str) -> None:
    verdict = play(script(), 9.0, source=source)
    assert verdict["state"] == "hung"
    assert words in verdict["reason"]


def test_pause_at_a_line_extends_its_threshold_by_ten_seconds() -> None:
    """Rank 1 paused 20 s in this line before, so it hangs after 30 s."""
    found = script()
    play(found, 20.0)
    report(found, 1, 20.0, [past(66)], SLEEP, still=0.0)
    report(found, 0, 20.0, [past(66)], TRAIN, still=0.0)
    for after, is_hung in ((28.0, False), (32.0, True)):
        for second in range(2, int(after), 2):
            for rank, position, stack in ((0, entered(67, [USUAL]), TRAIN), (1, past(66), SLEEP)):
                report(found, rank, 20.0 + second, [position], stack, still=float(second))
                process(found, rank, 20.5 + second)
        assert (look(found, NOW + 20.0 + after)["state"] == "hung") == is_hung


def test_different_calls_are_certain_after_two_reports() -> None:
    found = script()
    for after in (2.0, 4.0):
        report(found, 0, after, [entered(43, [USUAL, USUAL])], TRAIN)
        report(found, 1, after, [entered(43, [USUAL, "barrier"])], SLEEP)
        assert (look(found, NOW + after + 0.2)["state"] == "hung") == (after == 4.0)
    verdict = look(found, NOW + 4.5)
    assert (verdict["hang"]["cause"], verdict["hang"]["ranks"]) == ("mismatch", [1])  # type: ignore[index]
    assert verdict["reason"] == f"In call 43 on world, rank 1 calls barrier, but rank 0 calls {USUAL}."
    assert verdict["next"] == "Find the code branch in which ranks call different operations."


@pytest.mark.parametrize(("second_report", "is_hung"), [(None, False), (3.0, False), (4.0, True)])
def test_one_report_or_less_than_four_seconds_are_not_certain(second_report: float | None, is_hung: bool) -> None:
    found = script()
    for after in filter(None, (2.0, second_report)):
        report(found, 0, after, [entered(43, [USUAL, USUAL])], TRAIN)
        report(found, 1, after, [entered(43, [USUAL, "barrier"])], SLEEP)
    now = NOW + (second_report or 5.0) + 0.2
    assert (look(found, now)["state"] == "hung") == is_hung


@pytest.mark.parametrize(("cpu", "hung_after"), [(0.01, 10.0), (0.2, 60.0)])
def test_transfer_that_uses_a_cpu_is_slow(cpu: float, hung_after: float) -> None:
    found = script()
    for after in range(2, 66, 2):
        for rank in (0, 1):
            report(found, rank, after, [entered(43, [USUAL])], TRAIN)
            process(found, rank, after + 0.1, cpu=cpu)
        verdict = look(found, NOW + after + 0.2)
        assert (verdict["state"] == "hung") == (after >= hung_after)
    assert verdict["hang"] is not None
    assert verdict["hang"]["cause"] == "link"


def test_call_that_usually_follows_was_skipped() -> None:
    found, broadcast = script(), "broadcast of 8 float32 from rank 0"
    for after in (2.0, 4.0):
        report(found, 0, after, [entered(45, [broadcast, USUAL, broadcast])], TRAIN)
        report(found, 1, after, [entered(45, [broadcast, USUAL, USUAL])], SLEEP)
    hang = look(found, NOW + 4.5)["hang"]
    assert hang is not None
    assert (hang["cause"], hang["ranks"]) == ("skipped call", [1])


def test_difference_is_found_after_a_rank_has_left_the_call() -> None:
    """Gloo may complete different calls on one rank, which then waits in the next call."""
    found = script()
    for after in (2.0, 4.0):
        report(found, 0, after, [entered(43, [USUAL, USUAL])], TRAIN)
        report(found, 1, after, [entered(44, [USUAL, "barrier", USUAL])], SLEEP)
    hang = look(found, NOW + 4.5)["hang"]
    assert hang is not None
    assert (hang["cause"], hang["ranks"], hang["sequence"]) == ("mismatch", [1], 43)


def test_calls_of_a_group_that_got_another_label_are_not_compared() -> None:
    """The default group of rank 1 was called "world" until its mesh was built. Later groups have this name."""
    found = script()
    report(found, 1, 1.0, [past(43, ["barrier", "barrier"])], SLEEP)
    report(found, 1, 1.5, [past(43, group=OTHER)], SLEEP, still=0.0)
    for after in (2.0, 4.0):
        report(found, 0, after, [entered(43, [USUAL, USUAL])], TRAIN)
    assert look(found, NOW + 4.5)["state"] != "hung"


def test_ranks_in_different_groups_wait_for_each_other() -> None:
    found = script()
    for after in (2.0, 4.0):
        report(found, 0, after, [entered(43, [USUAL]), past(7, group=OTHER)], TRAIN)
        report(found, 1, after, [entered(8, [USUAL], OTHER), past(42)], SLEEP)
    verdict = look(found, NOW + 4.5)
    assert verdict["state"] == "hung"
    assert "calls them in another order" in verdict["reason"]


@pytest.mark.parametrize(
    ("error", "words"), [("", "without an error"), ("ValueError: bad sample", "with ValueError: bad sample")]
)
def test_rank_that_ended_is_certain(error: str, words: str) -> None:
    found = script()
    report(found, 1, 0.1, [past(65)], [] if not error else SLEEP, still=0.0, ended=error)
    for after in (2.0, 4.0):
        report(found, 0, after, [entered(66, [USUAL])], TRAIN)
    verdict = look(found, NOW + 4.5)
    assert (verdict["state"], verdict["hang"]["cause"]) == ("hung", "dead")  # type: ignore[index]
    assert words in verdict["reason"]


def test_rank_that_ended_is_no_hang_without_a_waiting_rank() -> None:
    found = script()
    report(found, 1, 0.1, [past(65)], [], still=0.0, ended="")
    process(found, 1, 1.0, "gone")
    for after in range(2, 60, 2):
        report(found, 0, after, [past(65)], SLEEP)
        process(found, 0, after + 0.5)
        assert look(found, NOW + after + 1)["state"] not in ("hung", "failed")


def test_rank_that_trains_in_another_group_is_no_hang() -> None:
    """Rank 2 has no report, because it makes progress."""
    found = script(3)
    group = {"axis": "world", "ranks": [0, 1, 2], "nth": 0}
    for after in range(2, 40, 2):
        report(found, 0, after, [entered(66, [USUAL], group)], TRAIN)
        report(found, 1, after, [entered(66, [USUAL], group)], TRAIN)
        cells = [{"phase": "step", "op": "all_reduce", "axis": "x", "group_size": 1, "count": after}]
        cells[0] |= {"completed": after, "payload_bytes": 1, "algorithmic_bytes": 0, "busy_s": 0.1}
        found.add(item("traffic", rank=2, time=NOW + after, cells=cells, dropped=0), 0)
        assert look(found, NOW + after + 1)["hang"] is None


@pytest.mark.parametrize(("function", "state"), [("new_group", "hung"), ("init_process_group", "notice")])
def test_rank_that_does_not_create_a_group_is_named(function: str, state: str) -> None:
    found, stack = script(), [*TRAIN, f"/lib/python3.11/torch/distributed/distributed_c10d.py:5 in {function}"]
    for after in (2.0, 4.0, 6.0):
        report(found, 0, after, [past(65)], stack)
        report(found, 1, after, [past(65)], SLEEP, source="time.sleep(9)")
        for rank in (0, 1):
            process(found, rank, after + 0.5)
    verdict = look(found, NOW + 8.0)
    assert verdict["state"] == state, "ranks may start late"
    assert f"Rank 0 waits for rank 1, which did not enter `{function}`." in verdict["sentence"]


TIMEOUT = "rank 0 ended with exit code 1: RuntimeError: Timed out waiting 9000ms for recv operation to complete"


def test_last_state_explains_a_timeout() -> None:
    found = script()
    play(found, 9.0)
    report(found, 0, 9.5, [past(66, [USUAL])], TRAIN, still=0.0, ended="RuntimeError: Timed out")
    found.end("failed", {"rank": 0, "reason": TIMEOUT, "exit_code": 1, "log_tail": []})
    verdict = look(found, NOW + 10)
    assert verdict["state"] == "failed"
    assert verdict["sentence"] == (
        "Failed: rank 0 waited for rank 1, which did not enter all_reduce 66 on world (ranks 0 and 1)."
    )
    assert verdict["reason"] == "Rank 1 sleeps in train.py:6: `time.sleep(3600)`."
    assert any("Timed out" in fact["text"] or "train.py:9" in fact["text"] for fact in verdict["evidence"])


def test_last_state_is_that_before_the_launcher_ends_the_other_ranks() -> None:
    found = script()
    play(found, 9.0)
    report(found, 0, 9.5, [past(66, [USUAL])], TRAIN, still=0.0, ended="RuntimeError: Timed out")
    for after in range(10, 24, 2):
        process(found, 1, after, state="gone")
        look(found, NOW + after)
    found.end("failed", {"rank": 0, "reason": TIMEOUT, "exit_code": 1, "log_tail": []})
    verdict = look(found, NOW + 24)
    assert verdict["sentence"] == (
        "Failed: rank 0 waited for rank 1, which did not enter all_reduce 66 on world (ranks 0 and 1)."
    )
    assert verdict["reason"] == "Rank 1 sleeps in train.py:6: `time.sleep(3600)`."


def test_hang_that_ended_long_before_does_not_explain_a_failure() -> None:
    found = script()
    play(found, 9.0)
    for rank in (0, 1):
        report(found, rank, 10.0, [past(66)], TRAIN, still=0.0)
    for after in range(10, 40, 2):
        found.add(item("gauge", rank=-1, time=NOW + after), 0)
        look(found, NOW + after)
    found.end("failed", {"rank": 0, "reason": TIMEOUT, "exit_code": 1, "log_tail": []})
    assert "waited for" not in look(found, NOW + 41)["sentence"]


def test_rank_that_left_explains_a_lost_connection() -> None:
    found = script()
    report(found, 1, 0.1, [past(65, [USUAL])], [], still=0.0, ended="")
    report(found, 0, 0.2, [past(66, [USUAL])], TRAIN, still=0.0, ended="RuntimeError: Connection closed by peer")
    reason = "rank 0 ended with exit code 1: RuntimeError: Connection closed by peer"
    found.end("failed", {"rank": 0, "reason": reason, "exit_code": 1, "log_tail": []})
    verdict = look(found, NOW + 1)
    assert "rank 0 waited for rank 1, which did not enter all_reduce 66 on world" in verdict["sentence"]
    assert verdict["reason"] == "Rank 1 ended without an error."


def test_rank_without_a_last_report_explains_a_lost_connection() -> None:
    found, error = script(), "RuntimeError: Connection reset by peer"
    report(found, 0, 0.2, [past(66, [USUAL])], TRAIN, still=0.0, ended=error)
    found.end("failed", {"rank": 0, "reason": f"rank 0 ended with exit code 1: {error}", "exit_code": 1})
    verdict = look(found, NOW + 1)
    assert "rank 0 lost its connection in all_reduce 66 on world (ranks 0 and 1)" in verdict["sentence"]
    assert verdict["reason"].startswith("Rank 1 has sent no last report")


def test_own_exception_of_a_rank_stays_the_verdict() -> None:
    found = script()
    report(found, 1, 0.1, [past(65, [USUAL])], SLEEP, still=0.0, ended="ValueError: bad sample")
    reason = "rank 1 ended with exit code 1: ValueError: bad sample"
    found.end("failed", {"rank": 1, "reason": reason, "exit_code": 1, "log_tail": []})
    verdict = look(found, NOW + 1)
    assert "ValueError: bad sample" in verdict["sentence"]
    assert any("last called all_reduce of 64 float32" in fact["text"] for fact in verdict["evidence"])
