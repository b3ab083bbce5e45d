"""A host as its runs showed it: how much its ranks take beside their tensors, and how fast its links are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from planner.cost.correction import Correction, correction_of
from planner.cost.memory import memory
from planner.facts.collectives import bus_factor
from planner.facts.spec import JobSpec
from planner.hardware.cluster import Cluster, Link
from planner.hardware.runs import Run

LEAST_TENSORS = 2**28  # bytes of a rank: below, what a process takes anyway hides what the allocator adds
LARGE_CALL = 2**16  # bytes on the wire: below, a call shows its latency and not the link
NARROWEST, WIDEST = 0.001, 1.0  # of an allocator's share


def learned(cluster: Cluster, runs: Sequence[Run]) -> Cluster:
    """`cluster`, one node of the host on which `runs` ended, the newest first.

    `planner.cost.timing` corrects its times by them. Links are those of a calibration where there was one: it times a
    call apart from what runs beside it.
    """
    if not runs:
        return cluster
    update: dict[str, object] = {"runs": tuple(runs)}
    if shares := memory_correction(runs):
        share = min(max(shares.ratio - 1, NARROWEST), WIDEST)
        update["accelerator"] = cluster.accelerator.model_copy(update={"fragmentation": share})
    if cluster.profile is None and (link := link_of(runs)):
        update |= {"node": link, "base_s": link.latency_s}
    return cluster.model_copy(update=update)


def memory_correction(runs: Sequence[Run]) -> Correction | None:
    """Peak memory over that of its tensors, of runs large enough to tell."""
    ratios = []
    for run in runs:
        tensors = tensor_bytes(run.spec)
        if run.peak_bytes is not None and tensors >= LEAST_TENSORS:
            ratios.append(run.peak_bytes / tensors)
    return correction_of(ratios)


def tensor_bytes(spec: JobSpec) -> int:
    """Of the fullest rank."""
    return max(sum(memory(spec, stage).values()) for stage in range(spec.layout.pp))


def link_of(runs: Sequence[Run]) -> Link | None:
    """The link between ranks: its rate from large calls, its latency from the fastest of all; None without any.

    Of the same call in several runs the median counts.
    """
    seen: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for run in runs:
        for point in run.links:
            seen[point.op, point.group_size, point.payload_bytes].append(point.seconds)
    calls = [(bus_factor(op, size) * payload, median(took)) for (op, size, payload), took in seen.items()]  # type: ignore[arg-type]
    large = [moved / seconds for moved, seconds in calls if moved >= LARGE_CALL]
    if not large:
        return None
    return Link(bytes_per_s=max(large), efficiency=1.0, latency_s=min(seconds for _, seconds in calls))
