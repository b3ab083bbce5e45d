"""What would have been faster than a run that has ended: its step, apportioned to its parts, carried over."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from typing_extensions import TypedDict

from planner.cost.correction import Interval, sureness
from planner.cost.timed import Timing
from planner.cost.timing import Timer
from planner.facts.layout import axis_group
from planner.facts.levels import AXES
from planner.facts.reading.dumped import LayoutDict
from planner.facts.reading.runnable import not_runnable
from planner.facts.spec import JobSpec, Layout
from planner.hardware.cluster import Cluster
from planner.hardware.stacks import STACKS
from planner.hardware.within import within
from planner.search.advice import BARELY, Neighbour, neighbours
from planner.search.layouts import needed_bytes, surely_fitting_bytes

MOST = 5
LEAST_GAIN = 0.01  # of the step: less is not worth a change
LEAST_REST = 0.1  # of the step: with less left beside collectives they ran beside compute, and are no part of it
COMPUTE = "compute"
OF = {
    **dict.fromkeys(("recompute", "launch", "optimizer"), COMPUTE),
    "bubble": "pp",
}  # a part of an estimate, and whose
BESIDE = ("data", "checkpoint")  # parts of a measured step that no layout changes
WORDS = {
    COMPUTE: "computing",
    "pp": "waiting for other stages",
    **{axis: f"{axis} collectives" for axis in ("dp", "tp", "cp", "ep", "world")},
}


class Measure(NamedTuple):
    """Of a run: the median step, what its ranks were busy with collectives of each axis in a step, and peak memory
    above that of the process before. `parts_s`: steps told apart, of an axis what nothing hid, by the names in a
    diagnosis; empty where none was. `predicted_s`: parts of the step as predicted at its submit, by their names in
    an estimate; `sure`: the interval told then."""

    step_s: float
    busy_s: Mapping[str, float]
    parts_s: Mapping[str, float]
    peak_bytes: int | None
    predicted_s: Mapping[str, float]
    sure: Interval


class Part(TypedDict):
    """A part of the step: as predicted at submit; as measured where steps were told apart, the mean of those; else the
    most that it can have taken, None where nothing was measured; and what of the median step it is apportioned: by the
    steps told apart, or else an estimate."""

    part: str
    predicted_s: float
    measured_s: float | None
    measured_at_most_s: float | None
    apportioned_s: float


class Because(TypedDict):
    """The part that gains the most: what it is apportioned, and what it would take."""

    part: str
    apportioned_s: float
    there_s: float


class Option(TypedDict):
    """Another choice, its step and its memory. `faster`: by which share of the measured step."""

    change: str
    layout: LayoutDict
    micro_batches: int
    step_s: float
    faster: float
    memory_bytes: int
    because: Because
    text: str


class Hindsight(TypedDict):
    """What one other choice would have made of a run. Times in seconds of a step.

    `text`: the first option and its reason in a sentence, or that there is none. `predicted_s` and `interval`: as told
    at submit. `options`: the best first; those in `unsure` are no advice, for they gain less than the estimate is sure
    of.
    """

    text: str
    cluster: str
    step_s: float
    predicted_s: float
    interval: Interval
    parts: list[Part]
    options: list[Option]
    unsure: list[Option]


def hindsight(spec: JobSpec, cluster: Cluster, measured: Measure) -> Hindsight:
    """What one other choice would have made of the run, the fastest first.

    `cluster`: the hardware that the run was planned for. The measured step is apportioned to its parts; each part of a
    neighbour's predicted step is scaled by what the run's own was apportioned over what it was predicted at. Of an axis
    that the plan hides whole, or that the run hid, there is no such scale: what it took stays wherever the axis is, and
    what a neighbour's plan has more of it is scaled as the whole step. Neighbours that gain no more than the estimate
    may be off are `unsure`, no advice. Of a CPU that nobody measured the speed is known by then: left are the errors of
    its stack.
    """
    between = _between(spec, cluster, measured.sure)
    timer = Timer(cluster)
    here = parts_of(timer.over_ranks(spec))
    took = apportioned(here, measured)
    whole = measured.step_s / sum(here.values())
    heavier = _heavier(spec, cluster, measured)
    room, sure_room = cluster.accelerator.memory_bytes, surely_fitting_bytes(spec, cluster)
    faster: list[Option] = []
    slower: list[tuple[float, str]] = []
    for near in neighbours(spec, cluster):
        if near.step_s is None or near.memory_bytes is None or not_runnable(near.spec):
            continue
        needed = round(near.memory_bytes * heavier)
        if needed > room:
            continue
        planned = parts_of(timer.over_ranks(near.spec))
        there = {
            part: _carried(took.get(part, 0.0), here.get(part, 0.0), planned.get(part, 0.0), whole)
            for part in {*planned, *took}
            if _has(near.spec.layout, part)
        }
        step = sum(there.values())
        if 1 - step / measured.step_s < LEAST_GAIN:
            slower.append((step, near.change))
            continue
        faster.append(_option(near, needed, took, there, measured, barely=needed > sure_room))
    faster.sort(key=lambda option: option["step_s"])
    sure = [option for option in faster if option["faster"] > between["share"]]
    unsure = [option for option in faster if option["faster"] <= between["share"]]
    submitted, apart = grouped(measured.predicted_s), grouped(measured.parts_s)
    return {
        "step_s": measured.step_s,
        "predicted_s": sum(measured.predicted_s.values()),
        "interval": measured.sure,
        "cluster": cluster.name,
        "parts": [
            {
                "part": part,
                "predicted_s": submitted.get(part, 0.0),
                "measured_s": apart.get(part, 0.0) if apart else None,
                "measured_at_most_s": None if apart else measured.busy_s.get(part),
                "apportioned_s": took.get(part, 0.0),
            }
            for part in sorted({*submitted, *took})
        ],
        "options": sure[:MOST],
        "unsure": unsure[:MOST],
        "text": _text(sure, unsure, slower, measured.step_s, between["words"]),
    }


def _carried(took: float, here: float, there: float, whole: float) -> float:
    """What a part takes in another layout, of what it took in this one and was predicted at here and there."""
    if took > 0 and here > 0:
        return there * took / here
    return took + max(0.0, there - here) * whole


def _has(layout: Layout, part: str) -> bool:
    """False for an axis of one rank, on which nothing waits."""
    return all(axis != part or axis_group(layout, axis).size > 1 for axis in AXES)


def _between(spec: JobSpec, cluster: Cluster, told: Interval) -> Interval:
    """How sure another layout's time is, beside a run whose own is known."""
    if told["basis"] != "data sheet":
        return told
    stack = spec.resources.stack
    share = within(stack, cluster.accelerator.name, host_share=0.0)  # how fast the host is, the run has shown
    words = f"from this run's own step, {STACKS[stack].title}, {sureness(share)}"
    return Interval(share=share, basis="run", runs=1, words=words)


