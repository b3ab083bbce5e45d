"""Correct predicted step times, peak memory, and links with finished runs of a host, each with a margin of error."""

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

MIN_TENSOR_BYTES = 2**28  # of a rank; below, the memory of the process itself exceeds the allocator's overhead
MIN_RATE_BYTES = 2**16  # on the wire; below, a call measures the latency of a link, not its rate
MIN_LATENCY_S = 1e-7
# Determinant over its maximum. Below, sizes differ by less than about 40%, and noise dominates the fit.
MIN_SIZE_SPREAD = 0.02
MIN_BYTE_SHARE = 0.5  # of the time of the fastest call; below, noise of the latency dominates the rate
CPU_MEMORY_MARGIN = 0.1  # of a process' resident set: the worst of six layouts (docs/reference/measured.md)
MIN_RATIO = 1.001  # of a peak to its tensors: a process always holds other memory too
MAX_KNOWN_MARGIN = 0.5  # of a peak; a wider interval is no reason to leave memory free


def apply_runs(cluster: Cluster, runs: Sequence[MeasuredRun]) -> Cluster:
    """Return the cluster of one host, with links and memory as its finished `runs` show them, the newest first.

    `planner.cost.timing` corrects step times. The links of a calibration stay, because it measures calls separately.
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
        num_runs = sum(any(measures_link(point) for point in run.links) for run in runs)
        update |= {"node": seen.link, "base_s": seen.base_s, "link_runs": num_runs}
        update["latency_alone"] = not seen.has_rate
    return cluster.model_copy(update=update)


def compute_memory_correction(runs: Sequence[MeasuredRun]) -> Correction | None:
    """Return peak memory over that of tensors, from runs that are large enough.

    A ratio below MIN_RATIO is raised to it, with a margin that still contains the measured ratio.
    """
    ratios = []
    for run in runs:
        tensors = compute_tensor_bytes(run.spec)
        has_copies = run.tells_copies or run.spec.resources.device != "cpu"
        if has_copies and run.peak_bytes is not None and tensors >= MIN_TENSOR_BYTES:
            ratios.append(run.peak_bytes / tensors)
    found = compute_correction(ratios)
    if found is None or found.ratio >= MIN_RATIO:
        return found
    return found._replace(ratio=MIN_RATIO, margin=found.margin + 1 - found.ratio / MIN_RATIO)


def compute_memory_interval(cluster: Cluster, spec: JobSpec, found: Correction | None, peak_bytes: int) -> Interval:
    """Return the interval of the fullest rank's peak: from runs of the host, or from published peaks of the stack.

    Runs on a GPU measure only tensors, so both margins add up.
    """
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
    """Return the margin of a peak: a fraction of it, and bytes in addition."""
    if cluster.device == "cpu":
        return (CPU_MEMORY_MARGIN, MIN_TENSOR_BYTES) if found is None else (found.margin, 0)
    return STACKS[spec.resources.stack].memory_margin + (found.margin if found else 0.0), UNMODELED_BYTES


def get_safe_peak_bytes(cluster: Cluster, spec: JobSpec, found: Correction | None, room: int) -> int:
    """Return the highest predicted peak that fits `room` with its margin, or `room` if the margin is unknown."""
    share, beside = _within(cluster, spec, found)
    return room if share > MAX_KNOWN_MARGIN else max(0, int((room - beside) / (1 + share)))


def compute_tensor_bytes(spec: JobSpec) -> int:
    """Return the bytes of the tensors of the fullest rank."""
    plan = resolve(spec)
    return max(sum(get_memory(plan, stage).values()) for stage in range(spec.layout.pp))


class MeasuredLink(NamedTuple):
    """A link as calls show it, and the startup time of a call. `has_rate`: the calls determine its rate."""

    link: Link
    base_s: float
    has_rate: bool


def fit_link(runs: Sequence[MeasuredRun], cluster: Cluster) -> MeasuredLink | None:
    """Return the link between ranks that fits their calls best, or None without a large call.

    Each different call counts with its median over all runs. The model is `compute_collective_seconds`. The rate is
    at least the bytes over seconds of the fastest call. Calls of different sizes, in which bytes take most of the
    time, determine the rate beyond that. If all calls have similar sizes, the link of `cluster` is scaled by their mean
    slowdown. If larger calls take hardly longer, only the latency is measured. The rate stays that of the data
    sheet, or of the fastest call.
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
    """Return the link of the cluster, slowed down by a factor."""
    sheet = cluster.node
    rate = sheet.bytes_per_s * sheet.efficiency / times
    link = Link(bytes_per_s=rate, efficiency=1.0, latency_s=sheet.latency_s * times)
    return MeasuredLink(link, cluster.base_s * times, True)


def _seconds(call: tuple[Op, int, int], cluster: Cluster) -> float:
    op, size, payload = call
    return compute_collective_seconds(op, payload, NodeSpan(size, 1), cluster)


