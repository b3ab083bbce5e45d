"""Takes in what the members of an attempt tell, item by item, and says at any time how it stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from contracts.telemetry.batches import ClockOffset, Item
from jobs.core.verdict_schema import StepParts, Told
from jobs.runs.diagnosis.course.ending import Ending
from jobs.runs.diagnosis.course.script import Script
from jobs.runs.diagnosis.course.start import Start
from jobs.runs.diagnosis.course.steps import Steps
from jobs.runs.diagnosis.course.training import Training
from jobs.runs.diagnosis.events.clocks import Clocks
from jobs.runs.diagnosis.events.links import speeds
from jobs.runs.diagnosis.events.window import Window
from jobs.runs.diagnosis.findings import cut, evidences, fitted, worst
from jobs.runs.diagnosis.plan import planned
from jobs.runs.diagnosis.run import Run
from jobs.runs.diagnosis.slow.idle import Idle
from jobs.runs.diagnosis.slow.links import slow_links
from jobs.runs.diagnosis.slow.stragglers import stragglers, told
from jobs.runs.diagnosis.stuck.hangs import Hangs
from jobs.runs.diagnosis.stuck.processes import Processes
from jobs.runs.diagnosis.stuck.progress import Progress
from jobs.runs.diagnosis.verdict import healthy, unheard


class Diagnosis:
    """Of one attempt. Not for use by several threads."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._clocks, self._start, self._training = Clocks(), Start(self._run), Training()
        self._steps, self._ending = Steps(self._run), Ending(self._run)
        self._script = Script(is_script=self._run.is_script)
        self._planned, self._idle = planned(self._run), Idle(self._run)
        self._window, self._progress, self._processes = Window(self._run, self._clocks), Progress(), Processes()
        self._hangs = Hangs(self._run, self._steps, self._progress, self._processes)

    @property
    def tells(self) -> bool:
        """Whether there is anything to say of a job of this kind."""
        return self._run.has_steps

    def add(self, item: Item, node: int, clock: ClockOffset | None = None) -> None:
        """Take in what a member told. `node`: its place in the gang; `clock`: as its batch has it."""
        self._clocks.told(node, clock)
        self._progress.add(item, node)
        match item["kind"]:
            case "step":
                self._steps.add(item)
                self._training.step(item)
            case "start":
                self._start.add(item)
            case "checkpoint":
                self._steps.saved(item)
                self._ending.saved(item)
                self._training.checkpoint(item)
            case "proof":
                self._training.proof(item)
            case "verdict":
                self._ending.verdict(item)
            case "timeline":
                self._window.add(item, node, self._steps.first)
            case "process":
                self._processes.process(item)
            case "gauge":
                self._processes.gauge(item)
            case "phase" | "traffic":
                self._script.add(item)
            case _:
                pass

    def ended(self, outcome: str, report: Mapping[str, Any] | None = None) -> None:
        """The attempt is over: its `contracts.control.Outcome` and its exit report, where there is one."""
        self._ending.ended(outcome, report)
        self._script.ended(report)

    def look(self, now: float, silence: str = "") -> Told:
        """Return the verdict at `now`, unix seconds by the board's clock.

        `silence` is a clause about a host without contact, such as "no contact with host a since ...", or empty.
        """
        over = self._ending.outcome is not None
        hang = None if over else self._hangs.look(now, self._window.last)
        slow = stragglers(self._run, self._window.steps, self._processes.held_again(now))
        late = [told(self._run, one, self._processes, now) for one in slow]
        measured = self._measured()
        findings = [hang[1]] if hang is not None else []
        findings += [finding for _, finding in late]
        findings += [*slow_links(self._run, self._window), *self._training.findings(), *self._ending.findings()]
        findings += self._idle.findings(self._window.steps)
        findings.append(
            healthy(self._run, self._steps, self._start, self._script, self._ending, self._planned, measured)
        )
        first, *others = worst(findings)
        if silence and not over:
            first = unheard(silence, first)
        more = [e for finding in others if finding.state == first.state for e in finding.evidence]
        return fitted(
            {
                "v": 1,
                "time": now,
                "over": over,
                "state": first.state,
                "sentence": cut(first.sentence),
                "reason": cut(first.reason),
                "next": cut(first.next),
                "action": first.action,
                "action_rank": first.action_rank,
                "evidence": evidences([*first.evidence, *more]),
                "step": self._steps.last,
                "sampled": self._window.sampled,
                "planned": self._planned,
                "measured": measured,
                "waits": self._window.waits({one["rank"]: one["since_step"] for one, _ in late}),
                "groups": speeds(self._run, self._window.moved()),
                "start": self._start.parts(),
                "hang": hang[0] if hang is not None else None,
                "stragglers": [one for one, _ in late],
                "training": self._training.told(),
            }
        )

    def _measured(self) -> StepParts | None:
        window = self._window
        return self._steps.measured(
            window.mean(lambda step: step.waiting),
            window.mean(lambda step: step.inferred),
            window.bubble_s(),
            ended=self._ending.outcome is not None,
        )
