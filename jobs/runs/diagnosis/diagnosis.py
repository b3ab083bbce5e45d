"""Diagnose an attempt from the items that its members send, and compare it with its plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from contracts.telemetry.batches import ClockOffset, Item
from contracts.telemetry.items import WARMUP_STEPS
from jobs.core.verdict_schema import MAX_EVIDENCE, Action, Evidence, StepPart, StepParts, VerdictPayload
from jobs.runs.diagnosis.bottlenecks import BubbleFinder, find_slow_links, find_stragglers, make_straggler
from jobs.runs.diagnosis.collective_timing import summarize_speeds
from jobs.runs.diagnosis.failures import RunEnd, TrainingHealth
from jobs.runs.diagnosis.findings import (
    RunFinding,
    capitalize,
    format_percent,
    format_seconds,
    make_evidence,
    make_sentence,
    shrink_to_limit,
    sort_by_severity,
    truncate,
)
from jobs.runs.diagnosis.hangs import HangDetector
from jobs.runs.diagnosis.last_state import explain_failure
from jobs.runs.diagnosis.planned_run import PlannedRun, get_planned_parts
from jobs.runs.diagnosis.rank_reports import ProcessStates, RankProgress, ScriptSteps, StartStages, StepTimings
from jobs.runs.diagnosis.step_window import StepWindow
from jobs.runs.diagnosis.traced_step import HostClocks
from planner.cost.learning import format_margin, is_within_margin
from planner.facts.validation import format_count


class Diagnosis:
    """Collect the items of one attempt and make its verdict. Not thread-safe."""

    def __init__(self, run: PlannedRun) -> None:
        self._run = run
        self._clocks, self._start, self._training = HostClocks(), StartStages(run), TrainingHealth()
        self._steps, self._ending = StepTimings(run), RunEnd(run)
        self._report: Mapping[str, Any] = {}
        self._script = ScriptSteps(is_script=run.is_script)
        self._planned, self._idle = get_planned_parts(run), BubbleFinder(run)
        self._window = StepWindow(run, self._clocks)
        self._progress, self._processes = RankProgress(), ProcessStates()
        self._hangs = HangDetector(run, self._steps, self._progress, self._processes)

    @property
    def has_verdict(self) -> bool:
        """Return True if jobs of this kind get a verdict."""
        return self._run.has_steps

    def add(self, item: Item, node: int, clock: ClockOffset | None = None) -> None:
        """Add an item that a node sent in a batch with a clock."""
        self._clocks.update(node, clock)
        self._progress.add(item, node)
        self._hangs.add(item)
        match item["kind"]:
            case "step":
                self._steps.add(item)
                self._training.add_step(item)
            case "metric":
                self._training.add_metrics(item)
            case "start":
                self._start.add(item)
            case "checkpoint":
                self._steps.add_checkpoint(item)
                self._ending.add_checkpoint(item)
                self._training.add_checkpoint(item)
            case "proof":
                self._training.add_proof(item)
            case "verdict":
                self._ending.add_verdict(item)
            case "timeline":
                self._window.add(item, node, self._steps.first)
            case "process":
                self._processes.add_process(item)
            case "gauge":
                self._processes.add_gauge(item)
                self._ending.add_gauge(item)
            case "phase" | "traffic":
                self._script.add(item)
            case _:
                pass

    def end(self, outcome: str, report: Mapping[str, Any] | None = None) -> None:
        """End the attempt with its `contracts.control.Outcome` and its exit report, if any."""
        self._ending.end(outcome, report)
        self._report = report or {}
        self._script.end(report)

    def make_verdict(self, now: float, silence: str = "") -> VerdictPayload:
        """Return the verdict at a time of the board's clock in Unix seconds.

        Args:
            silence: A clause about a host without contact, such as "no contact with host a since ...", or "".
        """
        is_over = self._ending.outcome is not None
        hang = None if is_over else self._hangs.detect(now, self._window.last)
        late_ranks = find_stragglers(self._run, self._window.steps, self._processes.get_throttled_ranks(now))
        late_findings = [make_straggler(self._run, late_rank, self._processes, now) for late_rank in late_ranks]
        measured = self._measure()
        findings = [
            *([hang[1]] if hang is not None else []),
            *(finding for _, finding in late_findings),
            *find_slow_links(self._run, self._window),
            *self._training.make_findings(),
            *self._ending.make_findings(),
            *self._explain_failure(),
            *self._idle.make_findings(self._window.steps),
            compare_with_plan(self._run, self._steps, self._start, self._script, self._ending, self._planned, measured),
        ]
        worst, *others = sort_by_severity(findings)
        if silence and not is_over:
            worst = report_silence(silence, worst)
        further_evidence = [e for finding in others if finding.state == worst.state for e in finding.evidence]
        return shrink_to_limit(
            {
                "v": 1,
                "time": now,
                "over": is_over,
                "state": worst.state,
                "sentence": truncate(worst.sentence),
                "reason": truncate(worst.reason),
                "next": truncate(worst.next),
                "action": worst.action,
                "action_rank": worst.action_rank,
                "evidence": [*worst.evidence, *further_evidence][:MAX_EVIDENCE],
                "step": self._steps.last,
                "sampled": self._window.sampled,
                "planned": self._planned,
                "measured": measured,
                "waits": self._window.get_waits(
                    {late_rank["rank"]: late_rank["since_step"] for late_rank, _ in late_findings}
                ),
                "groups": summarize_speeds(self._run, self._window.get_transfers()),
                "start": self._start.get_parts(),
                "hang": hang[0] if hang is not None else None,
                "stragglers": [late_rank for late_rank, _ in late_findings],
                "training": self._training.get_troubles(),
                "loss": self._training.reported,
            }
        )

    def _explain_failure(self) -> Iterator[RunFinding]:
        if self._ending.outcome == "failed":
            found = self._hangs.get_last_found()
            yield from explain_failure(self._run, self._report, found, self._hangs.positions, self._hangs.ended)

    def _measure(self) -> StepParts | None:
        window = self._window
        return self._steps.compute_parts(
            window.compute_mean(lambda step: step.waiting),
            window.compute_mean(lambda step: step.inferred),
            window.get_bubble_s(),
            ended=self._ending.outcome is not None,
        )


MIN_NAMED_EXCESS = 0.01  # relative difference of the step above which the verdict names the part that grew
MAX_EQUAL_DIFFERENCE = 0.0005  # relative difference of the step that counts as none
MIN_NAMED_PART = 0.1  # fraction of a step from which the verdict names a part
UNCALIBRATED_WEIGHT = 0.5  # weight of a difference from a data-sheet prediction
UNPLANNED_ADVICE = {  # by the kind of the largest part of a step
    "data": "Increase `num_workers` or `prefetch_factor` of the DataLoader.",
    "exposed": "Overlap {name} communication with compute, or send fewer bytes over {name}.",
    "optimizer": "Use a fused optimizer: pass `fused=True`.",
}
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


def compare_with_plan(
    run: PlannedRun,
    steps: StepTimings,
    start: StartStages,
    script: ScriptSteps,
    ending: RunEnd,
    planned: StepParts | None,
    measured: StepParts | None,
) -> RunFinding:
    """Return the finding of a run without a known problem."""
    ended_by = make_sentence(ending.reason) or NO_REASON
    if not steps.ran and (script_finding := script.make_finding(ending.outcome, ended_by)) is not None:
        return script_finding
    if ending.outcome is not None and not steps.ran:
        if ending.outcome == "cancelled":
            sentence = "Not checked: the job was cancelled before its first step."
            return RunFinding("starting", 0.0, sentence, ended_by, "")
        return RunFinding("starting", 0.0, "Not checked: the run reported no step.", "Nothing was measured.", "")
    if ending.outcome == "cancelled":
        completed = steps.get_num_steps(0) or steps.last  # as in the summary: a signal ends ranks at different steps
        sentence = f"Not checked: the job was cancelled after {format_count(completed, 'step')}."
        return RunFinding("well", 0.0, sentence, ended_by, "")
    if measured is None:
        return _make_unmeasured(steps, start, ending)
    if planned is None or not planned["step_s"]:
        return _describe_unplanned(run, measured, steps, ending)
    calibrated = run.estimate["time"].get("basis") == "calibrated"
    return _compare_step_time(measured, planned, steps, ending, calibrated=calibrated)


def _describe_unplanned(run: PlannedRun, measured: StepParts, steps: StepTimings, ending: RunEnd) -> RunFinding:
    """Return the finding of a run without a predicted step time."""
    why = "the verdict of a script uses no prediction" if run.is_script else "the run has no prediction"
    reason = f"The step time is not checked, because {why}."
    largest = _find_largest_part(measured)
    following = "" if largest is None else UNPLANNED_ADVICE.get(largest["kind"], "").format(name=largest["name"])
    sentence = _make_unchecked_sentence(measured, ending, ending.traffic_sentence, _describe_largest_part(measured))
    return RunFinding("well", 0.0, sentence, reason, following, (_make_measured_fact(measured, steps),))


def report_silence(silence: str, before: RunFinding) -> RunFinding:
    """Return the finding of a run whose host has no contact. `before`: the finding without this problem."""
    following = "Check the host and the network of the host. Training may still continue on the host."
    reason = f"Last verdict: {before.sentence}"
    return RunFinding("notice", 0.0, make_sentence(f"Not checked: {silence}"), reason, following, before.evidence)


def _make_unmeasured(steps: StepTimings, start: StartStages, ending: RunEnd) -> RunFinding:
    if ending.outcome is None and not steps.ran:
        return RunFinding(
            "starting", 0.0, f"Starting: {PHASES[start.reached]}.", "The first step has not ended yet.", ""
        )
    sentence = "Not checked: only warm-up steps have ended so far."
    if ending.outcome is not None:
        sentence = f"Not checked: the run ended after {format_count(steps.ran, 'step')}."
    reason = f"The first {WARMUP_STEPS} steps are warm-up and are not compared with the plan."
    return RunFinding("well", 0.0, sentence, reason, "")


def _compare_step_time(
    measured: StepParts, planned: StepParts, steps: StepTimings, ending: RunEnd, *, calibrated: bool
) -> RunFinding:
    margin, is_over = planned["sure"], ending.outcome is not None
    difference = measured["step_s"] / planned["step_s"] - 1
    traffic, difference_text = ending.traffic_sentence, _format_difference(difference)
    predicted = f"{format_seconds(planned['step_s'])} ({format_margin(margin)})"
    reason = f"The predicted step time is {predicted}."
    measured_fact = _make_measured_fact(measured, steps)
    facts: tuple[Evidence, ...] = (make_evidence(f"predicted step time: {predicted}"), measured_fact)
    if difference > margin:
        excess = _describe_excess(measured, planned)
        sentence = _make_sentence("Slower than planned", measured, difference_text, ending, excess, traffic)
        following, action = _get_next_step(calibrated=calibrated, is_over=is_over)
        weight = (1.0 if calibrated else UNCALIBRATED_WEIGHT) * difference / (1 + difference)
        return RunFinding("notice", weight, sentence, reason, following, facts, action)
    if not is_within_margin(margin, measured["step_s"], planned["step_s"]):
        sentence = _make_sentence("Faster than planned", measured, difference_text, ending, traffic)
        reason = f"The predicted step time is {predicted}, so the run may skip a part of the step."
        following = "Check under Step time breakdown that the run computes every part of the step."
        return RunFinding("notice", 0.0, sentence, reason, following, facts, "open_breakdown")
    if margin > 1:
        largest = _describe_largest_part(measured)
        if largest and traffic:
            facts = (*facts, make_evidence(largest))
        sentence = _make_unchecked_sentence(measured, ending, traffic or largest)
        reason = f"The step time is not checked, because its prediction, {predicted}, is too inaccurate."
        if calibrated:
            following = "Run more jobs on the host to improve its predictions."
            return RunFinding("well", 0.0, sentence, reason, following, facts)
        return RunFinding("well", 0.0, sentence, reason, "Calibrate the host.", facts, "calibrate")
    excess = _describe_excess(measured, planned) if difference > MIN_NAMED_EXCESS else ""
    sentence = _make_sentence("On plan", measured, difference_text, ending, excess, traffic)
    return RunFinding("well", 0.0, sentence, reason, "", facts)


def _get_next_step(*, calibrated: bool, is_over: bool) -> tuple[str, Action]:
    """Return the next step after a slow run as a sentence and as an action."""
    if not calibrated:
        return "Calibrate the host for a more accurate prediction.", "calibrate"
    if is_over:
        return "Find layouts that are faster than the layout of this run.", "find_faster"
    return "Compare each part of the step with its prediction under Step time breakdown.", "open_breakdown"


def _make_sentence(state: str, measured: StepParts, comparison: str, ending: RunEnd, *more: str) -> str:
    """Return 'On plan: the step time of 0.3 s is 4% above the prediction.', followed by more sentences.

    The step time of a running job changes with each step, and the page shows it live. So the sentence includes the step
    time only after the end.
    """
    of_time = f" of {format_seconds(measured['step_s'])}" if ending.outcome is not None else ""
    return " ".join((f"{state}: the step time{of_time} {comparison}.", *filter(None, more)))


def _make_unchecked_sentence(measured: StepParts, ending: RunEnd, *more: str) -> str:
    """Return 'No problem found. The step time is 0.3 s.', followed by more sentences."""
    step_time = f"The step time is {format_seconds(measured['step_s'])}." if ending.outcome is not None else ""
    return " ".join(filter(None, ("No problem found.", step_time, *more)))


def _make_measured_fact(measured: StepParts, steps: StepTimings) -> Evidence:
    number = measured["steps"]
    period = "one step" if number == 1 else f"median of the last {number:,} steps"
    step_s = format_seconds(measured["step_s"])
    return make_evidence(f"measured step time after step {steps.last:,}: {step_s} ({period})")


def _format_difference(difference: float) -> str:
    """Return 'is 12% above the prediction' for a relative difference from the prediction."""
    if abs(difference) < MAX_EQUAL_DIFFERENCE:
        return "matches the prediction"
    if difference > 1:
        return f"is {1 + difference:.1f} times the prediction"
    return f"is {format_percent(abs(difference))} {'above' if difference > 0 else 'below'} the prediction"


def _describe_largest_part(measured: StepParts) -> str:
    """Return a sentence about the largest part except compute, or an empty text if that part is small."""
    largest = _find_largest_part(measured)
    if largest is None:
        return ""
    name = largest["name"]
    subject = f"Exposed {name} communication" if largest["kind"] == "exposed" else f"{name[:1].upper()}{name[1:]}"
    return f"{subject} takes {format_percent(largest['seconds'] / measured['step_s'])} of each step."


def _find_largest_part(measured: StepParts) -> StepPart | None:
    """Return the largest part except compute, or None if that part is small."""
    candidates = [part for part in measured["parts"] if part["kind"] not in ("compute", "hidden")]
    largest = max(candidates, key=lambda part: part["seconds"], default=None)
    return None if largest is None or largest["seconds"] < MIN_NAMED_PART * measured["step_s"] else largest


def _describe_excess(measured: StepParts, planned: StepParts) -> str:
    """Return 'Exposed dp is 80% of the extra step time.' for the part that grew most compared with the plan."""
    planned_s = {part["name"]: part["seconds"] for part in planned["parts"] if part["kind"] != "hidden"}
    measured_s = {part["name"]: part["seconds"] for part in measured["parts"] if part["kind"] != "hidden"}
    if len(measured_s) < 2:
        return ""
    excess_s = {name: measured_s.get(name, 0.0) - planned_s.get(name, 0.0) for name in {*planned_s, *measured_s}}
    name = max(excess_s, key=lambda part: excess_s[part])
    share = excess_s[name] / (measured["step_s"] - planned["step_s"])
    exposed = any(part["name"] == name and part["kind"] == "exposed" for part in measured["parts"])
    if share <= 0:
        return ""
    subject = f"Exposed {name}" if exposed else capitalize(name)
    return f"{subject} is {format_percent(min(1.0, share))} of the extra step time."
