"""Make verdicts from the items of a run: the sentence, the parts of a step, and the stages of the start."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jobs.core.verdict_schema import MAX_VERDICT_BYTES
from jobs.runs.diagnosis import Diagnosis, HostRanks, PlannedRun
from jobs.runs.diagnosis.rank_reports import SCRIPT_REASON, StepTimings
from planner.facts.parse_spec import parse_spec
from tests.jobs.diagnosis.items import ITEM, NOW, diagnosis, look, step
from tests.jobs.diagnosis.simulated_steps import Act, Does, Meets, Player


def start(stage: str, rank: int, time: float) -> object:
    return ITEM.validate_python({"kind": "start", "rank": rank, "time": time, "stage": stage})


def test_verdict_before_any_item_is_starting() -> None:
    told = look(diagnosis({"dp": 2}))
    assert told["state"] == "starting"
    assert told["measured"] is None
    assert told["planned"] is not None


def test_start_stages_name_the_last_rank() -> None:
    found = diagnosis({"dp": 2}, submitted=NOW, ordered=NOW + 3)
    for stage, rank, time in (("claimed", -1, 4.0), ("spawned", -1, 4.5), ("imported", 0, 6.0), ("imported", 1, 9.0)):
        found.add(start(stage, rank, NOW + time), 0)  # type: ignore[arg-type]
    parts = [(part["name"], part["seconds"], part["rank"]) for part in look(found)["start"]]
    assert parts == [("queue", 3.0, -1), ("claim", 1.0, -1), ("spawn", 0.5, -1), ("import", 4.5, 1)]
    assert look(found)["sentence"] == "Starting: connecting ranks (rendezvous)."


def test_step_parts_sum_to_the_step_and_verdict_names_the_excess() -> None:
    found = diagnosis({"dp": 2})
    took = look(found)["planned"]["step_s"] * 3  # type: ignore[index]
    found._planned["sure"] = 0.45  # type: ignore[index]
    parts = {"data": 0.01 * took, "optimizer": 0.02 * took, "exposed": {"dp": 0.8 * took}, "hidden": {"dp": 0.1}}
    for number in range(1, 9):
        for rank in (0, 1):
            found.add(step(rank, number, took, parts), 0)  # type: ignore[arg-type]
    told = look(found)
    measured = told["measured"]
    assert measured is not None
    assert sum(part["seconds"] for part in measured["parts"] if part["kind"] != "hidden") == pytest.approx(took)
    assert told["state"] == "notice"
    assert told["sentence"].startswith("Slower than planned: ")
    assert "3.0 times the prediction" in told["sentence"]
    assert " Exposed dp is 100% of the extra step time." in told["sentence"]
    assert (told["next"], told["action"]) == ("Calibrate the host for a more accurate prediction.", "calibrate")


def test_step_time_is_the_median_of_rank_0() -> None:
    found = diagnosis({"dp": 2})
    parts = {"data": 0.0, "optimizer": 0.0, "exposed": {"dp": 0.05}, "hidden": {}}
    for number in range(1, 65):
        for rank in (0, 1):
            found.add(step(rank, number, 9.0 if number == 60 else 0.1, parts), 0)
    running = look(found)
    live = running["measured"]
    assert live is not None
    sentence = "Not checked: step time. Exposed dp communication takes 20% of each step."
    assert running["sentence"] == sentence, "the page shows the step time of a running job, live"
    assert (live["step_s"], live["steps"]) == (0.1, 50)
    assert sum(part["seconds"] for part in live["parts"] if part["kind"] != "hidden") == pytest.approx(0.1)
    found.end("succeeded")
    ended = look(found)
    assert ended["measured"] is not None
    assert (ended["measured"]["step_s"], ended["measured"]["steps"]) == (0.1, 61)
    assert ended["sentence"] == sentence.replace("time.", "time (100 ms).")
    assert ended["evidence"][1]["text"] == "measured step time after step 64: 100 ms (median of the last 61 steps)"


def test_inaccurate_plan_gives_no_speed_verdict() -> None:
    found = diagnosis({"dp": 2})
    took = look(found)["planned"]["step_s"] * 3  # type: ignore[index]
    found._planned["sure"] = 3.3  # type: ignore[index]
    parts = {"data": 0.0, "optimizer": 0.0, "exposed": {"dp": 0.4 * took}, "hidden": {"dp": 0.5 * took}}
    for number in range(1, 9):
        for rank in (0, 1):
            found.add(step(rank, number, took, parts), 0)  # type: ignore[arg-type]
    told = look(found)
    assert told["state"] == "well"
    assert told["sentence"] == "Not checked: step time. Exposed dp communication takes 40% of each step."
    assert told["evidence"][0]["text"].startswith("predicted step time: ")
    assert told["evidence"][0]["text"].endswith(" (within a factor of 4.3)")
    assert told["evidence"][1]["text"].endswith(" (median of the last 5 steps)")
    assert told["reason"].startswith("The predicted step time, ")
    assert told["reason"].endswith(" (within a factor of 4.3), is too inaccurate for a check.")
    assert (told["next"], told["action"], told["action_rank"]) == ("Calibrate the host.", "calibrate", -1)


def test_verdict_on_plan_includes_traffic() -> None:
    found = diagnosis({"dp": 2})
    took = look(found)["planned"]["step_s"]  # type: ignore[index]
    found._planned["sure"] = 0.45  # type: ignore[index]
    row = {"phase": "step", "op": "all_reduce", "axis": "dp", "predicted_count": 5, "measured_count": 5}
    row |= {"predicted_bytes": 100, "measured_bytes": 100}
    for rank in (0, 1):
        for number in range(1, 9):
            found.add(step(rank, number, took), 0)
        found.add(ITEM.validate_python({"kind": "verdict", "rank": rank, "time": NOW, "rows": [row]}), 0)
    found.end("succeeded")
    told = look(found)
    assert (told["state"], told["over"]) == ("well", True)
    assert told["sentence"].startswith("On plan: ")
    assert told["sentence"].endswith(" matches the prediction. Traffic matches the plan.")


def test_verdict_without_step_time_includes_traffic() -> None:
    found = diagnosis({"dp": 2})
    found._planned["sure"] = 9.0  # type: ignore[index]
    parts = {"data": 0.0, "optimizer": 0.0, "exposed": {"dp": 0.4}, "hidden": {}}
    for rank in (0, 1):
        for number in range(1, 9):
            found.add(step(rank, number, 0.725, parts), 0)  # type: ignore[arg-type]
        found.add(ITEM.validate_python({"kind": "verdict", "rank": rank, "time": NOW, "rows": []}), 0)
    found.end("succeeded")
    told = look(found)
    assert told["sentence"] == "Not checked: step time (725 ms). Traffic matches the plan."
    assert told["reason"].endswith(" (within a factor of 10), is too inaccurate for a check.")
    assert told["evidence"][-1]["text"] == "Exposed dp communication takes 55% of each step."


@pytest.mark.parametrize(
    ("basis", "outcome", "action", "following"),
    [
        ("data sheet", None, "calibrate", "Calibrate the host"),
        ("calibrated", None, "open_breakdown", "Step time breakdown"),
        ("calibrated", "succeeded", "find_faster", "Find layouts that are faster"),
    ],
)
def test_slow_run_has_matching_action(basis: str, outcome: str | None, action: str, following: str) -> None:
    found = diagnosis({"dp": 2})
    found._run.estimate["time"]["basis"] = basis
    took = look(found)["planned"]["step_s"] * 3  # type: ignore[index]
    found._planned["sure"] = 0.31  # type: ignore[index]
    for number in range(1, 9):
        for rank in (0, 1):
            found.add(step(rank, number, took), 0)
    if outcome is not None:
        found.end(outcome)
    told = look(found)
    assert told["sentence"].startswith("Slower than planned: the step time")
    assert told["action"] == action
    assert following in told["next"]


def test_run_below_the_margin_is_faster_than_planned() -> None:
    found = diagnosis({"dp": 1})
    took = look(found)["planned"]["step_s"]  # type: ignore[index]
    found._planned["sure"] = 0.15  # type: ignore[index]
    for number in range(1, 9):
        found.add(step(0, number, took / 5), 0)
    told = look(found)
    assert told["state"] == "notice"
    assert told["sentence"].startswith("Faster than planned: ")
    assert told["sentence"] == "Faster than planned: the step time is 80% below the prediction."
    assert told["reason"].endswith(" (±15%), so the run may skip a part of the step.")
    assert told["action"] == "open_breakdown"


def test_traffic_of_some_ranks_is_marked_as_partial() -> None:
    found = diagnosis({"dp": 2})
    took = look(found)["planned"]["step_s"]  # type: ignore[index]
    found._planned["sure"] = 0.45  # type: ignore[index]
    for number in range(1, 9):
        for rank in (0, 1):
            found.add(step(rank, number, took), 0)
    found.add(ITEM.validate_python({"kind": "verdict", "rank": 1, "time": NOW, "rows": []}), 0)
    found.end("succeeded")
    ending = " matches the prediction. Traffic on 1 of 2 ranks matches the plan."
    assert look(found)["sentence"].endswith(ending)


def test_traffic_mismatch_names_ranks() -> None:
    found = diagnosis({"dp": 2})
    row = {"phase": "step", "op": "all_reduce", "axis": "dp", "predicted_count": 5, "measured_count": 6}
    row |= {"predicted_bytes": 100, "measured_bytes": 120}
    found.add(ITEM.validate_python({"kind": "verdict", "rank": 1, "time": NOW, "rows": [row]}), 0)
    told = look(found)
    assert told["sentence"] == "Traffic mismatch: 20 B, 1 call on 1 of 1 rank."
    assert told["evidence"][0]["ranks"] == [1]


def test_failed_run_names_its_cause() -> None:
    found = diagnosis({"dp": 2})
    report = {"outcome": "failed", "reason": "rank 1 was killed by SIGKILL", "rank": 1, "signal": "SIGKILL"}
    found.end("failed", {**report, "log_tail": ["Traceback", "", "boom"]})
    told = look(found)
    assert told["state"] == "failed"
    assert told["sentence"] == "Failed: rank 1 was killed by signal 9 (SIGKILL)."
    assert told["reason"].startswith("The usual cause is the kernel's out-of-memory killer")
    assert told["next"] == "Read the log of rank 1, and check the kernel log of the host for out-of-memory kills."
    assert (told["action"], told["action_rank"]) == ("open_log", 1)
    assert [fact["text"] for fact in told["evidence"]] == ["Traceback", "boom"]


@pytest.mark.parametrize(
    ("name", "step", "words"),
    [("SIGKILL", 0, "signal 9 (SIGKILL)"), ("SIGSEGV", 7, "signal 11 (SIGSEGV) after step 7"), ("signal 40", 0, "")],
)
def test_killed_rank_names_its_signal(name: str, step: int, words: str) -> None:
    found, reason = diagnosis({"dp": 2}), f"rank 1 was killed by {name} after step {step}"
    found.end("failed", {"outcome": "failed", "reason": reason, "rank": 1, "signal": name, "log_tail": []})
    assert look(found)["sentence"] == f"Failed: rank 1 was killed by {words or name}."


@pytest.mark.parametrize(
    ("error", "sentence", "why", "following"),
    [
        (
            "gradient norm is nan at step 3; learning rate 10 (9.5 at this step), gradient clip off, precision fp32",
            "Diverged: the gradient norm is NaN at step 3.",
            "At this step, the learning rate is 9.5, gradient clipping is off, and the precision is fp32.",
            "Lower the learning rate, or set gradient clipping.",
        ),
        (
            "loss is nan and gradient norm is inf at step 9; learning rate 1 (1 at this step), gradient clip 0.5, "
            "precision bf16",
            "Diverged: the loss is NaN and the gradient norm is infinite at step 9.",
            "At this step, the learning rate is 1, gradients are clipped to 0.5, and the precision is bf16.",
            "Lower the learning rate, or check the training data.",
        ),
    ],
)
def test_run_that_stopped_at_nan_diverged(error: str, sentence: str, why: str, following: str) -> None:
    found = diagnosis({"dp": 2})
    report = {"outcome": "failed", "reason": f"rank 1 ended with exit code 1: {error}", "rank": 1, "exit_code": 1}
    found.end("failed", {**report, "log_tail": ["boom"]})
    told = look(found)
    assert (told["state"], told["sentence"], told["reason"]) == ("failed", sentence, why)
    assert (told["next"], told["action"]) == (following, "copy_job")
    assert [fact["text"] for fact in told["evidence"]] == [report["reason"], "boom"]


def test_failure_evidence_has_meaningful_log_lines() -> None:
    found = diagnosis({"dp": 2})
    tail = ["\x1b[31mTraceback\x1b[0m", "    boom()", "    ~~~~^^", "  ^^^^^^^", "\x1b]0;title\x07Error: \x08no"]
    reason = "rank 1 ended with exit code 1: \x1b[1mno\x1b[0m"
    found.end("failed", {"outcome": "failed", "reason": reason, "rank": 1, "log_tail": tail})
    told = look(found)
    assert [fact["text"] for fact in told["evidence"]] == ["Traceback", "    boom()", "Error: no"]
    assert (told["sentence"], told["reason"]) == ("Failed: rank 1, no.", "The rank ended with exit code 1.")


def test_failure_names_rank_host_exception_and_source_line() -> None:
    found = diagnosis({"dp": 2}, members=(HostRanks("host-a", 0, 1), HostRanks("host-b", 1, 1)))
    tail = [
        "[rank1]: Traceback (most recent call last):",
        '[rank1]:   File "/srv/scripts/train.py", line 12, in <module>',
        '[rank1]:   File "/opt/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1773, in forward',
        "[rank1]: ValueError: boom",
    ]
    reason = "rank 1 ended with exit code 1: ValueError: boom"
    found.end("failed", {"outcome": "failed", "reason": reason, "rank": 1, "exit_code": 1, "log_tail": tail})
    told = look(found)
    assert told["sentence"] == "Failed: rank 1 on host-b, ValueError: boom (train.py:12)."
    assert told["reason"] == "An uncaught exception ended the rank with exit code 1."
    assert (told["next"], told["action"], told["action_rank"]) == ("Read the log of rank 1.", "open_log", 1)


def test_out_of_memory_suggests_smaller_batch_or_other_layout() -> None:
    found, reason = diagnosis({"dp": 2}), "rank 0 ended with exit code 1: torch.OutOfMemoryError: CUDA out of memory."
    found.end("failed", {"outcome": "failed", "reason": reason, "rank": 0, "exit_code": 1, "log_tail": []})
    told = look(found)
    assert told["next"] == "Use a smaller micro-batch, or a layout that needs less memory per rank."
    assert told["action"] == "copy_job"


def test_long_reason_is_truncated_in_the_sentence_only() -> None:
    found, reason = diagnosis({"dp": 2}), "rank 1 ended with exit code 1: " + "long " * 80
    found.end("failed", {"outcome": "failed", "reason": reason.strip(), "rank": 1, "log_tail": ["boom"]})
    told = look(found)
    assert told["sentence"].endswith("…")
    assert len(told["sentence"]) < 220
    assert [fact["text"] for fact in told["evidence"]] == [reason.strip(), "boom"]


def test_run_stopped_with_its_host_suggests_retry() -> None:
    found = diagnosis({"dp": 2})
    found.end("failed", {"outcome": "failed", "reason": "the host was stopped", "exit_code": -15, "log_tail": ["x"]})
    assert (look(found)["next"], look(found)["action"]) == ("Retry the job when its host is back.", "retry")
    saved = {"kind": "checkpoint", "rank": 0, "time": NOW, "step": 40, "name": "job/1/step-00000040", "num_bytes": 1}
    found.add(ITEM.validate_python({**saved, "stall_s": 0.1, "save_s": 0.1, "problem": ""}), 0)
    assert look(found)["next"] == "Retry the job when its host is back, to resume after step 40."


def test_log_line_of_a_rank_is_not_taken_for_a_stopped_host() -> None:
    found, reason = diagnosis({"dp": 2}), "rank 1 ended with exit code 1: RuntimeError: the host was stopped"
    found.end("failed", {"outcome": "failed", "reason": reason, "rank": 1, "exit_code": 1, "log_tail": ["x"]})
    assert look(found)["next"] == "Read the log of rank 1."


@pytest.mark.parametrize(
    ("reason", "sentence", "why"),
    [
        (
            "the supervisor died without an exit report; its ranks were ended with it",
            "Lost: the supervisor died without an exit report.",
            "Its ranks were ended with it.",
        ),
        ("host small was rebooted", "Lost: host small was rebooted.", ""),
        ("", "Lost: the host reported no reason.", ""),
    ],
)
def test_lost_run_names_the_known_reason(reason: str, sentence: str, why: str) -> None:
    found = diagnosis({"dp": 2})
    found.end("lost", {"outcome": "lost", "reason": reason} if reason else None)
    told = look(found)
    assert (told["state"], told["sentence"], told["reason"]) == ("failed", sentence, why)
    assert (told["next"], told["action"]) == ("Check the host, then retry the job.", "retry")


def test_lost_run_with_checkpoint_can_resume_on_fewer_hosts() -> None:
    found = diagnosis({"dp": 2}, members=(HostRanks("host-a", 0, 1), HostRanks("host-b", 1, 1)))
    saved = {"kind": "checkpoint", "rank": 0, "time": NOW, "step": 40, "name": "job/1/step-00000040", "num_bytes": 1}
    found.add(ITEM.validate_python({**saved, "stall_s": 0.1, "save_s": 0.1, "problem": ""}), 0)
    found.end("lost", {"outcome": "lost", "reason": "host host-b was rebooted"})
    assert look(found)["action"] == "resume_smaller"


@pytest.mark.parametrize(
    ("outcome", "sentence", "why"),
    [
        ("cancelled", "Not checked: the job was cancelled before its first step.", "Cancelled on request."),
        ("succeeded", "Not checked: the run reported no step.", "Nothing was measured."),
    ],
)
def test_run_without_steps_is_not_checked(outcome: str, sentence: str, why: str) -> None:
    found = diagnosis({"dp": 2})
    found.end(outcome, {"outcome": outcome, "reason": "cancelled on request"})
    told = look(found)
    assert (told["state"], told["over"]) == ("starting", True)
    assert (told["sentence"], told["reason"]) == (sentence, why)


def script() -> Diagnosis:
    spec = {"kind": "script", "layout": {"dp": 2}, "script": {"path": "train.py"}}
    return Diagnosis(PlannedRun(parse_spec(spec).model_dump(mode="json"), {}, 2))


def counts(steps: int = 0, sent: int = 0) -> list[Any]:
    """Return items of a script's meter."""
    told: list[dict[str, Any]] = [{"kind": "phase", "rank": 0, "time": NOW, "phase": "step"}]
    told += [{**told[0], "steps": steps}] if steps else []
    cell = {"phase": "step", "axis": "world", "op": "all_reduce", "group_size": 2, "count": sent, "completed": sent}
    cells = [{**cell, "payload_bytes": 8, "algorithmic_bytes": 8, "busy_s": 0.0}]
    told += [{"kind": "traffic", "rank": 0, "time": NOW, "cells": cells, "dropped": 0}] if sent else []
    return [ITEM.validate_python(item) for item in told]