def measures_link(point: LinkPoint) -> bool:
    """Return whether the time of a call is that of its link. A recv waits for its sender."""
    return point.op != "recv"


def _latencies(op: Op, group_size: int) -> int:
    """Return how many latencies of a link a call inside a node takes, including its startup."""
    if op in ("send", "recv"):
        return 2
    return 1 + (2 if op == "all_reduce" else 1) * (group_size - 1)


def _nearest(calls: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Return (x, y), x >= 0, with a x + b y closest to 1 by least squares, or None if all (a, b) are similar."""
    aa, bb, ab = sum(a * a for a, _ in calls), sum(b * b for _, b in calls), sum(a * b for a, b in calls)
    a1, b1 = sum(a for a, _ in calls), sum(b for _, b in calls)
    det = aa * bb - ab * ab
    if det <= MIN_SIZE_SPREAD * aa * bb:
        return None
    x = (a1 * bb - b1 * ab) / det
    return (x, (b1 * aa - a1 * ab) / det) if x > 0 else (0.0, b1 / bb)


def _latency(calls: Sequence[tuple[float, float]], bytes_per_s: float) -> float:
    """Return the latency that fits the calls best, for a given rate."""
    return sum(a * (1 - b / bytes_per_s) for a, b in calls) / sum(a * a for a, _ in calls)


MIN_RUNS = 3  # fewer do not show how much runs differ
MAX_RUNS = 32  # the newest; older runs say little about a host
MIN_MARGIN = 0.01  # of later runs, even if earlier runs were almost equal
COVERAGE = 0.9  # fraction of later runs inside an interval
# Factors on the worst error of a few runs that give COVERAGE, from samples of a lognormal distribution. Its width does
# not matter (tests/planner/test_learning.py).
MARGIN_FACTORS = {3: 2.1, 4: 1.5, 5: 1.33, 6: 1.17, 7: 1.08}
# Margin of a step time without runs on a host that is calibrated for the matmul type: the worst of 60 layouts
# (docs/reference/measured.md).
CALIBRATED_MARGIN = 0.31
# With longer sequences than the calibration, unfused attention, or cp: in 7 layouts of llama-tiny on 2 cores the worst
# took 2.6 times as long as predicted, while other layouts took 1.6 to 2.1 times as long (2026-11-28).
EXTRAPOLATED_MARGIN = 2.0
# An uncalibrated CPU, whose ranks may share a core: 4 ranks on 2 slow cores took 3.4 to 4.3 times as long as predicted,
# and 9.0 times next to other runs (2026-11-23, gpt-tiny).
UNCALIBRATED_CPU_MARGIN = 9.0


class Correction(NamedTuple):
    """Measured over predicted time or memory: the median of `runs`, and the margin of later runs.

    `margin` holds for COVERAGE of later runs: 0.06 is 6%. With `has_other_sizes`, the runs had other numbers of ranks,
    so their margin is no interval. With `is_from_user`, `runs` counts measured steps that a user entered.
    """

    ratio: float
    margin: float
    runs: int
    has_other_sizes: bool = False
    is_from_user: bool = False


class Interval(TypedDict):
    """Margin of error of a figure. `words`: the basis of the figure, and the margin.

    `share`: relative margin. Above 1, the figure is correct within a factor of 1 + `share`.
    """

    share: float
    basis: str
    runs: int
    words: str


def compute_error(measured: float, predicted: float) -> float:
    """Return the relative error of a prediction."""
    return abs(measured / predicted - 1)


def is_within_margin(share: float, measured: float, predicted: float) -> bool:
    """Return whether a measured figure is in the interval of a prediction."""
    low = predicted / (1 + share) if share > 1 else predicted * (1 - share)
    return low <= measured <= predicted * (1 + share)


def format_margin(share: float) -> str:
    """Return the margin of error in words: "±19%", or above 100% "within a factor of 5"."""
    return f"within a factor of {1 + share:.2g}" if share > 1 else f"±{share:.0%}"


def compute_correction(ratios: Sequence[float]) -> Correction | None:
    """Return the correction from ratios of measured over predicted, or None below MIN_RUNS."""
    if len(ratios) < MIN_RUNS:
        return None
    off = sorted(compute_error(ratio, median([*ratios[:i], *ratios[i + 1 :]])) for i, ratio in enumerate(ratios))
    place = min(len(off), math.ceil(COVERAGE * (len(off) + 1)))
    share = max(MIN_MARGIN, off[place - 1] * MARGIN_FACTORS.get(len(off), 1.0))
    return Correction(median(ratios), share, len(ratios))


REFERENCE_WEIGHT = 0.4  # of the prediction itself, relative to one measured step
# Margins of error after one and two measured steps of the same model (`python -m benchmarks.published`).
REFERENCE_MARGINS = (0.35, 0.3)


def scale_to_measured(ratios: Sequence[float]) -> Correction:
    """Return the correction from measured steps of a user's software, as ratios of measured over predicted.

    Layouts of one stack differ too, so a few steps correct only a part of their own error.
    """
    weight = len(ratios) / (len(ratios) + REFERENCE_WEIGHT)
    ratio = math.exp(weight * sum(math.log(one) for one in ratios) / len(ratios))
    margin = REFERENCE_MARGINS[min(len(ratios), len(REFERENCE_MARGINS)) - 1]
    return Correction(ratio, margin, len(ratios), is_from_user=True)


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
    """Return whether a spec needs attention that the calibration did not measure."""
    longest = max((layer.seq_len for layer in profile.layers), default=0)
    return spec.train.seq_len > longest or spec.train.attention != "fused" or spec.layout.cp > 1


def compute_time_interval(cluster: Cluster, spec: JobSpec, found: Correction | None, host_share: float) -> Interval:
    """Return the interval of a step time: from measured steps, runs, a calibration, or published rows of the stack.

    REFERENCE_MARGINS hold on GPUs with published steps of the stack. Elsewhere, measured steps keep the interval.

    `host_share`: fraction of the step in which the device waits for its host.
    """
    stack = spec.resources.stack
    basis, kind = cluster.basis, get_mixed_precision(spec.train.precision).gemm
    scaled = ""
    if found is not None and found.has_other_sizes:
        scaled, found = f", scaled by {found.runs} runs here with other rank counts", None
    if found is not None and found.is_from_user:
        steps = f"{found.runs} measured step{'s' if found.runs > 1 else ''}"
        if cluster.device == "cuda" and cluster.profile is None and was_measured(stack, cluster.accelerator.name):
            words = f"from {steps}, {format_margin(found.margin)}"
            return Interval(share=found.margin, basis="measured steps", runs=found.runs, words=words)
        scaled, found = f", scaled by {steps}", None
    timed = cluster.profile is not None and cluster.profile.has_layers_in(kind)
    if found is None and cluster.profile is not None and timed and _extends(cluster.profile, spec):
        what = f"{basis} with shorter sequences, one rank, and fused attention{scaled}"
        words = f"{what}, {format_margin(EXTRAPOLATED_MARGIN)}"
        return Interval(share=EXTRAPOLATED_MARGIN, basis=basis, runs=0, words=words)
    if found is None and timed:
        words = f"{basis}{scaled}, ±{CALIBRATED_MARGIN:.0%}"
        return Interval(share=CALIBRATED_MARGIN, basis=basis, runs=0, words=words)
    if found is None and cluster.device == "cpu":
        what = f"no {kind} calibration" if cluster.profile else "an uncalibrated CPU"
        words = f"{what}{_links(cluster, spec)}{scaled}, {format_margin(UNCALIBRATED_CPU_MARGIN)}"
        return Interval(share=UNCALIBRATED_CPU_MARGIN, basis=basis, runs=0, words=words)
    if found is None:
        has_options = spec.resources.software is not None
        share = get_time_margin(stack, cluster.accelerator.name, host_share, has_options=has_options)
        title = f"{STACKS[stack].title}{format_software(spec.resources.software)}"
        elsewhere = "" if was_measured(stack, cluster.accelerator.name) else " without a measured step on this device"
        why = f"{title}{elsewhere}{_widened(cluster, spec)}{_waits(host_share)}"
        words = f"{basis}{_links(cluster, spec)}{scaled}, {why}, {format_margin(share)}"
        return Interval(share=share, basis=basis, runs=0, words=words)
    words = f"from {found.runs} runs here, {format_margin(found.margin)}"
    return Interval(share=found.margin, basis="runs", runs=found.runs, words=words)


def _widened(cluster: Cluster, spec: JobSpec) -> str:
    """Return a note if the device lacks fp8 or fp4, so that matmuls use a wider type."""
    chip, software = cluster.accelerator, spec.resources.software
    if get_mixed_precision(spec.train.precision).gemm != "fp8":
        return ""
    if not chip.fp8_flops:
        return f", 16-bit matmuls because {chip.name} lacks fp8"
    lacks = software is not None and software.nvfp4 and not chip.fp4_flops
    return f", fp8 matmuls because {chip.name} lacks fp4" if lacks else ""


def _waits(host_share: float) -> str:
    """Return a note about the time that the device waits for a host of unknown speed."""
    return f", {host_share:.0%} of the step waits for the host" if host_share >= HOST_MARGINS[-1][0] else ""


def _links(cluster: Cluster, spec: JobSpec) -> str:
    """Return a note that earlier runs measured the links, if there are too few to correct a step."""
    if not cluster.link_runs or spec.layout.world_size == 1:
        return ""
    inside = " inside a host" if spec.layout.world_size > cluster.per_node else ""
    what = "links" if cluster.num_rate_runs else "link latency"
    return f", {what}{inside} from {cluster.link_runs} run{'s' if cluster.link_runs > 1 else ''} here"
