"""What is said of a run that nothing ails, or that there is little to say of yet."""

from __future__ import annotations

from jobs.diagnosis.course.ending import Ending
from jobs.diagnosis.course.script import Script
from jobs.diagnosis.course.start import Start
from jobs.diagnosis.course.steps import Steps
from jobs.diagnosis.findings import Finding, evidence, percent, seconds
from jobs.diagnosis.run import Run
from jobs.diagnosis.shapes import StepParts
from planner.cost.correction import holds
from planner.facts.words import counted

LEAST = 0.01  # of the step: parts that differ by less from the plan are not named
NO_DIFFERENCE = 0.0005  # of the step: told as none
LARGE = 0.1  # of a step: a part that is worth a word by itself
UNCALIBRATED = 0.5  # what is slower than a data sheet promises weighs less than what can be changed
SOMEBODY = "somebody or a limit ended it"
NOT_YET = {
    "": "Nothing was heard of it yet",
    "claimed": "Its host has taken it",
    "spawned": "Its processes start",
    "imported": "Its ranks meet",
    "met": "Its ranks build the model",
    "built": "Its first step runs",
    "first step": "Its first steps run",
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
    """A run that nothing is known to be wrong with."""
    if not steps.ran and (seen := script.finding(ending.outcome, ending.reason or SOMEBODY)) is not None:
        return seen
    if ending.outcome is not None and not steps.ran:
        return _unobserved(ending)
    if ending.outcome == "cancelled":
        told = steps.of_rank(0) or steps.last  # the summary's; a signal ends no two ranks at once
        return Finding("well", 0.0, f"Cancelled after {counted(told, 'step')}", ending.reason or SOMEBODY, "")
    if measured is None:
        if ending.outcome is not None or steps.ran:
            text = f"{counted(steps.ran, 'step')}, of which the first say nothing of the others"
            sentence = "Not measured yet" if ending.outcome is None else "Too short to be measured"
            return Finding("well", 0.0, sentence, text, "")
        return Finding("starting", 0.0, NOT_YET[start.reached], "no step has ended yet", "")
    if planned is None or not planned["step_s"]:
        return Finding("well", 0.0, f"{_course(ending)}: {_pace(measured)}", "there is no plan to compare it with", "")
    sure = 1.0 if run.estimate["time"].get("basis") == "calibrated" else UNCALIBRATED
    return _beside_plan(measured, planned, ending, sure)


def unheard(silence: str, told: Finding) -> Finding:
    """Of a run that its host says nothing of: how it runs now nobody knows. `told`: what would be said of it else."""
    reason = f"what was last told of it: {told.sentence}"
    return Finding(
        "notice", 0.0, f"Not heard: {silence}", reason, "look at the host; training may well go on there", told.evidence
    )


def _unobserved(ending: Ending) -> Finding:
    """It ended as it started: neither well nor ill."""
    if ending.outcome == "cancelled":
        sentence = "Cancelled before its first step: nothing was measured"
        return Finding("starting", 0.0, sentence, ending.reason or SOMEBODY, "")
    return Finding("starting", 0.0, "Nothing was measured", "it told of no step", "")


def _beside_plan(measured: StepParts, planned: StepParts, ending: Ending, sure: float) -> Finding:
    off = measured["step_s"] / planned["step_s"] - 1
    slower = f"{percent(abs(off))} {'slower' if off > 0 else 'faster'} than predicted"
    if abs(off) < NO_DIFFERENCE:
        slower = "as fast as predicted"
    if off > 1:
        slower = f"{1 + off:.1f} times as long as predicted"
    traffic = f"{ending.apart_words}, " if ending.apart_words else ""
    where = _where(measured, planned) if off > LEAST else ""
    facts = (
        evidence(f"{_pace(measured)}, {seconds(planned['step_s'])} predicted"),
        evidence(f"the prediction may be {_sureness(planned['sure'])} off"),
    )
    if off > planned["sure"]:
        sentence = f"Slower than planned: {traffic}{slower}{where}"
        reason = f"more than the prediction may be off, {_sureness(planned['sure'])}"
        following = "see the parts of the step beside the plan"
        if sure < 1:
            following += "; calibrate the host: its speed is a data sheet's"
        return Finding("notice", sure * off / (1 + off), sentence, reason, following, facts)
    if not holds(planned["sure"], measured["step_s"], planned["step_s"]):
        sentence = f"Faster than planned: {traffic}{slower}"
        reason = f"more than the prediction may be off, {_sureness(planned['sure'])}"
        following = "see the parts of the step beside the plan: does it compute all of it?"
        return Finding("notice", 0.0, sentence, reason, following, facts)
    if planned["sure"] > 1:
        sentence = f"{_course(ending)}: {traffic}{_pace(measured)}{_mostly(measured)}"
        reason = f"the prediction may be {_sureness(planned['sure'])} off here, so that it says nothing of the speed"
        return Finding("well", 0.0, sentence, reason, "calibrate the host, or let more runs end on it", facts)
    reason = f"within what the prediction may be off, {percent(planned['sure'])}"
    return Finding("well", 0.0, f"As planned: {traffic}{slower}{where}", reason, "", facts)


def _pace(measured: StepParts) -> str:
    """'0.3 s a step (mean of the last 64)': the page has other means beside it, which say over which steps too."""
    steps = measured["steps"]
    over = "of one step" if steps == 1 else f"mean of the last {steps}"
    return f"{seconds(measured['step_s'])} a step ({over})"


def _course(ending: Ending) -> str:
    return "Runs" if ending.outcome is None else "Ended"


def _sureness(share: float) -> str:
    return f"{1 + share:.2g} times" if share > 1 else percent(share)


def _mostly(measured: StepParts) -> str:
    """', 48% of it exposed tp': the largest part but compute, where it is large."""
    apart = [part for part in measured["parts"] if part["kind"] not in ("compute", "hidden")]
    most = max(apart, key=lambda part: part["seconds"], default=None)
    if most is None or most["seconds"] < LARGE * measured["step_s"]:
        return ""
    what = f"exposed {most['name']}" if most["kind"] == "exposed" else most["name"]
    return f", {percent(most['seconds'] / measured['step_s'])} of it {what}"


def _where(measured: StepParts, planned: StepParts) -> str:
    """', all of the excess exposed dp': the part that grew most beside the plan, and what of the difference it is."""
    had = {part["name"]: part["seconds"] for part in planned["parts"] if part["kind"] != "hidden"}
    took = {part["name"]: part["seconds"] for part in measured["parts"] if part["kind"] != "hidden"}
    if len(took) < 2:
        return ""
    more = {name: took.get(name, 0.0) - had.get(name, 0.0) for name in {*had, *took}}
    name = max(more, key=lambda part: more[part])
    share = more[name] / (measured["step_s"] - planned["step_s"])
    exposed = any(part["name"] == name and part["kind"] == "exposed" for part in measured["parts"])
    what = f"exposed {name}" if exposed else name
    if share >= 1 - 1e-9:
        return f", all of the excess {what}"
    return f", {percent(share)} of the excess {what}" if share > 0 else ""