@pytest.mark.parametrize(
    ("outcome", "told", "sentence", "why"),
    [
        (None, counts(30, 60), "Not checked: the script has run 30 optimizer steps so far.", SCRIPT_REASON),
        (None, counts(sent=60), "Not checked: the script has run no optimizer step so far.", SCRIPT_REASON),
        ("succeeded", counts(30, 60), "Not checked: the script ended after 30 optimizer steps.", SCRIPT_REASON),
        ("succeeded", counts(1), "Not checked: the script ended after 1 optimizer step.", SCRIPT_REASON),
        ("succeeded", counts(sent=60), "Not checked: the script ended after no optimizer step.", SCRIPT_REASON),
        ("succeeded", counts(), "Not checked: the run reported no step.", "Nothing was measured."),
        (
            "cancelled",
            counts(30),
            "Not checked: the script was cancelled after 30 optimizer steps.",
            "Cancelled on request.",
        ),
    ],
)
def test_script_reports_counted_steps(outcome: str | None, told: list[Any], sentence: str, why: str) -> None:
    found = script()
    for item in told:
        found.add(item, 0)
    if outcome is not None:
        found.end(outcome, {"outcome": outcome, "reason": "cancelled on request"})
    said = look(found)
    assert (said["sentence"], said["reason"]) == (sentence, why)


