"""A host as its runs showed it: how much its ranks take beside their tensors, and how fast its links are.

What the runs of a host say of the planner's errors there: by how much to correct, and how sure that is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from typing_extensions import TypedDict

from contracts.telemetry.items import Op
from planner.cost.memory import get_memory
from planner.cost.resolved_plan import ResolvedPlan, resolve
from planner.facts.collectives import get_bus_factor
from planner.facts.precision import get_mixed_precision
from planner.facts.resources import StackName, format_software
from planner.facts.spec import JobSpec, ModelSpec, Precision
from planner.hardware.cluster import Cluster, Link, NodeSpan
from planner.hardware.kernel_time import compute_collective_seconds
from planner.hardware.profile import HostProfile, LinkPoint, MeasuredRun
from planner.hardware.stack_options import HOST_MARGINS, UNMODELED_BYTES, get_time_margin, was_measured
from planner.hardware.stacks import STACKS

MIN_TENSOR_BYTES = 2**28  # bytes of a rank: below, what a process takes anyway hides what the allocator adds
MIN_RATE_BYTES = 2**16  # bytes on the wire: below, a call shows its latency and not the link
MIN_LATENCY_S = 1e-7
# Of a determinant over its greatest: below, sizes lie less than some 40% apart, and noise alone tells the two apart.
MIN_SIZE_SPREAD = 0.02
MIN_BYTE_SHARE = 0.5  # of the time of the fastest call: with less, a rate is what noise makes of latency
CPU_MEMORY_MARGIN = 0.1  # of a process' resident set: the worst of six layouts (docs/reference/measured.md)
MIN_RATIO = 1.001  # of a peak to its tensors: something is always held beside them
MAX_KNOWN_MARGIN = 0.5  # of a peak: a wider interval is no reason to leave memory free


def apply_runs(cluster: Cluster, runs: Sequence[MeasuredRun]) -> Cluster:
    """`cluster`, one node of the host on which `runs` ended, the newest first.

    `planner.cost.timing` corrects its times by them. Links are those of a calibration where there was one: it times a
    call apart from what runs beside it.
    """
    if not runs:
        return cluster
    update: dict[str, object] = {"runs": tuple(runs)}
    if found := compute_memory_correction(runs):
        # A CPU's peaks hold all that its processes took; a GPU's hold tensors, beside which its allocator keeps more.
        beside = 0.0 if cluster.device == "cpu" else cluster.accelerator.fragmentation
        share = found.ratio * (1 + beside) - 1
        update["accelerator"] = cluster.accelerator.model_copy(update={"fragmentation": share})
    if cluster.profile is None and (seen := fit_link(runs, cluster)):
        told = sum(any(measures_link(point) for point in run.links) for run in runs)
        update |= {"node": seen.link, "base_s": seen.base_s, "link_runs": told}
        update["latency_alone"] = not seen.has_rate
    return cluster.model_copy(update=update)


def compute_memory_correction(runs: Sequence[MeasuredRun]) -> Correction | None:
    """Peak memory over that of its tensors, of runs large enough to tell; where that is less than LEAST_RATIO it is not
    told so, and may be off by as much more."""
    ratios = []
    for run in runs:
        tensors = compute_tensor_bytes(run.spec)
        told = run.tells_copies or run.spec.resources.device != "cpu"
        if told and run.peak_bytes is not None and tensors >= MIN_TENSOR_BYTES:
            ratios.append(run.peak_bytes / tensors)
    found = compute_correction(ratios)
    if found is None or found.ratio >= MIN_RATIO:
        return found
    return found._replace(ratio=MIN_RATIO, margin=found.margin + 1 - found.ratio / MIN_RATIO)


def compute_memory_interval(cluster: Cluster, spec: JobSpec, found: Correction | None, peak_bytes: int) -> Interval:
    """Of the fullest rank's peak: from the host's runs, as `memory_correction` has them, or from peaks that others
    published of the spec's stack; of a GPU from both, as runs tell its tensors alone."""
    share, beside = _within(cluster, spec, found)
    share += beside / peak_bytes
    basis, runs, seen = ("runs", found.runs, f"from {found.runs} runs here") if found else ("counted", 0, "counted")
    if cluster.device == "cpu":
        words = seen if found else "counted tensors plus process memory"
    else:
        stack = STACKS[spec.resources.stack]
        words = f"tensors {seen}, {stack.title if stack.memory_margin < 1 else f'{stack.title} without a known peak'}"
    return Interval(share=share, basis=basis, runs=runs, words=f"{words}, {format_margin(share)}")


