"""Estimate layouts that are faster than an ended run, from the measured step of the run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from typing_extensions import TypedDict

from planner.cost.learning import Interval, format_margin
from planner.cost.stage_time import Timing
from planner.cost.timing import Timer
from planner.facts.layout import AXES, get_axis_group
from planner.facts.parse_spec import LayoutDict
from planner.facts.spec import JobSpec, Layout
from planner.facts.spec_rules import find_unsupported_fields
from planner.hardware.cluster import Cluster
from planner.hardware.stack_options import get_time_margin
from planner.hardware.stacks import STACKS
from planner.search.layout_search import compute_needed_bytes, get_safe_capacity
from planner.search.neighbors import BARELY_FITS, Neighbor, find_neighbors

MAX_OPTIONS = 5
MIN_GAIN = 0.01  # fraction of the step time that a change saves at least
MIN_REST = 0.1  # fraction of the step time outside of collectives, below which collectives overlap with compute
COMPUTE = "compute"
# Parts of an estimate that count as another part.
PART_GROUPS = {**dict.fromkeys(("recompute", "launch", "optimizer"), COMPUTE), "bubble": "pp"}
PART_SUBJECTS = {  # a part as the subject of a sentence, with its verb
    COMPUTE: "Compute takes",
    "pp": "Waiting for other pipeline stages takes",
    **{axis: f"Communication on {axis} takes" for axis in ("dp", "tp", "cp", "ep", "world")},
}


class RunMeasurement(NamedTuple):
    """Measurements of an ended run. Times are in seconds per step.

    `step_s`: the median step. `busy_s`: time in collectives by axis, mean over ranks. `parts_s`: parts of the step from
    traced steps, with exposed communication by axis; empty if no step was traced. `peak_bytes`: peak memory beyond the
    memory before training. `predicted_s` and `sure`: parts and interval of the estimate at submission.
    """

    step_s: float
    busy_s: Mapping[str, float]
    parts_s: Mapping[str, float]
    peak_bytes: int | None
    predicted_s: Mapping[str, float]
    sure: Interval


class Part(TypedDict):
    """A part of the step, in seconds.

    `measured_s`: mean of the traced steps, or null. `measured_at_most_s`: upper limit if no step was traced, or null.
    `apportioned_s`: share of the median step, split as in the traced steps. Without traced steps, it is an estimate.
    """

    part: str
    predicted_s: float
    measured_s: float | None
    measured_at_most_s: float | None
    apportioned_s: float


class LargestGain(TypedDict):
    """The part of the step that saves the most time, in this run and with the change."""

    part: str
    apportioned_s: float
    there_s: float


class Option(TypedDict):
    """A layout that differs in one setting. `faster`: time saved as a fraction of the measured step."""

    change: str
    layout: LayoutDict
    micro_batches: int
    step_s: float
    faster: float
    memory_bytes: int
    because: LargestGain
    text: str


class Hindsight(TypedDict):
    """Layouts that are faster than the layout of an ended run. Times are in seconds per step.

    `text`: the best option in words, or why there is none. `predicted_s` and `interval`: the estimate at submission.
    `options`: the fastest first. `unsure`: layouts that save less time than the margin of error.
    """

    text: str
    cluster: str
    step_s: float
    predicted_s: float
    interval: Interval
    parts: list[Part]
    options: list[Option]
    unsure: list[Option]


def find_faster_layouts(spec: JobSpec, cluster: Cluster, measured: RunMeasurement) -> Hindsight:
    """Return layouts that differ in one setting and are faster than the run, the fastest first.

    The measured step is split into parts. Each part of a neighbor's predicted step is scaled by the measured time of
    that part over its predicted time. A part that the plan or the run overlaps completely has no such scale: it keeps
    its measured time in every layout with that axis. Additional predicted time is scaled like the whole step.

    Args:
        cluster: The hardware of the estimate at submission.
    """
    between = _between(spec, cluster, measured.sure)
    timer = Timer(cluster)
    here = get_parts(timer.get_rank_mean(spec))
    took = apportion_step(here, measured)
    whole = measured.step_s / sum(here.values())
    heavier = _heavier(spec, cluster, measured)
    room, sure_room = cluster.accelerator.memory_bytes, get_safe_capacity(spec, cluster)
    faster: list[Option] = []
    slower: list[tuple[float, str]] = []
    for near in find_neighbors(spec, cluster):
        if near.step_s is None or near.memory_bytes is None or find_unsupported_fields(near.spec):
            continue
        needed = round(near.memory_bytes * heavier)
        if needed > room:
            continue
        planned = get_parts(timer.get_rank_mean(near.spec))
        there = {
            part: _carried(took.get(part, 0.0), here.get(part, 0.0), planned.get(part, 0.0), whole)
            for part in {*planned, *took}
            if _has(near.spec.layout, part)
        }
        step = sum(there.values())
        if 1 - step / measured.step_s < MIN_GAIN:
            slower.append((step, near.change))
            continue
        faster.append(_option(near, needed, took, there, measured, barely=needed > sure_room))
    faster.sort(key=lambda option: option["step_s"])
    sure = [option for option in faster if option["faster"] > between["share"]]
    unsure = [option for option in faster if option["faster"] <= between["share"]]
    submitted, apart = group_parts(measured.predicted_s), group_parts(measured.parts_s)
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
        "options": sure[:MAX_OPTIONS],
        "unsure": unsure[:MAX_OPTIONS],
        "text": _text(sure, unsure, slower, measured.step_s, between["words"]),
    }


def _carried(took: float, here: float, there: float, whole: float) -> float:
    """Return the time of a part in another layout, from its measured and its two predicted times."""
    if took > 0 and here > 0:
        return there * took / here
    return took + max(0.0, there - here) * whole


def _has(layout: Layout, part: str) -> bool:
    """Return whether the layout has the part: an axis of one rank has no communication."""
    return all(axis != part or get_axis_group(layout, axis).size > 1 for axis in AXES)


def _between(spec: JobSpec, cluster: Cluster, interval: Interval) -> Interval:
    """Return the interval of another layout's time, if the time of one layout is measured."""
    if interval["basis"] != "data sheet":
        return interval
    stack = spec.resources.stack
    share = get_time_margin(stack, cluster.accelerator.name, host_share=0.0)  # the run shows the speed of the host
    words = f"from the measured step of this run, {STACKS[stack].title}, {format_margin(share)}"
    return Interval(share=share, basis="run", runs=1, words=words)