def test_script_steps_come_from_the_exit_report() -> None:
    found = script()
    found.add(counts(30)[1], 0)
    found.end("succeeded", {"outcome": "succeeded", "reason": "", "summary": {"steps": 31}})
    assert look(found)["sentence"] == "Not checked: the script ended after 31 optimizer steps."


def test_short_run_is_reported_after_its_end() -> None:
    """A long run was reported as too short during its first three steps."""
    found = diagnosis({"dp": 2})
    for number in (1, 2, 3):
        for rank in (0, 1):
            found.add(step(rank, number), 0)
    assert look(found)["sentence"] == "Not checked: only warm-up steps have ended so far."
    found.end("succeeded", {"outcome": "succeeded", "reason": "finished after step 3"})
    told = look(found)
    assert told["sentence"] == "Not checked: the run ended after 3 steps."
    assert told["reason"] == "The first 3 steps are warm-up and are not compared with the plan."


def test_cancelled_run_reports_steps_and_reason() -> None:
    """The step count is that of rank 0, as in the summary. Other ranks may have completed one step more."""
    found = diagnosis({"dp": 2})
    for number in range(1, 9):
        found.add(step(0, number), 0)
        found.add(step(1, number), 0)
    found.add(step(1, 9), 0)
    found.end("cancelled", {"outcome": "cancelled", "reason": "cancelled on request"})
    told = look(found)
    assert (told["state"], told["sentence"]) == ("well", "Not checked: the job was cancelled after 8 steps.")
    assert told["reason"] == "Cancelled on request."


