"""The last steps that were told event by event, each reduced to what the diagnosis needs of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from statistics import fmean, median
from typing import NamedTuple

from contracts.telemetry.timeline import TimelineItem
from jobs.core.verdict_schema import MOST_WAITS, Wait
from jobs.runs.diagnosis.events.charging import Charge, Messages, charge
from jobs.runs.diagnosis.events.clocks import Clocks
from jobs.runs.diagnosis.events.links import Moved, Way, moved
from jobs.runs.diagnosis.events.meetings import Meeting, meetings
from jobs.runs.diagnosis.events.pipes import Pipe, pipe_of
from jobs.runs.diagnosis.events.step import Gathering, Step, own_seconds
from jobs.runs.diagnosis.run import Run
from planner.facts.layout import get_coordinates

KEPT = 64  # steps
APART_S = 0.25  # between steps that are looked into: the window is 16 s of a fast run at least
FIRST = 16  # steps that say how fast links are when all is well
LATELY = 8  # steps that links' speeds are of
OVER = 0.25  # of its part of the model, that a pipeline stage takes longer than the others: less is uneven layers


class Found(NamedTuple):
    """A step. `charges`: what the others waited on average, by axis and who it is due to; `waiting`, `transfer`: by
    axis, what ranks stood still for one that came late, and for transfers; `inferred`: what of both the meter did not
    see. `own`: by rank and work, seconds without standing still. `moving`: by rank, seconds that it stood still for
    transfers. `experts`: by rank, bytes of its all-to-alls."""

    number: int
    ended: float
    step_s: float
    charges: dict[Charge, float]
    came_last: dict[Charge, int]
    calls: dict[Charge, int]
    waiting: dict[str, float]
    transfer: dict[str, float]
    inferred: dict[str, float]
    pipe: Pipe | None
    own: dict[int, dict[str, float]]
    moving: dict[int, float]
    experts: dict[int, int]
    moved: dict[Way, Moved]

    def of_rank(self) -> dict[int, float]:
        """What the others waited for each rank, on all axes."""
        total: dict[int, float] = {}
        for (_, rank), seconds in self.charges.items():
            total[rank] = total.get(rank, 0.0) + seconds
        return total


def found_in(run: Run, step: Step, clocks: Clocks) -> Found:
    met, world = meetings(step, clocks), len(step.ranks)
    charged = charge(met, Messages(met, _stages(run)))
    charges = charged.mean(world)
    pipe = pipe_of(run.spec, step) if run.spec is not None else None
    waiting = _by_axis(met, lambda meeting: sum(meeting.waits.values()) / world)
    if pipe is not None:
        waiting["pp"] = max(0.0, waiting.get("pp", 0.0) - pipe.bubble_s)
        if pipe.over > OVER:
            charges["pp", pipe.slowest] = charges.get(("pp", pipe.slowest), 0.0) + pipe.uneven_s
    return Found(
        number=step.number,
        ended=max(one.began + one.step_s for one in step.ranks.values()),
        step_s=step.step_s,
        charges=charges,
        came_last=charged.came_last,
        calls=charged.calls,
        waiting=waiting,
        transfer=_by_axis(met, lambda meeting: sum(meeting.exposed.values()) / world),
        inferred={
            axis: sum(one.inferred_s.get(axis, 0.0) for one in step.ranks.values()) / world
            for axis in {axis for one in step.ranks.values() for axis in one.inferred_s}
        },
        pipe=pipe,
        own={rank: own_seconds(one) for rank, one in step.ranks.items()},
        moving={rank: sum(meeting.exposed.get(rank, 0.0) for meeting in met) for rank in step.ranks},
        experts={
            rank: sum(call.payload_bytes for call in one.calls if call.op == "all_to_all")
            for rank, one in step.ranks.items()
        },
        moved=moved(met),
    )


def _stages(run: Run) -> Callable[[int], int]:
    """The pipeline stage of a rank; of a script, of which none are known, all are of one."""
    spec = run.spec
    return (lambda rank: get_coordinates(rank, spec.layout).pp) if spec is not None else lambda _rank: 0


def _by_axis(met: Iterable[Meeting], of: Callable[[Meeting], float]) -> dict[str, float]:
    total: dict[str, float] = {}
    for meeting in met:
        total[meeting.group.axis] = total.get(meeting.group.axis, 0.0) + of(meeting)
    return total


class Window:
    """Of the run's first steps, which are no measure of the others, it holds none."""

    def __init__(self, run: Run, clocks: Clocks) -> None:
        self._run, self._clocks = run, clocks
        self._gathering = Gathering(run.world_size, clocks)
        self._steps: deque[Found] = deque(maxlen=KEPT)
        self.sampled = 0
        self.last: Step | None = None
        self.usual: dict[Way, list[float]] = {}  # seconds of a transfer in the first of these steps

    def add(self, item: TimelineItem, node: int, first: int) -> None:
        """`first`: of the steps, that is a measure of the others."""
        last = self._steps[-1] if self._steps else None
        if item["step"] < first or (last is not None and item["step"] <= last.number):
            return
        step = self._gathering.add(item, node)
        if step is None:
            return
        self.last = step
        ended = max(one.began + one.step_s for one in step.ranks.values())
        if last is not None and ended - last.ended < APART_S:
            return
        found = found_in(self._run, step, self._clocks)
        self._steps.append(found)
        self.sampled += 1
        if self.sampled <= FIRST:
            for way, one in found.moved.items():
                self.usual.setdefault(way, []).append(one.transfer_s / one.calls)

    @property
    def steps(self) -> list[Found]:
        return list(self._steps)

    def mean(self, of: Callable[[Found], dict[str, float]]) -> dict[str, float]:
        """By axis, over the last steps."""
        told = [of(step) for step in self._steps]
        return {axis: fmean(one.get(axis, 0.0) for one in told) for axis in {axis for one in told for axis in one}}

    def bubble_s(self) -> float | None:
        told = [step.pipe.bubble_s for step in self._steps if step.pipe is not None]
        return median(told) if told else None

    def moved(self) -> list[dict[Way, Moved]]:
        return [step.moved for step in list(self._steps)[-LATELY:]]

    def waits(self, since: dict[int, int]) -> list[Wait]:
        """The largest first. `since`: of stragglers, the step from which on they are."""
        if not self._steps:
            return []
        total: dict[Charge, float] = {}
        for step in self._steps:
            for key, seconds in step.charges.items():
                total[key] = total.get(key, 0.0) + seconds
        step_s = fmean(step.step_s for step in self._steps)
        largest = sorted(total, key=lambda key: -total[key])[:MOST_WAITS]
        return [self._wait(key, total[key] / len(self._steps), step_s, since) for key in largest]

    def _wait(self, key: Charge, seconds: float, step_s: float, since: dict[int, int]) -> Wait:
        axis, rank = key
        calls = sum(step.calls.get(key, 0) for step in self._steps)
        return {
            "axis": axis,
            "rank": rank,
            "host": self._run.host_of(rank),
            "seconds": seconds,
            "share": seconds / step_s if step_s else 0.0,
            "last_in": sum(step.came_last.get(key, 0) for step in self._steps) / calls if calls else 0.0,
            "calls": calls,
            "since_step": since.get(rank, self._steps[0].number),
        }
