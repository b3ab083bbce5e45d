"""A host as its runs showed it: how much its ranks take beside their tensors, and how fast its links are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from contracts.telemetry.vocabulary import Op
from planner.cost.correction import Correction, Interval, correction_of, sureness
from planner.cost.memory import memory
from planner.cost.resolved_plan import resolve
from planner.facts.collectives import get_bus_factor
from planner.facts.spec import JobSpec
from planner.hardware.cluster import Cluster, Link, NodeSpan
from planner.hardware.kernel_time import compute_collective_seconds
from planner.hardware.profile import LinkPoint, MeasuredRun
from planner.hardware.stack_options import UNTOLD_BYTES
from planner.hardware.stacks import STACKS

LEAST_TENSORS = 2**28  # bytes of a rank: below, what a process takes anyway hides what the allocator adds
LARGE_CALL = 2**16  # bytes on the wire: below, a call shows its latency and not the link
LEAST_LATENCY_S = 1e-7
# Of a determinant over its greatest: below, sizes lie less than some 40% apart, and noise alone tells the two apart.
ALIKE = 0.02
LEAST_OF_BYTES = 0.5  # of the time of the fastest call: with less, a rate is what noise makes of latency
CPU_WITHIN = 0.1  # of a process' resident set: the worst of six layouts (docs/reference/measured.md)
LEAST_RATIO = 1.001  # of a peak to its tensors: something is always held beside them
KNOWN_WITHIN = 0.5  # of a peak: a wider interval is no reason to leave memory free


def learned(cluster: Cluster, runs: Sequence[MeasuredRun]) -> Cluster:
    """`cluster`, one node of the host on which `runs` ended, the newest first.

    `planner.cost.timing` corrects its times by them. Links are those of a calibration where there was one: it times a
    call apart from what runs beside it.
    """
    if not runs:
        return cluster
    update: dict[str, object] = {"runs": tuple(runs)}
    if found := memory_correction(runs):
        # A CPU's peaks hold all that its processes took; a GPU's hold tensors, beside which its allocator keeps more.
        beside = 0.0 if cluster.device == "cpu" else cluster.accelerator.fragmentation
        share = found.ratio * (1 + beside) - 1
        update["accelerator"] = cluster.accelerator.model_copy(update={"fragmentation": share})
    if cluster.profile is None and (seen := link_of(runs, cluster)):
        told = sum(any(tells_link(point) for point in run.links) for run in runs)
        update |= {"node": seen.link, "base_s": seen.base_s, "link_runs": told}
        update["latency_alone"] = not seen.tells_rate
    return cluster.model_copy(update=update)


def memory_correction(runs: Sequence[MeasuredRun]) -> Correction | None:
    """Peak memory over that of its tensors, of runs large enough to tell; where that is less than LEAST_RATIO it is not
    told so, and may be off by as much more."""
    ratios = []
    for run in runs:
        tensors = tensor_bytes(run.spec)
        told = run.tells_copies or run.spec.resources.device != "cpu"
        if told and run.peak_bytes is not None and tensors >= LEAST_TENSORS:
            ratios.append(run.peak_bytes / tensors)
    found = correction_of(ratios)
    if found is None or found.ratio >= LEAST_RATIO:
        return found
    return found._replace(ratio=LEAST_RATIO, share=found.share + 1 - found.ratio / LEAST_RATIO)


def memory_interval(cluster: Cluster, spec: JobSpec, found: Correction | None, peak_bytes: int) -> Interval:
    """Of the fullest rank's peak: from the host's runs, as `memory_correction` has them, or from peaks that others
    published of the spec's stack; of a GPU from both, as runs tell its tensors alone."""
    share, beside = _within(cluster, spec, found)
    share += beside / peak_bytes
    basis, runs, seen = ("runs", found.runs, f"from {found.runs} runs here") if found else ("counted", 0, "counted")
    if cluster.device == "cpu":
        words = seen if found else "counted tensors plus process memory"
    else:
        stack = STACKS[spec.resources.stack]
        words = f"tensors {seen}, {stack.title if stack.memory_within < 1 else f'{stack.title} without a known peak'}"
    return Interval(share=share, basis=basis, runs=runs, words=f"{words}, {sureness(share)}")


def _within(cluster: Cluster, spec: JobSpec, found: Correction | None) -> tuple[float, int]:
    """How far off a peak is: a share of it, and bytes beside."""
    if cluster.device == "cpu":
        return (CPU_WITHIN, LEAST_TENSORS) if found is None else (found.share, 0)
    return STACKS[spec.resources.stack].memory_within + (found.share if found else 0.0), UNTOLD_BYTES


def surely_fitting(cluster: Cluster, spec: JobSpec, found: Correction | None, room: int) -> int:
    """The highest peak that fits `room` even where it is told too low by all of its interval; all of the room where
    so little is known of the stack that nothing worth asking for would."""
    share, beside = _within(cluster, spec, found)
    return room if share > KNOWN_WITHIN else max(0, int((room - beside) / (1 + share)))


