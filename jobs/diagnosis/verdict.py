"""Verdicts of runs without a known problem, and of runs that are not checked yet."""

from __future__ import annotations

from contracts.telemetry.words import FIRST_STEPS
from jobs.diagnosis.course.ending import Ending
from jobs.diagnosis.course.script import Script
from jobs.diagnosis.course.start import Start
from jobs.diagnosis.course.steps import Steps
from jobs.diagnosis.findings import Finding, capital, evidence, full_sentence, percent, seconds
from jobs.diagnosis.run import Run
from jobs.diagnosis.shapes import Action, StepParts
from planner.cost.correction import holds
from planner.facts.words import counted

LEAST = 0.01  # relative difference of the step above which the verdict names the part that grew
NO_DIFFERENCE = 0.0005  # relative difference of the step that counts as none
LARGE = 0.1  # fraction of a step from which the verdict names a part
UNCALIBRATED = 0.5  # weight of a difference from a data-sheet prediction
NO_REASON = "A user, a time limit, or an idle limit ended the run."
PHASES = {
    "": "waiting for the host",
    "claimed": "accepted by the host",
    "spawned": "importing PyTorch",
    "imported": "connecting ranks (rendezvous)",
    "met": "building the model",
    "built": "running the first step",
    "first step": "running the first steps",
}


def healthy(
    run: Run,
    steps: Steps,
    start: Start,
    script: Script,
    ending: Ending,
    planned: StepParts | None,
    measured: StepParts | None,
) -> Finding:
    """Return the finding of a run without a known problem."""
    ended_by = full_sentence(ending.reason) or NO_REASON
    if not steps.ran and (seen := script.finding(ending.outcome, ended_by)) is not None:
        return seen
    if ending.outcome is not None and not steps.ran:
        return _without_steps(ending, ended_by)
    if ending.outcome == "cancelled":
        completed = steps.of_rank(0) or steps.last  # as in the summary: a signal ends ranks at different steps
        sentence = f"Not checked: the job was cancelled after {counted(completed, 'step')}."
        return Finding("well", 0.0, sentence, ended_by, "")
    if measured is None:
        return _unmeasured(steps, start, ending)
    if planned is None or not planned["step_s"]:
        reason = "This run has no predicted step time."
        return Finding("well", 0.0, f"Not checked: {_pace(measured)}.", reason, "")
    calibrated = run.estimate["time"].get("basis") == "calibrated"
    return _compared_with_plan(measured, planned, ending, calibrated=calibrated)


def unheard(silence: str, before: Finding) -> Finding:
    """Return the finding of a run whose host has no contact. `before`: the finding without this problem."""
    following = "Check the host and its network. Training may still continue on the host."
    reason = f"Last verdict: {before.sentence}"
    return Finding("notice", 0.0, full_sentence(f"Not checked: {silence}"), reason, following, before.evidence)


def _without_steps(ending: Ending, ended_by: str) -> Finding:
    if ending.outcome == "cancelled":
        return Finding("starting", 0.0, "Not checked: the job was cancelled before its first step.", ended_by, "")
    return Finding("starting", 0.0, "Not checked: the run reported no step.", "Nothing was measured.", "")


def _unmeasured(steps: Steps, start: Start, ending: Ending) -> Finding:
    if ending.outcome is None and not steps.ran:
        return Finding("starting", 0.0, f"Starting: {PHASES[start.reached]}.", "The first step has not ended yet.", "")
    sentence = "Not checked: only warm-up steps have ended so far."
    if ending.outcome is not None:
        sentence = f"Not checked: the run ended after {counted(steps.ran, 'step')}."
    reason = f"The first {FIRST_STEPS} steps are warm-up and are not compared with the plan."
    return Finding("well", 0.0, sentence, reason, "")