def test_empty_launcher_log_is_not_suggested() -> None:
    found = diagnosis({"dp": 1})
    report = {"outcome": "failed", "reason": "no room on small", "rank": None, "exit_code": None, "log_tail": []}
    found.end("failed", report)
    told = look(found)
    assert (told["sentence"], told["reason"], told["next"]) == ("Failed: no room on small.", "", "")


def test_reports_non_finite_and_growing_losses() -> None:
    found = diagnosis({"dp": 1})
    for number in range(1, 80):
        found.add(step(0, number, loss=5.0 - number / 40 if number < 40 else 4.0 + number / 10), 0)
    assert [trouble["kind"] for trouble in look(found)["training"]] == ["diverged"]
    found.add(step(0, 80, loss=None, not_finite="loss is nan"), 0)
    assert {trouble["kind"] for trouble in look(found)["training"]} == {"diverged", "not finite"}


def test_past_problems_are_listed_but_not_the_verdict() -> None:
    """One infinite gradient norm, ten high losses, and a failed checkpoint dominated the verdict of a healthy run."""
    found = diagnosis({"dp": 1})
    checkpoint = {"kind": "checkpoint", "rank": 0, "time": NOW, "num_bytes": 1, "stall_s": 0.1, "save_s": 0.1}
    full = {"name": None, "problem": "no space left"}
    for number in range(1, 31):
        found.add(step(0, number, loss=3.0), 0)
    found.add(step(0, 31, loss=3.0, grad_norm=None, not_finite="gradient norm is inf"), 0)
    assert look(found)["sentence"] == "Diverged: the gradient norm is infinite at step 31."
    for number in range(32, 42):
        found.add(step(0, number, loss=9.0), 0)
    found.add(ITEM.validate_python({**checkpoint, "step": 41, **full}), 0)
    assert look(found)["state"] == "failed"
    for number in range(42, 70):
        found.add(step(0, number, loss=3.0), 0)
    assert look(found)["sentence"] == "Failed: the checkpoint after step 41 could not be written."
    found.add(ITEM.validate_python({**checkpoint, "step": 60, "name": "job/1/step-00000060", "problem": ""}), 0)
    told = look(found)
    assert told["state"] == "well"
    assert {trouble["kind"] for trouble in told["training"]} == {"not finite", "diverged", "checkpoint failed"}


