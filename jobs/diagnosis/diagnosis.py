"""Takes in what the members of an attempt tell, item by item, and says at any time how it stands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from contracts.telemetry import Clock, Item
from jobs.diagnosis.clocks import Clocks
from jobs.diagnosis.ending import Ending
from jobs.diagnosis.findings import Finding, cut, evidences, worst
from jobs.diagnosis.plan import planned
from jobs.diagnosis.run import Member, Run
from jobs.diagnosis.shapes import Told
from jobs.diagnosis.start import Start
from jobs.diagnosis.steps import Steps
from jobs.diagnosis.training import Training
from jobs.diagnosis.verdict import healthy


class Diagnosis:
    """Of one attempt. Not for use by several threads."""

    def __init__(
        self,
        spec: Mapping[str, Any],
        estimate: Mapping[str, Any],
        world_size: int,
        *,
        hardware: Mapping[str, Any] | None = None,
        members: Sequence[Member] = (),
        submitted: float | None = None,
        ordered: float | None = None,
    ) -> None:
        """`spec`, `estimate` and `hardware` as they are stored with the job; `submitted` and `ordered` as in `Run`."""
        self._run = Run(
            spec, estimate, world_size, hardware=hardware, members=members, submitted=submitted, ordered=ordered
        )
        self._clocks, self._start, self._training = Clocks(), Start(self._run), Training()
        self._steps, self._ending = Steps(self._run), Ending(self._run)
        self._planned = planned(self._run)

    @property
    def tells(self) -> bool:
        """Whether there is anything to say of a job of this kind."""
        return self._run.has_steps

    def add(self, item: Item, node: int, clock: Clock | None = None) -> None:
        """Take in what a member told. `node`: its place in the gang; `clock`: as its batch has it."""
        self._clocks.told(node, clock)
        match item["kind"]:
            case "step":
                self._steps.add(item)
                self._training.step(item)
            case "start":
                self._start.add(item)
            case "checkpoint":
                self._steps.saved(item)
                self._training.checkpoint(item)
            case "proof":
                self._training.proof(item)
            case "verdict":
                self._ending.verdict(item)
            case _:
                pass

    def ended(self, outcome: str, report: Mapping[str, Any] | None = None) -> None:
        """The attempt is over: its `contracts.control.Outcome` and its exit report, where there is one."""
        self._ending.ended(outcome, report)

    def look(self, now: float) -> Told:
        """How it stands at `now`, unix seconds by the board's clock."""
        first, *others = worst(self._findings())
        more = [e for finding in others if finding.state == first.state for e in finding.evidence]
        return {
            "v": 1,
            "time": now,
            "over": self._ending.outcome is not None,
            "state": first.state,
            "sentence": cut(first.sentence),
            "reason": cut(first.reason),
            "next": cut(first.next),
            "evidence": evidences([*first.evidence, *more]),
            "step": self._steps.last,
            "sampled": 0,
            "planned": self._planned,
            "measured": self._steps.measured({}, None),
            "waits": [],
            "groups": [],
            "start": self._start.parts(),
            "hang": None,
            "stragglers": [],
            "training": self._training.told(),
        }

    def _findings(self) -> Iterator[Finding]:
        yield from self._training.findings()
        yield from self._ending.findings()
        yield healthy(self._run, self._steps, self._start, self._ending, self._planned)