def _option(
    near: Neighbour,
    needed: int,
    took: Mapping[str, float],
    there: Mapping[str, float],
    measured: Measure,
    *,
    barely: bool,
) -> Option:
    step = sum(there.values())
    gain = 1 - step / measured.step_s
    part = max(took, key=lambda name: took[name] - there.get(name, 0.0))
    then = there.get(part, 0.0)
    return {
        "change": near.change,
        "layout": near.spec.layout.model_dump(),
        "micro_batches": near.spec.train.micro_batches,
        "step_s": step,
        "faster": gain,
        "memory_bytes": needed,
        "because": {"part": part, "apportioned_s": took[part], "there_s": then},
        "text": f"{near.change}: {gain:.0%} less time a step; of {measured.step_s:.3g} s, {took[part]:.3g} s are "
        f"apportioned to {WORDS.get(part, part)}, which would take {then:.3g} s"
        + (f"; its memory {BARELY}" if barely else ""),
    }


def parts_of(timing: Timing) -> dict[str, float]:
    """Seconds by what a rank of the run could have told apart: it waits for a stage as it waits for a message."""
    compute = timing.compute_s + timing.recompute_s + timing.launch_s + timing.optimizer_s
    return grouped(
        {COMPUTE: compute, **{str(axis): s for axis, s in timing.exposed_s.items()}, "bubble": timing.bubble_s}
    )


def grouped(parts: Mapping[str, float]) -> dict[str, float]:
    """The parts of an estimate as `parts_of` has them."""
    told: dict[str, float] = defaultdict(float)
    for name, seconds in parts.items():
        if seconds > 0:
            told[OF.get(name, name)] += seconds
    return dict(told)


def apportioned(here: Mapping[str, float], measured: Measure) -> dict[str, float]:
    """The measured step by part, no axis above what its ranks were busy with it.

    Where steps were told apart, the median one is divided as those were. Else, where collectives took their turns with
    compute, they took all they were busy; where they ran beside it, the step is divided as predicted, and what an axis
    cannot have taken goes to the others.
    """
    if told := grouped(measured.parts_s):
        whole = sum(told.values())
        return {part: measured.step_s * seconds / whole for part, seconds in told.items()}
    most = {axis: seconds for axis, seconds in measured.busy_s.items() if axis in here}
    rest = measured.step_s - sum(most.values())
    if rest >= LEAST_REST * measured.step_s:
        return {COMPUTE: rest, **{axis: seconds for axis, seconds in most.items() if seconds > 0}}
    full: dict[str, float] = {}
    while True:
        left = {part: seconds for part, seconds in here.items() if part not in full}
        share = (measured.step_s - sum(full.values())) / sum(left.values())
        over = {part: most[part] for part in left if part in most and left[part] * share > most[part]}
        if not over:
            return {**full, **{part: seconds * share for part, seconds in left.items()}}
        full |= over


def _heavier(spec: JobSpec, cluster: Cluster, measured: Measure) -> float:
    """Measured memory over what was predicted, where it was more."""
    if measured.peak_bytes is None:
        return 1.0
    return max(1.0, (measured.peak_bytes + cluster.accelerator.reserved_bytes) / needed_bytes(spec, cluster))


def _text(sure: list[Option], unsure: list[Option], slower: list[tuple[float, str]], step_s: float, words: str) -> str:
    if sure:
        return f"{sure[0]['text']} (estimate: {words})."
    if unsure:
        first = unsure[0]
        return (
            f"No change is faster beyond the margin of error. The best change, {first['change']}, is an estimated "
            f"{first['faster']:.0%} faster per step ({words})."
        )
    if not slower:
        return "No layout with one change fits."
    step, change = min(slower)
    return (
        f"No single change is {LEAST_GAIN:.0%} faster or more. The nearest change, {change}, takes an estimated "
        f"{step:.3g} s per step, compared with {step_s:.3g} s ({words})."
    )
