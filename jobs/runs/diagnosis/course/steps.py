"""Steps as each rank timed them: how long they take of late, and what they are spent on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from statistics import fmean, median
from typing import Literal, NamedTuple

from contracts.telemetry.steps import CheckpointItem, StepItem
from contracts.telemetry.steps import StepBreakdown as Timed
from contracts.telemetry.vocabulary import LIVE_STEPS, TIMED_STEPS, WARMUP_STEPS
from jobs.core.verdict_schema import StepPart, StepParts
from jobs.runs.diagnosis.run import Run

LATELY = 64  # steps that a measure is of
ROWS = 65_536  # of steps times ranks that are kept: fewer steps where there are many ranks


def steps_measured(world_size: int) -> int:
    """How many of a run's last steps a measure is of."""
    return max(4, min(LATELY, ROWS // max(1, world_size)))


class OneStep(NamedTuple):
    """A step as one rank timed it."""

    step_s: float
    parts: Timed | None


class Steps:
    """The last steps of all ranks."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._rows: dict[int, dict[int, OneStep]] = {}
        self._most = steps_measured(run.world_size)
        self._paces: deque[float] = deque(maxlen=LATELY)
        self._of_rank: dict[int, int] = {}
        self._step_times: deque[float] = deque(maxlen=TIMED_STEPS)  # of rank 0
        self._checkpoints: deque[CheckpointItem] = deque(maxlen=LATELY)
        self.last = 0  # steps completed by anyone
        self.ran = 0  # of these, in this run
        self.longest_s = 0.0  # of late, on any rank

    def add(self, item: StepItem) -> None:
        step = item["step"]
        self.last, self.ran = max(self.last, step), max(self.ran, item["ran"])
        self._of_rank[item["rank"]] = step
        if item["ran"] <= WARMUP_STEPS:
            return
        if item["rank"] == 0:
            self._step_times.append(item["step_s"])
        row = self._rows.get(step)
        if row is None:
            row = self._rows[step] = {}
            while len(self._rows) > self._most:
                del self._rows[min(self._rows)]
            self._paces.append(item["step_s"])
        row[item["rank"]] = OneStep(item["step_s"], item.get("parts"))
        self.longest_s = max(self._paces)

    def saved(self, item: CheckpointItem) -> None:
        self._checkpoints.append(item)

    @property
    def longest_save_s(self) -> float:
        """What training waited for a checkpoint at most, of late."""
        return max((item["stall_s"] for item in self._checkpoints), default=0.0)

    @property
    def first(self) -> int:
        """Of the steps of this run, that is a measure of the others."""
        return self.last - self.ran + WARMUP_STEPS + 1

    def of_rank(self, rank: int) -> int:
        """Steps that a rank has completed."""
        return self._of_rank.get(rank, 0)

    @property
    def median_s(self) -> float | None:
        """Of the last steps after the first ones; None before there are any."""
        return median(self._paces) if self._paces else None

    @property
    def steps(self) -> tuple[int, ...]:
        """Which steps the measure is of."""
        return tuple(sorted(self._rows))

    def parts(self) -> Iterator[OneStep]:
        return (one for row in self._rows.values() for one in row.values())

    def checkpoint_s(self) -> float:
        """What training waited for checkpoints, a step: of late, from the first that is kept to the last."""
        if not self._checkpoints:
            return 0.0
        first, *others = self._checkpoints
        if not others:
            return first["stall_s"] / max(1, self.ran)
        return sum(item["stall_s"] for item in others) / max(1, others[-1]["step"] - first["step"])

    def measured(
        self, waiting: Mapping[str, float], inferred: Mapping[str, float], bubble_s: float | None, *, ended: bool
    ) -> StepParts | None:
        """Return the step time of the job page with its parts: means over ranks, scaled to that step time.

        The step time is the median of rank 0, over the last LIVE_STEPS steps, or TIMED_STEPS if the run has `ended`.

        Args:
            waiting: Exposed time by axis in which ranks waited for a late rank, seconds per step.
            inferred: Exposed time by axis that the meter counted as compute, seconds per step.
            bubble_s: Idle time of the pipeline schedule in seconds per step, None if unknown.
        """
        timed = list(self.parts())
        if not timed:
            return None
        mean_s, saving = fmean(one.step_s for one in timed), self.checkpoint_s()
        times = [*self._step_times][0 if ended else -LIVE_STEPS :]
        step_s, steps = (median(times), len(times)) if times and mean_s else (mean_s, len(self._rows))
        told = [one.parts for one in timed if one.parts is not None]
        found = (
            _mean_parts(told, mean_s, waiting, inferred, bubble_s) if told else [_part("compute", "compute", mean_s)]
        )
        for part in found:
            part["seconds"] *= step_s / (mean_s or 1.0)
            part["waiting_s"] *= step_s / (mean_s or 1.0)
        if saving > 0:
            found.append(_part("checkpoint", "checkpoint", saving))
        return {"step_s": step_s + saving, "sure": 0.0, "steps": steps, "parts": found}


def _mean_parts(
    told: list[Timed],
    step_s: float,
    waiting: Mapping[str, float],
    inferred: Mapping[str, float],
    bubble_s: float | None,
) -> list[StepPart]:
    """In the order they are drawn; compute is the rest of the step."""
    data, optimizer = fmean(parts["data"] for parts in told), fmean(parts["optimizer"] for parts in told)
    exposed = {axis: _mean(told, "exposed", axis) + inferred.get(axis, 0.0) for axis in _axes(told, inferred)}
    hidden = {axis: max(0.0, _mean(told, "hidden", axis) - inferred.get(axis, 0.0)) for axis in _axes(told, {})}
    bubble = 0.0
    for axis in ("pp", "world"):  # the last to drain the pipe is waited for at the step's end
        idle = min((bubble_s or 0.0) - bubble, exposed.get(axis, 0.0))
        if idle > 0:
            bubble, exposed[axis] = bubble + idle, exposed[axis] - idle
    scale = min(1.0, max(0.0, step_s - data - bubble) / (sum(exposed.values()) or 1.0))
    exposed = {axis: s * scale for axis, s in exposed.items()}  # what was inferred is of other steps
    rest = step_s - data - optimizer - bubble - sum(exposed.values())
    if rest < 0:  # the optimiser stood still for collectives too
        optimizer, rest = max(0.0, optimizer + rest), 0.0
    found = [_part("data", "data", data), _part("compute", "compute", rest)]
    found += [_part(axis, "exposed", s, min(s, waiting.get(axis, 0.0))) for axis, s in exposed.items()]
    found += [_part("bubble", "bubble", bubble), _part("optimizer", "optimizer", optimizer)]
    found = [part for part in found if part["seconds"] > 0]
    return found + [_part(axis, "hidden", s) for axis, s in hidden.items() if s > 0]


def _axes(told: list[Timed], more: Mapping[str, float]) -> list[str]:
    return sorted({axis for parts in told for axis in (*parts["exposed"], *parts["hidden"])} | set(more))


def _mean(told: list[Timed], which: Literal["exposed", "hidden"], axis: str) -> float:
    return fmean(parts[which].get(axis, 0.0) for parts in told)


def _part(name: str, kind: str, value: float, waiting: float = 0.0) -> StepPart:
    return {"name": name, "kind": kind, "seconds": value, "waiting_s": waiting}  # type: ignore[typeddict-item]