def _within(cluster: Cluster, spec: JobSpec, found: Correction | None) -> tuple[float, int]:
    """How far off a peak is: a share of it, and bytes beside."""
    if cluster.device == "cpu":
        return (CPU_MEMORY_MARGIN, MIN_TENSOR_BYTES) if found is None else (found.margin, 0)
    return STACKS[spec.resources.stack].memory_margin + (found.margin if found else 0.0), UNMODELED_BYTES


def get_safe_peak_bytes(cluster: Cluster, spec: JobSpec, found: Correction | None, room: int) -> int:
    """The highest peak that fits `room` even where it is told too low by all of its interval; all of the room where
    so little is known of the stack that nothing worth asking for would."""
    share, beside = _within(cluster, spec, found)
    return room if share > MAX_KNOWN_MARGIN else max(0, int((room - beside) / (1 + share)))


def compute_tensor_bytes(spec: JobSpec) -> int:
    """Of the fullest rank."""
    plan = resolve(spec)
    return max(sum(get_memory(plan, stage).values()) for stage in range(spec.layout.pp))


class MeasuredLink(NamedTuple):
    """A link as calls showed it, seconds before a call, and whether they told its rate: else it is the data sheet's."""

    link: Link
    base_s: float
    has_rate: bool


def fit_link(runs: Sequence[MeasuredRun], cluster: Cluster) -> MeasuredLink | None:
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
            if measures_link(point):
                seen[point.op, point.group_size, point.payload_bytes].append(point.seconds)
    took = {call: median(seconds) for call, seconds in seen.items()}
    if max((get_bus_factor(op, size) * payload for op, size, payload in took), default=0.0) < MIN_RATE_BYTES:
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
    if byte_s * shown >= MIN_BYTE_SHARE:
        return _link(1 / byte_s, 1.0, latency_s, tells_rate=True)
    sheet = cluster.node
    if sheet.bytes_per_s * sheet.efficiency < shown:
        return _link(shown, 1.0, _latency(calls, shown), tells_rate=True)
    latency_s = _latency(calls, sheet.bytes_per_s * sheet.efficiency)
    return _link(sheet.bytes_per_s, sheet.efficiency, latency_s, tells_rate=False)


def _link(bytes_per_s: float, efficiency: float, latency_s: float, *, tells_rate: bool) -> MeasuredLink:
    latency_s = max(latency_s, MIN_LATENCY_S)
    link = Link(bytes_per_s=bytes_per_s, efficiency=efficiency, latency_s=latency_s)
    return MeasuredLink(link, latency_s, tells_rate)


def _slower(cluster: Cluster, times: float) -> MeasuredLink:
    """The cluster's link, so many times slower."""
    sheet = cluster.node
    rate = sheet.bytes_per_s * sheet.efficiency / times
    link = Link(bytes_per_s=rate, efficiency=1.0, latency_s=sheet.latency_s * times)
    return MeasuredLink(link, cluster.base_s * times, True)


def _seconds(call: tuple[Op, int, int], cluster: Cluster) -> float:
    op, size, payload = call
    return compute_collective_seconds(op, payload, NodeSpan(size, 1), cluster)


def measures_link(point: LinkPoint) -> bool:
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
    if det <= MIN_SIZE_SPREAD * aa * bb:
        return None
    x = (a1 * bb - b1 * ab) / det
    return (x, (b1 * aa - a1 * ab) / det) if x > 0 else (0.0, b1 / bb)


def _latency(calls: Sequence[tuple[float, float]], bytes_per_s: float) -> float:
    """The x nearest to that where the rate is known."""
    return sum(a * (1 - b / bytes_per_s) for a, b in calls) / sum(a * a for a, _ in calls)


