"""Make verdicts from the items of a run: the sentence, the parts of a step, and the stages of the start."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jobs.core.verdict_schema import MAX_VERDICT_BYTES
from jobs.runs.diagnosis import Diagnosis, PlannedRun
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
    sentence = "No problem found. Exposed dp communication takes 20% of each step."
    assert running["sentence"] == sentence, "the page shows the step time of a running job, live"
    assert (live["step_s"], live["steps"]) == (0.1, 50)
    assert sum(part["seconds"] for part in live["parts"] if part["kind"] != "hidden") == pytest.approx(0.1)
    found.end("succeeded")
    ended = look(found)
    assert ended["measured"] is not None
    assert (ended["measured"]["step_s"], ended["measured"]["steps"]) == (0.1, 61)
    assert ended["sentence"] == sentence.replace("found.", "found. The step time is 100 ms.")
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
    assert told["sentence"] == "No problem found. Exposed dp communication takes 40% of each step."
    assert told["evidence"][0]["text"].startswith("predicted step time: ")
    assert told["evidence"][0]["text"].endswith(" (within a factor of 4.3)")
    assert told["evidence"][1]["text"].endswith(" (median of the last 5 steps)")
    assert told["reason"].startswith("The step time is not checked, because its prediction, ")
    assert told["reason"].endswith(" (within a factor of 4.3), is too inaccurate.")
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
    assert told["sentence"] == "No problem found. The step time is 725 ms. Traffic matches the plan."
    assert told["reason"].endswith(" (within a factor of 10), is too inaccurate.")
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
        (None, counts(30, 60), "Not checked: the script has run 30 steps so far.", SCRIPT_REASON),
        (None, counts(sent=60), "Not checked: the script has run no step so far.", SCRIPT_REASON),
        ("succeeded", counts(30, 60), "Not checked: the script ended after 30 steps.", SCRIPT_REASON),
        ("succeeded", counts(1), "Not checked: the script ended after 1 step.", SCRIPT_REASON),
        ("succeeded", counts(sent=60), "Not checked: the script ended without a step.", SCRIPT_REASON),
        ("succeeded", counts(), "Not checked: the run reported no step.", "Nothing was measured."),
        (
            "cancelled",
            counts(30),
            "Not checked: the script was cancelled after 30 steps.",
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


def test_script_with_step_times_names_its_largest_part() -> None:
    found = script()
    for number in range(2, 12):
        for rank in range(2):
            parts: Any = {"data": 0.03, "exposed": {"world": 0.01}, "hidden": {}}
            found.add(step(rank, number, parts=parts, steps=None, tokens=None, loss=None, learning_rate=None), 0)
    found.end("succeeded", {"outcome": "succeeded", "reason": ""})
    verdict = look(found)
    assert verdict["sentence"] == "No problem found. The step time is 100 ms. Data takes 30% of each step."
    assert verdict["reason"] == "The step time is not checked, because the verdict of a script uses no prediction."
    assert verdict["next"] == "Increase `num_workers` or `prefetch_factor` of the DataLoader."
    assert verdict["measured"] is not None
    assert {part["name"]: round(part["seconds"], 3) for part in verdict["measured"]["parts"]} == {
        "data": 0.03,
        "compute": 0.06,
        "world": 0.01,
    }


def test_script_steps_come_from_the_exit_report() -> None:
    found = script()
    found.add(counts(30)[1], 0)
    found.end("succeeded", {"outcome": "succeeded", "reason": "", "summary": {"steps": 31}})
    assert look(found)["sentence"] == "Not checked: the script ended after 31 steps."


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