def test_noisy_loss_does_not_diverge() -> None:
    found = diagnosis({"dp": 1})
    for number in range(1, 200):
        found.add(step(0, number, loss=3.0 + (number * 7919 % 13) / 10), 0)
    assert look(found)["training"] == []


@pytest.mark.parametrize("kind", ["lab", "calibrate", "dry_run"])
def test_jobs_without_steps_have_no_verdict(kind: str) -> None:
    assert not Diagnosis(PlannedRun({"kind": kind}, {}, 2)).has_verdict
    assert Diagnosis(PlannedRun({"kind": "script"}, {}, 2)).has_verdict


def test_long_stack_keeps_its_innermost_lines() -> None:
    """A character takes up to 12 bytes, so 30 lines of 300 characters exceeded the limit."""
    found = Diagnosis(PlannedRun({"kind": "script", "script": "x"}, {}, 2))
    group = {"group": {"axis": "world", "ranks": [0, 1], "nth": 0}, "issued": 1, "ended": 0, "op": "all_reduce"}
    for rank, groups in ((0, [group]), (1, [])):
        found.add(ITEM.validate_python({"kind": "phase", "rank": rank, "time": NOW, "phase": "step"}), 0)
        still = {"rank": rank, "time": NOW + 400, "step": 0, "phase": "step", "still": 400.0, "groups": groups}
        stack = ["\N{GRINNING FACE}" * 300] * 59 + ["inner"]
        found.add(ITEM.validate_python({"kind": "standing", **still, "stack": stack}), 0)
    told = look(found, NOW + 401)
    assert len(json.dumps(told)) <= MAX_VERDICT_BYTES
    assert told["hang"] is not None
    assert told["hang"]["stack"][-1] == "inner"


