"""What the runs of a host say of the planner's errors there: by how much to correct, and how sure that is."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from typing_extensions import TypedDict

from planner.cost.resolved_plan import ResolvedPlan
from planner.facts.precision import get_mixed_precision
from planner.facts.resources import StackName, format_software
from planner.facts.spec import JobSpec, ModelSpec, Precision
from planner.hardware.cluster import Cluster
from planner.hardware.profile import HostProfile, MeasuredRun
from planner.hardware.stack_options import HOST_WITHIN, was_measured, within
from planner.hardware.stacks import STACKS

FEWEST = 3  # runs: fewer do not show how far runs lie apart
MOST = 32  # of the newest: what a host was long ago says little
LEAST_SHARE = 0.01  # that later runs may be off by, however alike those before were
SURE = 0.9  # share of later runs that lies within an interval
# The worst of a few runs is not the worst of ten: by how much it is widened for SURE to hold, found by drawing runs at
# random from a lognormal distribution (its width does not matter; tests/planner/test_learning.py draws again).
WIDER = {3: 2.1, 4: 1.5, 5: 1.33, 6: 1.17, 7: 1.08}
# Of a step's time on a host calibrated in the spec's type of products, where no run tells: the worst of 60 layouts
# (docs/reference/measured.md).
CALIBRATED = 0.31
# Where its sequences are longer than those of the calibration, unfused, or divided over cp: the worst of 7 layouts of
# llama-tiny on 2 cores whose other layouts took 1.6 to 2.1 times as long that hour took 2.6 (2026-11-28).
EXTENDED = 2.0
# The CPU core of a data sheet is nobody's, and ranks may share one: 4 ranks on 2 slow cores took 3.4 to 4.3 times as
# long, and beside other runs 9.0 (2026-11-23, gpt-tiny).
ANY_CPU = 9.0


class Correction(NamedTuple):
    """Measured over predicted, the median of `runs`; `SURE` of later ones come out within `share` of what is told.

    `share` follows from how far each run lay from what the others said of it: 0.06 is 6%. `borrowed`: the runs had
    other numbers of ranks, and what they say of how far this one is off is no interval.
    """

    ratio: float
    share: float
    runs: int
    borrowed: bool = False


class Interval(TypedDict):
    """Margin of error of a figure. `words`: the basis of the figure, and the margin.

    `share`: relative margin. Above 1, the figure is correct within a factor of 1 + `share`.
    """

    share: float
    basis: str
    runs: int
    words: str


def apart(measured: float, told: float) -> float:
    """The least share of an interval about what was told that holds the measured figure."""
    return abs(measured / told - 1)


def holds(share: float, measured: float, told: float) -> bool:
    """Whether the figure lies in the interval that is shown."""
    low = told / (1 + share) if share > 1 else told * (1 - share)
    return low <= measured <= told * (1 + share)


def sureness(share: float) -> str:
    """Return the margin of error in words: "±19%", or above 100% "within a factor of 5"."""
    return f"within a factor of {1 + share:.2g}" if share > 1 else f"±{share:.0%}"


def correction_of(ratios: Sequence[float]) -> Correction | None:
    """None from fewer than FEWEST ratios of measured over predicted."""
    if len(ratios) < FEWEST:
        return None
    off = sorted(apart(ratio, median([*ratios[:i], *ratios[i + 1 :]])) for i, ratio in enumerate(ratios))
    place = min(len(off), math.ceil(SURE * (len(off) + 1)))
    share = max(LEAST_SHARE, off[place - 1] * WIDER.get(len(off), 1.0))
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


def comparable(model: ModelSpec, group: RunGroup, runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """Return the newest runs of a group, only those of the model if there are enough.

    Args:
        runs: runs of one host, newest first.
    """
    like = [run for run in runs if get_run_group(run.spec) == group]
    sizes = model.model_copy(update={"preset": None})
    same = [run for run in like if run.spec.model == sizes]
    return (same if len(same) >= FEWEST else like)[:MOST]


def corrected_by(
    model: ModelSpec, group: RunGroup, runs: Sequence[MeasuredRun], predict_s: Callable[[JobSpec], float]
) -> Correction | None:
    """Return the correction of predicted step times from comparable runs.

    If these are too few, runs with the nearest numbers of ranks correct too, so that all layouts of a host compare.
    """
    found = correction_of([run.step_s / predict_s(run.spec) for run in comparable(model, group, runs)])
    if found is not None:
        return found
    near = correction_of([run.step_s / predict_s(run.spec) for run in _find_nearest(group, runs)])
    return near and near._replace(borrowed=True)


def _find_nearest(group: RunGroup, runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """Return runs with the nearest numbers of ranks, until there are FEWEST."""
    by_ranks: dict[int, list[MeasuredRun]] = defaultdict(list)
    for run in runs:
        other = get_run_group(run.spec)
        if other._replace(world_size=group.world_size) == group:
            by_ranks[other.world_size].append(run)
    found: list[MeasuredRun] = []
    for ranks in sorted(by_ranks, key=lambda ranks: abs(math.log(ranks / group.world_size))):
        if len(found) >= FEWEST:
            break
        found += by_ranks[ranks][:MOST]
    return found


def _extends(profile: HostProfile, spec: JobSpec) -> bool:
    """Whether its attention is estimated, beyond what was timed."""
    longest = max((layer.seq_len for layer in profile.layers), default=0)
    return spec.train.seq_len > longest or spec.train.attention != "fused" or spec.layout.cp > 1


def interval(cluster: Cluster, spec: JobSpec, found: Correction | None, host_share: float) -> Interval:
    """Of a step's time: from the host's runs, from a calibration, or from the published rows of the spec's stack.

    `host_share`: of the step, that its device waits for its host.
    """
    stack = spec.resources.stack
    basis, kind = cluster.basis, get_mixed_precision(spec.train.precision).gemm
    scaled = ""
    if found is not None and found.borrowed:
        scaled, found = f", scaled by {found.runs} runs here with other rank counts", None
    timed = cluster.profile is not None and cluster.profile.has_layers_in(kind)
    if found is None and cluster.profile is not None and timed and _extends(cluster.profile, spec):
        words = f"{basis} with shorter sequences, one rank, and fused attention, {sureness(EXTENDED)}"
        return Interval(share=EXTENDED, basis=basis, runs=0, words=words)
    if found is None and timed:
        return Interval(share=CALIBRATED, basis=basis, runs=0, words=f"{basis}, ±{CALIBRATED:.0%}")
    if found is None and cluster.device == "cpu":
        what = f"no {kind} calibration" if cluster.profile else "an uncalibrated CPU"
        words = f"{what}{_links(cluster, spec)}{scaled}, {sureness(ANY_CPU)}"
        return Interval(share=ANY_CPU, basis=basis, runs=0, words=words)
    if found is None:
        told = spec.resources.software is not None
        share = within(stack, cluster.accelerator.name, host_share, told=told)
        title = f"{STACKS[stack].title}{format_software(spec.resources.software)}"
        elsewhere = "" if was_measured(stack, cluster.accelerator.name) else " without a measured step on this device"
        why = f"{title}{elsewhere}{_widened(cluster, spec)}{_waits(host_share)}"
        words = f"{basis}{_links(cluster, spec)}{scaled}, {why}, {sureness(share)}"
        return Interval(share=share, basis=basis, runs=0, words=words)
    words = f"from {found.runs} runs here, {sureness(found.share)}"
    return Interval(share=found.share, basis="runs", runs=found.runs, words=words)


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
    return f", {host_share:.0%} of the step waits for the host" if host_share >= HOST_WITHIN[-1][0] else ""


def _links(cluster: Cluster, spec: JobSpec) -> str:
    """Of runs too few to correct a step: that the links between its ranks are theirs already."""
    if not cluster.link_runs or spec.layout.world_size == 1:
        return ""
    inside = " inside a host" if spec.layout.world_size > cluster.per_node else ""
    what = "links" if cluster.num_rate_runs else "link latency"
    return f", {what}{inside} from {cluster.link_runs} run{'s' if cluster.link_runs > 1 else ''} here"