MIN_RUNS = 3  # runs: fewer do not show how far runs lie apart
MAX_RUNS = 32  # of the newest: what a host was long ago says little
MIN_MARGIN = 0.01  # that later runs may be off by, however alike those before were
COVERAGE = 0.9  # share of later runs that lies within an interval
# The worst of a few runs is not the worst of ten: by how much it is widened for SURE to hold, found by drawing runs at
# random from a lognormal distribution (its width does not matter; tests/planner/test_learning.py draws again).
MARGIN_FACTORS = {3: 2.1, 4: 1.5, 5: 1.33, 6: 1.17, 7: 1.08}
# Of a step's time on a host calibrated in the spec's type of products, where no run tells: the worst of 60 layouts
# (docs/reference/measured.md).
CALIBRATED_MARGIN = 0.31
# Where its sequences are longer than those of the calibration, unfused, or divided over cp: the worst of 7 layouts of
# llama-tiny on 2 cores whose other layouts took 1.6 to 2.1 times as long that hour took 2.6 (2026-11-28).
EXTRAPOLATED_MARGIN = 2.0
# The CPU core of a data sheet is nobody's, and ranks may share one: 4 ranks on 2 slow cores took 3.4 to 4.3 times as
# long, and beside other runs 9.0 (2026-11-23, gpt-tiny).
UNCALIBRATED_CPU_MARGIN = 9.0


class Correction(NamedTuple):
    """Measured over predicted, the median of `runs`; `SURE` of later ones come out within `share` of what is told.

    `share` follows from how far each run lay from what the others said of it: 0.06 is 6%. `borrowed`: the runs had
    other numbers of ranks, and what they say of how far this one is off is no interval.
    """

    ratio: float
    margin: float
    runs: int
    has_other_sizes: bool = False


class Interval(TypedDict):
    """Margin of error of a figure. `words`: the basis of the figure, and the margin.

    `share`: relative margin. Above 1, the figure is correct within a factor of 1 + `share`.
    """

    share: float
    basis: str
    runs: int
    words: str


def compute_error(measured: float, told: float) -> float:
    """The least share of an interval about what was told that holds the measured figure."""
    return abs(measured / told - 1)


def is_within_margin(share: float, measured: float, told: float) -> bool:
    """Whether the figure lies in the interval that is shown."""
    low = told / (1 + share) if share > 1 else told * (1 - share)
    return low <= measured <= told * (1 + share)


def format_margin(share: float) -> str:
    """Return the margin of error in words: "±19%", or above 100% "within a factor of 5"."""
    return f"within a factor of {1 + share:.2g}" if share > 1 else f"±{share:.0%}"


def compute_correction(ratios: Sequence[float]) -> Correction | None:
    """None from fewer than FEWEST ratios of measured over predicted."""
    if len(ratios) < MIN_RUNS:
        return None
    off = sorted(compute_error(ratio, median([*ratios[:i], *ratios[i + 1 :]])) for i, ratio in enumerate(ratios))
    place = min(len(off), math.ceil(COVERAGE * (len(off) + 1)))
    share = max(MIN_MARGIN, off[place - 1] * MARGIN_FACTORS.get(len(off), 1.0))
    return Correction(median(ratios), share, len(ratios))


class RunGroup(NamedTuple):
    """The facts of a spec that comparable runs share."""

    stack: StackName
    world_size: int
    precision: Precision
    compiles: bool


def get_run_group(spec: JobSpec | ResolvedPlan) -> RunGroup:
    """Return the group of comparable runs that a spec belongs to."""
    return RunGroup(spec.resources.stack, spec.layout.world_size, spec.train.precision, spec.train.compile)