def _compared_with_plan(measured: StepParts, planned: StepParts, ending: Ending, *, calibrated: bool) -> Finding:
    margin = planned["sure"]
    off = measured["step_s"] / planned["step_s"] - 1
    pace, traffic = _pace(measured), f" Traffic difference: {ending.apart_words}." if ending.apart_words else ""
    predicted = f"The predicted step time of {seconds(planned['step_s'])} has a margin of error of {_margin(margin)}."
    facts = (
        evidence(f"{pace}, {seconds(planned['step_s'])} predicted"),
        evidence(f"margin of error of the prediction: {_margin(margin)}"),
    )
    if off > margin:
        sentence = f"Slower than planned: {pace}, {_difference(off)}." + _excess(measured, planned) + traffic
        following = "Compare each part of the step with its prediction under Step time breakdown."
        action: Action = "find_faster"
        if not calibrated:
            following, action = "Calibrate the host for a more accurate prediction.", "calibrate"
        weight = (1.0 if calibrated else UNCALIBRATED) * off / (1 + off)
        return Finding("notice", weight, sentence, predicted, following, facts, action)
    if not holds(margin, measured["step_s"], planned["step_s"]):
        sentence = f"Faster than planned: {pace}, {_difference(off)}." + traffic
        following = "Check under Step time breakdown that the run computes every part of the step."
        return Finding("notice", 0.0, sentence, predicted, following, facts)
    if margin > 1:
        sentence = f"Not checked: {pace}{_mostly(measured)}.{traffic}"
        reason = f"The margin of error of the prediction is {_margin(margin)}, too large to judge the step time."
        if calibrated:
            return Finding(
                "well", 0.0, sentence, reason, "Run more jobs on the host to improve its predictions.", facts
            )
        return Finding("well", 0.0, sentence, reason, "Calibrate the host.", facts, "calibrate")
    excess = _excess(measured, planned) if off > LEAST else ""
    return Finding("well", 0.0, f"On plan: {pace}, {_difference(off)}." + excess + traffic, predicted, "", facts)


def _pace(measured: StepParts) -> str:
    """Return '0.3 s per step (median of the last 64)'."""
    steps = measured["steps"]
    over = "one step" if steps == 1 else f"median of the last {steps}"
    return f"{seconds(measured['step_s'])} per step ({over})"


def _difference(off: float) -> str:
    """Return '12% slower than predicted' for a relative difference from the prediction."""
    if abs(off) < NO_DIFFERENCE:
        return "as fast as predicted"
    if off > 1:
        return f"{1 + off:.1f} times the prediction"
    return f"{percent(abs(off))} {'more' if off > 0 else 'less'} than predicted"


def _margin(share: float) -> str:
    """Return '15%', or 'a factor of 4.3' for a margin above 100%."""
    return f"a factor of {1 + share:.2g}" if share > 1 else percent(share)


def _mostly(measured: StepParts) -> str:
    """Return the words for the largest part except compute, or an empty text if that part is small."""
    apart = [part for part in measured["parts"] if part["kind"] not in ("compute", "hidden")]
    most = max(apart, key=lambda part: part["seconds"], default=None)
    if most is None or most["seconds"] < LARGE * measured["step_s"]:
        return ""
    name = most["name"]
    what = f"Exposed {name} communication" if most["kind"] == "exposed" else f"{name[:1].upper()}{name[1:]}"
    return f". {what} takes {percent(most['seconds'] / measured['step_s'])} of each step"


def _excess(measured: StepParts, planned: StepParts) -> str:
    """Return ' Exposed dp is 80% of the extra time.' for the part that grew most compared with the plan."""
    had = {part["name"]: part["seconds"] for part in planned["parts"] if part["kind"] != "hidden"}
    took = {part["name"]: part["seconds"] for part in measured["parts"] if part["kind"] != "hidden"}
    if len(took) < 2:
        return ""
    more = {name: took.get(name, 0.0) - had.get(name, 0.0) for name in {*had, *took}}
    name = max(more, key=lambda part: more[part])
    share = more[name] / (measured["step_s"] - planned["step_s"])
    exposed = any(part["name"] == name and part["kind"] == "exposed" for part in measured["parts"])
    if share <= 0:
        return ""
    return f" {f'Exposed {name}' if exposed else capital(name)} is {percent(min(1.0, share))} of the extra time."
