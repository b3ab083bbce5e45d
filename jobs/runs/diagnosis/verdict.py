"""Verdicts of runs without a known problem, and of runs that are not checked yet."""

from __future__ import annotations

from contracts.telemetry.vocabulary import WARMUP_STEPS
from jobs.core.verdict_schema import Action, Evidence, StepParts
from jobs.runs.diagnosis.course.ending import Ending
from jobs.runs.diagnosis.course.script import Script
from jobs.runs.diagnosis.course.start import Start
from jobs.runs.diagnosis.course.steps import Steps
from jobs.runs.diagnosis.findings import Finding, capital, evidence, full_sentence, percent, seconds
from jobs.runs.diagnosis.run import Run
from planner.cost.correction import holds, sureness
from planner.facts.validation import format_count

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
        sentence = f"Not checked: the job was cancelled after {format_count(completed, 'step')}."
        return Finding("well", 0.0, sentence, ended_by, "")
    if measured is None:
        return _unmeasured(steps, start, ending)
    if planned is None or not planned["step_s"]:
        reason = "This run has no predicted step time."
        sentence = _sentence("Not checked", measured, "", ending, ending.traffic_words)
        return Finding("well", 0.0, sentence, reason, "", (_measured_fact(measured, steps),))
    calibrated = run.estimate["time"].get("basis") == "calibrated"
    return _compared_with_plan(measured, planned, steps, ending, calibrated=calibrated)


def unheard(silence: str, before: Finding) -> Finding:
    """Return the finding of a run whose host has no contact. `before`: the finding without this problem."""
    following = "Check the host and the network of the host. Training may still continue on the host."
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
        sentence = f"Not checked: the run ended after {format_count(steps.ran, 'step')}."
    reason = f"The first {WARMUP_STEPS} steps are warm-up and are not compared with the plan."
    return Finding("well", 0.0, sentence, reason, "")


def _compared_with_plan(
    measured: StepParts, planned: StepParts, steps: Steps, ending: Ending, *, calibrated: bool
) -> Finding:
    margin, over = planned["sure"], ending.outcome is not None
    off = measured["step_s"] / planned["step_s"] - 1
    traffic, difference = ending.traffic_words, _difference(off)
    predicted = f"{seconds(planned['step_s'])} ({sureness(margin)})"
    reason = f"The predicted step time is {predicted}."
    facts: tuple[Evidence, ...] = (
        evidence(f"predicted step time: {predicted}"),
        _measured_fact(measured, steps),
    )
    if off > margin:
        sentence = _sentence("Slower than planned", measured, difference, ending, _excess(measured, planned), traffic)
        following, action = _after_slow(calibrated=calibrated, over=over)
        weight = (1.0 if calibrated else UNCALIBRATED) * off / (1 + off)
        return Finding("notice", weight, sentence, reason, following, facts, action)
    if not holds(margin, measured["step_s"], planned["step_s"]):
        sentence = _sentence("Faster than planned", measured, difference, ending, traffic)
        reason = f"The predicted step time is {predicted}, so the run may skip a part of the step."
        following = "Check under Step time breakdown that the run computes every part of the step."
        return Finding("notice", 0.0, sentence, reason, following, facts, "open_breakdown")
    if margin > 1:
        largest = _largest(measured)
        if largest and traffic:
            facts = (*facts, evidence(largest))
        number = f" ({seconds(measured['step_s'])})" if over else ""
        sentence = " ".join(filter(None, (f"Not checked: step time{number}.", traffic or largest)))
        reason = f"The predicted step time, {predicted}, is too inaccurate for a check."
        if calibrated:
            following = "Run more jobs on the host to improve its predictions."
            return Finding("well", 0.0, sentence, reason, following, facts)
        return Finding("well", 0.0, sentence, reason, "Calibrate the host.", facts, "calibrate")
    excess = _excess(measured, planned) if off > LEAST else ""
    return Finding("well", 0.0, _sentence("On plan", measured, difference, ending, excess, traffic), reason, "", facts)


def _after_slow(*, calibrated: bool, over: bool) -> tuple[str, Action]:
    """Return the next step after a slow run as a sentence and as an action."""
    if not calibrated:
        return "Calibrate the host for a more accurate prediction.", "calibrate"
    if over:
        return "Find layouts that are faster than the layout of this run.", "find_faster"
    return "Compare each part of the step with its prediction under Step time breakdown.", "open_breakdown"


def _sentence(state: str, measured: StepParts, compared: str, ending: Ending, *more: str) -> str:
    """Return 'On plan: the step time of 0.3 s is 4% above the prediction.', followed by more sentences.

    The step time of a running job changes with each step, and the page shows it live. So the sentence includes the step
    time only after the end.
    """
    of = f" of {seconds(measured['step_s'])}" if ending.outcome is not None else ""
    return " ".join((f"{state}: the step time{of} {compared}.", *filter(None, more)))


def _measured_fact(measured: StepParts, steps: Steps) -> Evidence:
    number = measured["steps"]
    over = "one step" if number == 1 else f"median of the last {number:,} steps"
    return evidence(f"measured step time after step {steps.last:,}: {seconds(measured['step_s'])} ({over})")


def _difference(off: float) -> str:
    """Return 'is 12% above the prediction' for a relative difference from the prediction."""
    if abs(off) < NO_DIFFERENCE:
        return "matches the prediction"
    if off > 1:
        return f"is {1 + off:.1f} times the prediction"
    return f"is {percent(abs(off))} {'above' if off > 0 else 'below'} the prediction"


def _largest(measured: StepParts) -> str:
    """Return a sentence about the largest part except compute, or an empty text if that part is small."""
    apart = [part for part in measured["parts"] if part["kind"] not in ("compute", "hidden")]
    most = max(apart, key=lambda part: part["seconds"], default=None)
    if most is None or most["seconds"] < LARGE * measured["step_s"]:
        return ""
    name = most["name"]
    what = f"Exposed {name} communication" if most["kind"] == "exposed" else f"{name[:1].upper()}{name[1:]}"
    return f"{what} takes {percent(most['seconds'] / measured['step_s'])} of each step."


def _excess(measured: StepParts, planned: StepParts) -> str:
    """Return 'Exposed dp is 80% of the extra step time.' for the part that grew most compared with the plan."""
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
    return f"{f'Exposed {name}' if exposed else capital(name)} is {percent(min(1.0, share))} of the extra step time."