def find_comparable_runs(model: ModelSpec, group: RunGroup, runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """Return the newest runs of a group, only those of the model if there are enough.

    Args:
        runs: runs of one host, newest first.
    """
    like = [run for run in runs if get_run_group(run.spec) == group]
    sizes = model.model_copy(update={"preset": None})
    same = [run for run in like if run.spec.model == sizes]
    return (same if len(same) >= MIN_RUNS else like)[:MAX_RUNS]


def find_correction(
    model: ModelSpec, group: RunGroup, runs: Sequence[MeasuredRun], predict_s: Callable[[JobSpec], float]
) -> Correction | None:
    """Return the correction of predicted step times from comparable runs.

    If these are too few, runs with the nearest numbers of ranks correct too, so that all layouts of a host compare.
    """
    found = compute_correction([run.step_s / predict_s(run.spec) for run in find_comparable_runs(model, group, runs)])
    if found is not None:
        return found
    near = compute_correction([run.step_s / predict_s(run.spec) for run in _find_nearest(group, runs)])
    return near and near._replace(has_other_sizes=True)


def _find_nearest(group: RunGroup, runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """Return runs with the nearest numbers of ranks, until there are FEWEST."""
    by_ranks: dict[int, list[MeasuredRun]] = defaultdict(list)
    for run in runs:
        other = get_run_group(run.spec)
        if other._replace(world_size=group.world_size) == group:
            by_ranks[other.world_size].append(run)
    found: list[MeasuredRun] = []
    for ranks in sorted(by_ranks, key=lambda ranks: abs(math.log(ranks / group.world_size))):
        if len(found) >= MIN_RUNS:
            break
        found += by_ranks[ranks][:MAX_RUNS]
    return found


def _extends(profile: HostProfile, spec: JobSpec) -> bool:
    """Whether its attention is estimated, beyond what was timed."""
    longest = max((layer.seq_len for layer in profile.layers), default=0)
    return spec.train.seq_len > longest or spec.train.attention != "fused" or spec.layout.cp > 1


def compute_time_interval(cluster: Cluster, spec: JobSpec, found: Correction | None, host_share: float) -> Interval:
    """Of a step's time: from the host's runs, from a calibration, or from the published rows of the spec's stack.

    `host_share`: of the step, that its device waits for its host.
    """
    stack = spec.resources.stack
    basis, kind = cluster.basis, get_mixed_precision(spec.train.precision).gemm
    scaled = ""
    if found is not None and found.has_other_sizes:
        scaled, found = f", scaled by {found.runs} runs here with other rank counts", None
    timed = cluster.profile is not None and cluster.profile.has_layers_in(kind)
    if found is None and cluster.profile is not None and timed and _extends(cluster.profile, spec):
        words = f"{basis} with shorter sequences, one rank, and fused attention, {format_margin(EXTRAPOLATED_MARGIN)}"
        return Interval(share=EXTRAPOLATED_MARGIN, basis=basis, runs=0, words=words)
    if found is None and timed:
        return Interval(share=CALIBRATED_MARGIN, basis=basis, runs=0, words=f"{basis}, ±{CALIBRATED_MARGIN:.0%}")
    if found is None and cluster.device == "cpu":
        what = f"no {kind} calibration" if cluster.profile else "an uncalibrated CPU"
        words = f"{what}{_links(cluster, spec)}{scaled}, {format_margin(UNCALIBRATED_CPU_MARGIN)}"
        return Interval(share=UNCALIBRATED_CPU_MARGIN, basis=basis, runs=0, words=words)
    if found is None:
        told = spec.resources.software is not None
        share = get_time_margin(stack, cluster.accelerator.name, host_share, has_options=told)
        title = f"{STACKS[stack].title}{format_software(spec.resources.software)}"
        elsewhere = "" if was_measured(stack, cluster.accelerator.name) else " without a measured step on this device"
        why = f"{title}{elsewhere}{_widened(cluster, spec)}{_waits(host_share)}"
        words = f"{basis}{_links(cluster, spec)}{scaled}, {why}, {format_margin(share)}"
        return Interval(share=share, basis=basis, runs=0, words=words)
    words = f"from {found.runs} runs here, {format_margin(found.margin)}"
    return Interval(share=found.margin, basis="runs", runs=found.runs, words=words)


def _widened(cluster: Cluster, spec: JobSpec) -> str:
    """That what is asked in fp8 or fp4 is planned in 16 or 8 bits, for the device multiplies nothing narrower."""
    chip, software = cluster.accelerator, spec.resources.software
    if get_mixed_precision(spec.train.precision).gemm != "fp8":
        return ""
    if not chip.fp8_flops:
        return f", 16-bit matmuls because {chip.name} lacks fp8"
    lacks = software is not None and software.nvfp4 and not chip.fp4_flops
    return f", fp8 matmuls because {chip.name} lacks fp4" if lacks else ""


def _waits(host_share: float) -> str:
    """That the device waits for a host whose speed no spec tells."""
    return f", {host_share:.0%} of the step waits for the host" if host_share >= HOST_MARGINS[-1][0] else ""


def _links(cluster: Cluster, spec: JobSpec) -> str:
    """Of runs too few to correct a step: that the links between its ranks are theirs already."""
    if not cluster.link_runs or spec.layout.world_size == 1:
        return ""
    inside = " inside a host" if spec.layout.world_size > cluster.per_node else ""
    what = "links" if cluster.num_rate_runs else "link latency"
    return f", {what}{inside} from {cluster.link_runs} run{'s' if cluster.link_runs > 1 else ''} here"
