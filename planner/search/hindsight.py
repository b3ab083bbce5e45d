"""What would have been faster than a run that has ended: its own parts, as measured, carried over to its neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from planner.cost.correction import interval
from planner.cost.timing import Timer, Timing
from planner.facts.runnable import not_runnable
from planner.facts.spec import JobSpec
from planner.hardware.cluster import Cluster
from planner.search.advice import neighbours
from planner.search.layouts import needed_bytes

MOST = 5
LEAST_GAIN = 0.01  # of the step: less is not worth a change
LEAST_REST = 0.1  # of the step: with less left beside collectives they ran beside compute, and are no part of it
COMPUTE = "compute"
WORDS = {
    COMPUTE: "computing",
    "pp": "waiting for other stages",
    **{axis: f"{axis} collectives" for axis in ("dp", "tp", "cp", "ep", "world")},
}


class Measure(NamedTuple):
    """Of a run: the median step, what its ranks were busy with collectives of each axis in a step, and peak memory
    above that of the process before."""

    step_s: float
    busy_s: Mapping[str, float]
    peak_bytes: int | None


def hindsight(spec: JobSpec, cluster: Cluster, measured: Measure) -> dict[str, Any]:
    """What one other choice would have made of the run, the fastest first, as JSON.

    Each part of a neighbour's predicted step is scaled by what the same part was measured at over what it was predicted
    at, so that the run itself comes out as measured.
    """
    timer = Timer(cluster)
    here = parts_of(timer.predicted(spec))
    took = _measured_parts(here, measured)
    factors = {part: took[part] / here[part] for part in here if took.get(part) and here[part] > 0}
    whole = measured.step_s / sum(here.values())
    heavier = _heavier(spec, cluster, measured)
    room = cluster.accelerator.memory_bytes
    options: list[dict[str, Any]] = []
    slower: list[tuple[float, str]] = []
    for near in neighbours(spec, cluster):
        if near.step_s is None or near.memory_bytes is None or not_runnable(near.spec):
            continue
        needed = round(near.memory_bytes * heavier)
        if needed > room:
            continue
        there = {
            part: seconds * factors.get(part, whole) for part, seconds in parts_of(timer.predicted(near.spec)).items()
        }
        step = sum(there.values())
        faster = 1 - step / measured.step_s
        if faster < LEAST_GAIN:
            slower.append((step, near.change))
            continue
        because = max(took, key=lambda part: took[part] - there.get(part, 0.0))
        options.append(
            {
                "change": near.change,
                "layout": near.spec.layout.model_dump(),
                "micro_batches": near.spec.train.micro_batches,
                "step_s": step,
                "faster": faster,
                "memory_bytes": needed,
                "because": {"part": because, "measured_s": took[because], "there_s": there.get(because, 0.0)},
                "text": f"{near.change}: {faster:.0%} less time a step, as {WORDS.get(because, because)} took "
                f"{took[because]:.3g} s of {measured.step_s:.3g} s and would take {there.get(because, 0.0):.3g} s",
            }
        )
    options.sort(key=lambda option: option["step_s"])
    sure = interval(cluster.basis, spec.resources.stack, timer.correction(spec))
    return {
        "step_s": measured.step_s,
        "interval": sure,
        "cluster": cluster.name,
        "parts": [
            {"part": part, "predicted_s": here.get(part, 0.0), "measured_s": took.get(part)}
            for part in sorted({*here, *took})
        ],
        "options": options[:MOST],
        "text": _text(options, slower, measured, sure["words"]),
    }


def parts_of(timing: Timing) -> dict[str, float]:
    """Seconds by what a rank of the run could have told apart: it waits for a stage as it waits for a message."""
    compute = timing.compute_s + timing.recompute_s + timing.launch_s + timing.optimizer_s
    parts = {COMPUTE: compute, **{str(axis): seconds for axis, seconds in timing.exposed_s.items()}}
    if timing.bubble_s:
        parts["pp"] = parts.get("pp", 0.0) + timing.bubble_s
    return {part: seconds for part, seconds in parts.items() if seconds > 0}


def _measured_parts(here: Mapping[str, float], measured: Measure) -> dict[str, float]:
    """The step by part; undivided where collectives ran beside compute."""
    busy = {axis: seconds for axis, seconds in measured.busy_s.items() if axis in here and seconds > 0}
    rest = measured.step_s - sum(busy.values())
    if rest < LEAST_REST * measured.step_s:
        return {part: seconds * measured.step_s / sum(here.values()) for part, seconds in here.items()}
    return {COMPUTE: rest, **busy}


def _heavier(spec: JobSpec, cluster: Cluster, measured: Measure) -> float:
    """Measured memory over what was predicted, where it was more."""
    if measured.peak_bytes is None:
        return 1.0
    return max(1.0, (measured.peak_bytes + cluster.accelerator.reserved_bytes) / needed_bytes(spec, cluster))


def _text(options: list[dict[str, Any]], slower: list[tuple[float, str]], measured: Measure, sure: str) -> str:
    if options:
        return f"{options[0]['text']} (an estimate: {sure})."
    if not slower:
        return "No other layout one choice away fits."
    step, change = min(slower)
    return (
        f"No choice would have been faster here by {LEAST_GAIN:.0%} or more; the nearest, {change}, comes to "
        f"{step:.3g} s beside {measured.step_s:.3g} s (an estimate: {sure})."
    )
