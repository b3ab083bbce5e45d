"""A host as its runs showed it: how much its ranks take beside their tensors, and how fast its links are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from contracts.telemetry import Op
from planner.cost.correction import Correction, correction_of
from planner.cost.memory import memory
from planner.facts.collectives import bus_factor
from planner.facts.spec import JobSpec
from planner.hardware.cluster import Cluster, Link
from planner.hardware.runs import LinkPoint, Run

LEAST_TENSORS = 2**28  # bytes of a rank: below, what a process takes anyway hides what the allocator adds
LARGE_CALL = 2**16  # bytes on the wire: below, a call shows its latency and not the link
LEAST_LATENCY_S, LEAST_BYTE_S = 1e-7, 1e-12
SINGULAR = 1e-9  # of a determinant: all calls are alike, and do not tell latency and rate apart
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
        told = sum(any(tells_link(point) for point in run.links) for run in runs)
        update |= {"node": link, "base_s": link.latency_s, "link_runs": told}
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
    """The link between ranks that comes nearest to their calls as `planner.hardware.cluster.collective_seconds` tells
    them; None without a large one, for then nothing tells its rate.

    Of the same call in several runs the median counts.
    """
    seen: dict[tuple[Op, int, int], list[float]] = defaultdict(list)
    for run in runs:
        for point in run.links:
            if tells_link(point):
                seen[point.op, point.group_size, point.payload_bytes].append(point.seconds)
    calls = [
        (_latencies(op, size), bus_factor(op, size) * payload, median(took))
        for (op, size, payload), took in seen.items()
    ]
    if max((moved for _, moved, _ in calls), default=0.0) < LARGE_CALL:
        return None
    latency_s, byte_s = _nearest([(latencies / seconds, moved / seconds) for latencies, moved, seconds in calls])
    return Link(bytes_per_s=1 / max(byte_s, LEAST_BYTE_S), efficiency=1.0, latency_s=max(latency_s, LEAST_LATENCY_S))


def tells_link(point: LinkPoint) -> bool:
    """Whether a call's time is its link's: a recv waits for its sender."""
    return point.op != "recv"


def _latencies(op: Op, group_size: int) -> int:
    """How many of a link's latencies a call inside a node takes, the call's own base as one more."""
    if op in ("send", "recv"):
        return 2
    return 1 + (2 if op == "all_reduce" else 1) * (group_size - 1)


def _nearest(calls: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(x, y) from 0 on with a x + b y nearest to 1 for all (a, b), by least squares."""
    aa, bb, ab = sum(a * a for a, _ in calls), sum(b * b for _, b in calls), sum(a * b for a, b in calls)
    a1, b1 = sum(a for a, _ in calls), sum(b for _, b in calls)
    det = aa * bb - ab * ab
    if det > SINGULAR * aa * bb:
        x, y = (a1 * bb - b1 * ab) / det, (b1 * aa - a1 * ab) / det
        if y <= 0:
            return a1 / aa, 0.0
        if x > 0:
            return x, y
    return 0.0, b1 / bb
