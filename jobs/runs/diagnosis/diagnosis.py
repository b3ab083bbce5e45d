"""Diagnose an attempt from the items that its members send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from contracts.telemetry.batches import ClockOffset, Item
from jobs.core.verdict_schema import StepParts, VerdictPayload
from jobs.runs.diagnosis.bottlenecks import BubbleFinder, find_slow_links
from jobs.runs.diagnosis.findings import limit_evidence, shrink_to_limit, sort_by_severity, truncate
from jobs.runs.diagnosis.hangs import HangDetector
from jobs.runs.diagnosis.link_speed import summarize_speeds
from jobs.runs.diagnosis.plan_comparison import compare_with_plan, report_silence
from jobs.runs.diagnosis.planned_run import PlannedRun, get_planned_parts
from jobs.runs.diagnosis.rank_activity import ProcessStates, RankProgress
from jobs.runs.diagnosis.run_end import RunEnd
from jobs.runs.diagnosis.step_times import ScriptSteps, StartStages, StepTimes
from jobs.runs.diagnosis.step_window import StepWindow
from jobs.runs.diagnosis.stragglers import find_stragglers, make_straggler
from jobs.runs.diagnosis.traced_step import HostClocks
from jobs.runs.diagnosis.training_health import TrainingHealth


class Diagnosis:
    """Collect the items of one attempt and make its verdict. Not thread-safe."""

    def __init__(self, run: PlannedRun) -> None:
        self._run = run
        self._clocks, self._start, self._training = HostClocks(), StartStages(self._run), TrainingHealth()
        self._steps, self._ending = StepTimes(self._run), RunEnd(self._run)
        self._script = ScriptSteps(is_script=self._run.is_script)
        self._planned, self._idle = get_planned_parts(self._run), BubbleFinder(self._run)
        self._window, self._progress, self._processes = (
            StepWindow(self._run, self._clocks),
            RankProgress(),
            ProcessStates(),
        )
        self._hangs = HangDetector(self._run, self._steps, self._progress, self._processes)

    @property
    def has_verdict(self) -> bool:
        """Return True if jobs of this kind get a verdict."""
        return self._run.has_steps

    def add(self, item: Item, node: int, clock: ClockOffset | None = None) -> None:
        """Add an item.

        Args:
            node: The node that sent the item.
            clock: The clock of the item's batch.
        """
        self._clocks.update(node, clock)
        self._progress.add(item, node)
        match item["kind"]:
            case "step":
                self._steps.add(item)
                self._training.add_step(item)
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
            case "phase" | "traffic":
                self._script.add(item)
            case _:
                pass

    def end(self, outcome: str, report: Mapping[str, Any] | None = None) -> None:
        """End the attempt with its `contracts.control.Outcome` and its exit report, if any."""
        self._ending.end(outcome, report)
        self._script.end(report)

    def make_verdict(self, now: float, silence: str = "") -> VerdictPayload:
        """Return the verdict at a time.

        Args:
            now: Unix seconds of the board's clock.
            silence: A clause about a host without contact, such as "no contact with host a since ...", or "".
        """
        is_over = self._ending.outcome is not None
        hang = None if is_over else self._hangs.detect(now, self._window.last)
        late_ranks = find_stragglers(self._run, self._window.steps, self._processes.get_throttled_ranks(now))
        late_findings = [make_straggler(self._run, late_rank, self._processes, now) for late_rank in late_ranks]
        measured = self._measure()
        findings = [hang[1]] if hang is not None else []
        findings += [finding for _, finding in late_findings]
        findings += [
            *find_slow_links(self._run, self._window),
            *self._training.make_findings(),
            *self._ending.make_findings(),
        ]
        findings += self._idle.make_findings(self._window.steps)
        findings.append(
            compare_with_plan(self._run, self._steps, self._start, self._script, self._ending, self._planned, measured)
        )
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
                "evidence": limit_evidence([*worst.evidence, *further_evidence]),
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
            }
        )

    def _measure(self) -> StepParts | None:
        window = self._window
        return self._steps.compute_parts(
            window.compute_mean(lambda step: step.waiting),
            window.compute_mean(lambda step: step.inferred),
            window.get_bubble_s(),
            ended=self._ending.outcome is not None,
        )