def test_verdict_of_many_ranks_is_bounded() -> None:
    """64 ranks are late by different times in groups of 2 and 64, and then all ranks hang."""
    world = tuple(range(64))
    found, player = diagnosis({"dp": 64}, {"global_batch": 64}), Player(64)
    acts: dict[int, list[Act]] = {
        rank: [
            Does("forward", 0.4 + rank / 1000),
            *(Meets("tp", (rank // 2 * 2, rank // 2 * 2 + 1), op) for op in ("all_reduce", "all_gather", "broadcast")),
            Meets("dp", world),
        ]
        for rank in world
    }
    for _ in range(20):
        before = player.now
        for rank, item in enumerate(player.play(acts)):
            found.add(item, 0)
            found.add(step(rank, player.step, player.now - before), 0)
    late = NOW + player.now + 60
    group = {"group": {"axis": "dp", "ranks": list(world), "nth": 0}, "issued": 21, "ended": 20, "op": "all_reduce"}
    for rank in world[1:]:
        still = {"rank": rank, "time": late, "step": player.step, "phase": "step", "still": 60.0, "groups": [group]}
        found.add(ITEM.validate_python({"kind": "standing", **still, "stack": ["x" * 900] * 60}), 0)
    told = look(found, late)
    assert told["hang"] is not None
    assert told["hang"]["ranks"] == [0]
    assert told["waits"]
    assert MAX_VERDICT_BYTES / 4 < len(json.dumps(told)) <= MAX_VERDICT_BYTES


def test_checkpoint_cost_per_step_is_constant() -> None:
    """The sum of the last 64 checkpoints was divided by all steps."""
    steps = StepTimings(PlannedRun({}, {}, 1))
    for number in range(10, 6401, 10):
        saved = {
            "kind": "checkpoint",
            "rank": 0,
            "time": NOW,
            "step": number,
            "name": "x/1/step-00000001",
            "num_bytes": 1,
        }
        steps.add_checkpoint({**saved, "stall_s": 1.0, "save_s": 1.0, "problem": ""})  # type: ignore[typeddict-item]
        steps.ran = number
        assert steps.get_checkpoint_s() == pytest.approx(0.1)