def tensor_bytes(spec: JobSpec) -> int:
    """Of the fullest rank."""
    plan = resolve(spec)
    return max(sum(memory(plan, stage).values()) for stage in range(spec.layout.pp))


class LearnedLink(NamedTuple):
    """A link as calls showed it, seconds before a call, and whether they told its rate: else it is the data sheet's."""

    link: Link
    base_s: float
    tells_rate: bool


def link_of(runs: Sequence[MeasuredRun], cluster: Cluster) -> LearnedLink | None:
    """The link between ranks that comes nearest to their calls as `planner.hardware.cluster.collective_seconds` tells
    them; None without a large one, for then nothing tells its rate.

    Of the same call in several runs the median counts. Latency takes no less than nothing, so a link's rate is at least
    bytes over seconds of the fastest call; how far it is above that, only calls of unlike sizes tell, of which bytes
    take a good part. Where calls are alike, `cluster`'s link is as many times slower in all as they were. Where they
    differ and the larger take hardly longer, latency is all they tell: the rate stays the data sheet's, or what the
    fastest call showed where that is more. A fit alone would put any rate there, up to none at all.
    """
    seen: dict[tuple[Op, int, int], list[float]] = defaultdict(list)
    for run in runs:
        for point in run.links:
            if tells_link(point):
                seen[point.op, point.group_size, point.payload_bytes].append(point.seconds)
    took = {call: median(seconds) for call, seconds in seen.items()}
    if max((get_bus_factor(op, size) * payload for op, size, payload in took), default=0.0) < LARGE_CALL:
        return None
    calls = [
        (_latencies(op, size) / seconds, get_bus_factor(op, size) * payload / seconds)
        for (op, size, payload), seconds in took.items()
    ]
    fit = _nearest(calls)
    if fit is None:
        return _slower(cluster, median(took[call] / _seconds(call, cluster) for call in took))
    latency_s, byte_s = fit
    shown = max(rate for _, rate in calls)
    if byte_s * shown >= LEAST_OF_BYTES:
        return _link(1 / byte_s, 1.0, latency_s, tells_rate=True)
    sheet = cluster.node
    if sheet.bytes_per_s * sheet.efficiency < shown:
        return _link(shown, 1.0, _latency(calls, shown), tells_rate=True)
    latency_s = _latency(calls, sheet.bytes_per_s * sheet.efficiency)
    return _link(sheet.bytes_per_s, sheet.efficiency, latency_s, tells_rate=False)


def _link(bytes_per_s: float, efficiency: float, latency_s: float, *, tells_rate: bool) -> LearnedLink:
    latency_s = max(latency_s, LEAST_LATENCY_S)
    link = Link(bytes_per_s=bytes_per_s, efficiency=efficiency, latency_s=latency_s)
    return LearnedLink(link, latency_s, tells_rate)


def _slower(cluster: Cluster, times: float) -> LearnedLink:
    """The cluster's link, so many times slower."""
    sheet = cluster.node
    rate = sheet.bytes_per_s * sheet.efficiency / times
    link = Link(bytes_per_s=rate, efficiency=1.0, latency_s=sheet.latency_s * times)
    return LearnedLink(link, cluster.base_s * times, True)


def _seconds(call: tuple[Op, int, int], cluster: Cluster) -> float:
    op, size, payload = call
    return compute_collective_seconds(op, payload, NodeSpan(size, 1), cluster)


def tells_link(point: LinkPoint) -> bool:
    """Whether a call's time is its link's: a recv waits for its sender."""
    return point.op != "recv"


def _latencies(op: Op, group_size: int) -> int:
    """How many of a link's latencies a call inside a node takes, the call's own base as one more."""
    if op in ("send", "recv"):
        return 2
    return 1 + (2 if op == "all_reduce" else 1) * (group_size - 1)


def _nearest(calls: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """(x, y) with a x + b y nearest to 1 for all (a, b), by least squares, x from 0 on; None where they are alike."""
    aa, bb, ab = sum(a * a for a, _ in calls), sum(b * b for _, b in calls), sum(a * b for a, b in calls)
    a1, b1 = sum(a for a, _ in calls), sum(b for _, b in calls)
    det = aa * bb - ab * ab
    if det <= ALIKE * aa * bb:
        return None
    x = (a1 * bb - b1 * ab) / det
    return (x, (b1 * aa - a1 * ab) / det) if x > 0 else (0.0, b1 / bb)


def _latency(calls: Sequence[tuple[float, float]], bytes_per_s: float) -> float:
    """The x nearest to that where the rate is known."""
    return sum(a * (1 - b / bytes_per_s) for a, b in calls) / sum(a * a for a, _ in calls)