def _option(
    near: Neighbor,
    needed: int,
    took: Mapping[str, float],
    there: Mapping[str, float],
    measured: RunMeasurement,
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
        "text": f"{near.change}: an estimated {_duration(step)} per step, {gain:.0%} less than the measured "
        f"{_duration(measured.step_s)}. {PART_SUBJECTS.get(part, f'The part {part} takes')} {_duration(took[part])} "
        f"in this run, and {_duration(then) if then else 'no time'} with this change."
        + (f" The memory {BARELY_FITS}." if barely else ""),
    }


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def get_parts(timing: Timing) -> dict[str, float]:
    """Return seconds by the parts that a rank can measure.

    The bubble counts as pp, like messages between stages.
    """
    compute = timing.compute_s + timing.recompute_s + timing.launch_s + timing.optimizer_s
    return group_parts(
        {COMPUTE: compute, **{str(axis): s for axis, s in timing.exposed_s.items()}, "bubble": timing.bubble_s}
    )


def group_parts(parts: Mapping[str, float]) -> dict[str, float]:
    """Return the parts of an estimate, grouped as in `parts_of`."""
    groups: dict[str, float] = defaultdict(float)
    for name, seconds in parts.items():
        if seconds > 0:
            groups[PART_GROUPS.get(name, name)] += seconds
    return dict(groups)


def apportion_step(here: Mapping[str, float], measured: RunMeasurement) -> dict[str, float]:
    """Split the median step into parts, limited by the measured time of collectives.

    With traced steps, the split is that of the traced steps. Without, collectives take all of their time if they did
    not overlap with compute. If they did, the split is the predicted one, within the limits of each axis.
    """
    if parts := group_parts(measured.parts_s):
        whole = sum(parts.values())
        return {part: measured.step_s * seconds / whole for part, seconds in parts.items()}
    most = {axis: seconds for axis, seconds in measured.busy_s.items() if axis in here}
    rest = measured.step_s - sum(most.values())
    if rest >= MIN_REST * measured.step_s:
        return {COMPUTE: rest, **{axis: seconds for axis, seconds in most.items() if seconds > 0}}
    full: dict[str, float] = {}
    while True:
        left = {part: seconds for part, seconds in here.items() if part not in full}
        share = (measured.step_s - sum(full.values())) / sum(left.values())
        over = {part: most[part] for part in left if part in most and left[part] * share > most[part]}
        if not over:
            return {**full, **{part: seconds * share for part, seconds in left.items()}}
        full |= over


def _heavier(spec: JobSpec, cluster: Cluster, measured: RunMeasurement) -> float:
    """Return measured over predicted memory, at least 1."""
    if measured.peak_bytes is None:
        return 1.0
    return max(1.0, (measured.peak_bytes + cluster.accelerator.reserved_bytes) / compute_needed_bytes(spec, cluster))


def _text(sure: list[Option], unsure: list[Option], slower: list[tuple[float, str]], step_s: float, words: str) -> str:
    if sure:
        return f"{sure[0]['text']} Basis of the estimate: {words}."
    if unsure:
        first = unsure[0]
        return (
            f"No change is faster beyond the margin of error. The best change, {first['change']}, saves an estimated "
            f"{first['faster']:.0%} of the step time ({words})."
        )
    if not slower:
        return "No layout with one change fits."
    step, change = min(slower)
    return (
        f"No single change saves {MIN_GAIN:.0%} of the step time. The nearest change, {change}, takes an estimated "
        f"{_duration(step)} per step, compared with {_duration(step_s)} ({words})."
    )
